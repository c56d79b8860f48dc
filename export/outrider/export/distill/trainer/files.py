"""Writes state files so that a killed process leaves the old file or the new one, never half of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch


def save_tensors(value: object, path: Path) -> None:
    """`torch.save`, replacing `path` atomically; read it with `load_tensors`.

    Raises OSError where the disk refuses it; torch reports that as a RuntimeError.
    """

    def write(file: BinaryIO) -> None:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            cause = error.__context__
            if isinstance(cause, OSError):
                raise cause from None
            raise

    _replace(path, write)


def load_tensors(path: Path, *, is_mapped: bool = False) -> Any:
    """Reads what `save_tensors` wrote, never executing code; with `is_mapped`, pages are read when used."""
    return torch.load(path, weights_only=True, mmap=is_mapped, map_location="cpu")


def save_json(value: object, path: Path) -> None:
    """Writes `value` as indented JSON, replacing the file atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    _replace(path, lambda file: file.write(text.encode()))


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
