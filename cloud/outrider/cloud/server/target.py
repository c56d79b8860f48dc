"""Defines what `outrider-cloud serve` needs of a target: its facts at once, its engine once it is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from outrider.cloud.api.state import ServedModel
from outrider.cloud.seam import ServingEngine


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target that can serve. engine: calibrated, not started. summary: what was loaded, in one line."""

    engine: ServingEngine
    summary: str


class Target(ABC):
    """A target that was checked and is not loaded yet.

    path: its directory. source_name: the name that draft bundles know it by; `--name` does not change it. model: what
    clients see of it. num_gpus: GPUs of CUDA that one copy of it opens.
    """

    path: Path
    source_name: str
    model: ServedModel
    num_gpus: int

    @abstractmethod
    def load(self) -> AbstractContextManager[LoadedTarget]:
        """Loads and calibrates it; at the end it is unloaded. Stop the engine before. Raises OutriderError."""
