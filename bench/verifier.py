"""Chooses the verifier that a benchmark runs: the embedded engine, or vLLM in an environment of its own.

vLLM runs no OpenVINO model, so its target is the same reference target as a safetensors bundle.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.plain_text import PlainModel
from bench.report import Options, option
from filelock import FileLock
from numpy.typing import NDArray

from outrider.export.make.pair import PairPaths
from outrider.export.make.pipeline import export_model
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.bundle import Bundle
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError, ConfigError
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.reference import target_dir

EMBEDDED: Final = "embedded"
VLLM: Final = "vllm"


@dataclass(frozen=True, slots=True)
class Verifier:
    """What `outrider-cloud serve` is started with. python: the interpreter that runs it."""

    engine: str = EMBEDDED
    python: str = field(default_factory=lambda: sys.executable)

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM verifies."""
        return self.engine == VLLM

    @property
    def options(self) -> tuple[str, ...]:
        """Arguments of the engine. Float32, so that texts can be compared; eager, because compiling takes a minute."""
        if not self.is_vllm:
            return ()
        return "--engine", "vllm", "--vllm-option", "dtype=float32", "--vllm-option", "enforce_eager=true"

    def pair(self, widen_mb: float | None) -> PairPaths:
        """The reference pair, its target in a format that the engine runs."""
        pair = export_reference_pair(widen_mb=widen_mb)
        return PairPaths(pair.draft, safetensors_target(widen_mb)) if self.is_vllm else pair

    def plain_model(self, target: Bundle) -> PlainModel:
        """What target-only text is computed by, one token per step."""
        if self.is_vllm:
            return TransformersModel(target.path)
        return open_batch_runtime(target.manifest.runtime, target.model_file, RuntimeOptions(num_threads=1))


VERIFIER_OPTIONS: Final[Options] = {
    "--engine": option(EMBEDDED, "of the verifier", choices=(EMBEDDED, VLLM)),
    "--server": option(metavar="PYTHON", help="runs the verifier; needed with --engine vllm"),
}


def verifier_of(options: argparse.Namespace) -> Verifier:
    """The verifier that the options name. Raises ConfigError."""
    return make_verifier(options.engine, options.server)


def make_verifier(engine: str, server: str | None) -> Verifier:
    """The same for options that were read already."""
    if server is None:
        if engine == VLLM:
            raise ConfigError("vLLM has an environment of its own; give its interpreter with --server")
        return Verifier()
    python = shutil.which(server)
    if python is None:
        raise ConfigError(f"there is no interpreter {server}; give the path of one")
    return Verifier(engine, str(Path(python).absolute()))  # not resolved: a link stands for its environment


def safetensors_target(widen_mb: float | None) -> Path:
    """The bundle, exported where this cache has no intact one."""
    place = default_cache_dir() / "pairs" / f"safetensors-{widen_mb or 0:g}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        try:
            Bundle.open(place)
        except BundleError:
            options = ExportOptions("target", "fp32", "torch", widen_mb=widen_mb, overwrite=True)
            export_model(target_dir(), place, options)
    return place


class TransformersModel:
    """One sequence by transformers, for plain text: no engine, no kernels of ours. It knows no blocks."""

    num_blocks = 1

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._past: Any = None

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Logits [1, V] after the tokens of the one sequence, which goes on where the last call ended, or anew."""
        import torch

        (part,) = batch
        if part.past == 0:
            self._past = None
        with torch.no_grad():
            out = self._model(torch.tensor([list(part.tokens)]), past_key_values=self._past, use_cache=True)
        self._past = out.past_key_values
        rows: NDArray[np.float32] = out.logits[0, -1:].numpy()
        return rows

    def close(self) -> None:
        """Nothing is held elsewhere."""
