"""Defines what `outrider-cloud serve` needs of a target: its facts at once, its engine once it is loaded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.cloud.api.state import ServedModel
from outrider.cloud.seam import ServingEngine


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target that can serve. engine: calibrated, not started. summary: what was loaded, in one line."""

    engine: ServingEngine
    summary: str


class Target(Protocol):
    """A target that was checked and is not loaded yet."""

    @property
    def path(self) -> Path:
        """Its directory."""
        ...

    @property
    def source_name(self) -> str:
        """The name that draft bundles know it by; `--name` does not change it."""
        ...

    @property
    def model(self) -> ServedModel:
        """What clients see of it."""
        ...

    @property
    def num_gpus(self) -> int:
        """GPUs of CUDA that one copy of it opens."""
        ...

    def load(self) -> AbstractContextManager[LoadedTarget]:
        """Loads and calibrates it; at the end it is unloaded. Stop the engine before. Raises OutriderError."""
        ...
