"""Locates the reference pair: a small target and a smaller draft, both trained on the Python standard library.

`target_dir()` and `draft_dir()` are standard Hugging Face directories, `load_prompts()` returns prompts from files that
neither model was trained on. The pair completes Python source plausibly; it is not a chat model. See MODEL_CARD.md.

Importing this package loads no model library. `reference/training` trains, evaluates and describes the
pair.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and where it comes from: `file` below the library's root, `line` of its first line, from 1.

    For a method, the prompt begins with its class line.
    """

    file: str
    line: int
    text: str


def pair_dir() -> Path:
    """The directory of the stored files: both models, prompts, held-out files, metrics, the model card."""
    return _HERE


def target_dir() -> Path:
    """The directory of the target: configuration, bfloat16 safetensors, tokenizer."""
    return _HERE / "target"


def draft_dir() -> Path:
    """The directory of the draft, with the same tokenizer."""
    return _HERE / "draft"


def load_prompts(limit: int | None = None) -> list[Prompt]:
    """The held-out prompts in a fixed shuffled order, so that the first `limit` are a fair sample.

    Raises `ValueError` when `limit` is negative.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit is {limit}; expected a count of prompts, or None for all")
    entries = json.loads((_HERE / "prompts.json").read_text(encoding="utf-8"))
    return [Prompt(**entry) for entry in entries[:limit]]
