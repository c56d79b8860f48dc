"""Defines the progress events of an export. The pipeline calls a function with them; showing them is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

STAGES: Final = ("read", "widen", "load", "convert", "quantize", "calibrate", "compile", "check", "measure", "write")
"""Every stage of an export, in order; an export skips what it does not need."""

_WORDS: Final = {
    "read": "reading and hashing the source",
    "widen": "widening, function unchanged",
    "load": "loading the source model in FP32",
    "convert": "converting",
    "quantize": "quantizing the weights",
    "calibrate": "calibrating and quantizing weights and activations",
    "compile": "compiling for the NPU ahead of time",
    "check": "checking against the source, in its own runtime",
    "measure": "measuring the acceptance rate",
    "write": "hashing and writing the bundle",
}


@dataclass(frozen=True, slots=True)
class StageEvent:
    """A stage begins. bundle: what is being made, such as "draft"; stage: one of STAGES."""

    bundle: str
    stage: str

    def __str__(self) -> str:
        return f"{self.bundle}: {_WORDS[self.stage]}"


Progress = Callable[[StageEvent], None]


def silent(event: StageEvent) -> None:
    """A progress function that shows nothing."""
