"""Writing state files so that a killed process leaves the old one or the new one, never half of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def save_tensors(value: object, path: Path) -> None:
    """`torch.save`, replacing `path` atomically. What it wrote is read with `load_tensors`."""
    _replace(path, lambda partial: torch.save(value, partial))


def load_tensors(path: Path, *, is_mapped: bool = False) -> Any:
    """Reads what `save_tensors` wrote, never executing code; with `is_mapped`, pages are read when used."""
    return torch.load(path, weights_only=True, mmap=is_mapped, map_location="cpu")


def save_json(value: object, path: Path) -> None:
    """Writes `value` as indented JSON, replacing the file atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    _replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)
