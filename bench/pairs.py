"""Opens what measurements by round trip compare: the widened reference pair, or the emulated one; and their texts.

The verifier of a real pair is the embedded engine, or vLLM in an environment of its own. vLLM runs no OpenVINO model,
so its target is the same reference target as a safetensors bundle.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.beside import EmulatedPair, RealPair, open_beside
from bench.emulated import VOCAB_SIZE, Emulation, emulated_cloud, emulated_draft
from bench.plain_text import PlainModel
from bench.report import Options, option
from bench.round_trips import Subject
from filelock import FileLock
from numpy.typing import NDArray

from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.edge.lab.laboratory import ALIKE, open_lab
from outrider.edge.results import GenerationRequest
from outrider.export.make.pair import PairPaths
from outrider.export.make.pipeline import export_model
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.recipes import ExportOptions
from outrider.export.report.simulation.world import Form
from outrider.models.bundle.bundle import Bundle
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError, ConfigError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

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


def kept_bundle(place: Path, source: Path, options: ExportOptions) -> Path:
    """The bundle at `place`, exported there where no intact one is. options: with `overwrite`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        try:
            Bundle.open(place)
        except BundleError:
            export_model(source, place, options)
    return place


def safetensors_target(widen_mb: float | None) -> Path:
    """The widened reference target for torch, in the user's cache."""
    options = ExportOptions("target", "fp32", "torch", widen_mb=widen_mb, overwrite=True)
    return kept_bundle(default_cache_dir() / "pairs" / f"safetensors-{widen_mb or 0:g}", target_dir(), options)


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


BUNDLE_OPTIONS: Final[Options] = {
    "--target": option(type=Path, help="another target bundle; it runs where it was exported for"),
    "--draft": option(type=Path, help="another draft bundle"),
    "--cores": option(1, "of the verifier, and of the devices; 0: both share all"),
}
"""For other bundles than the reference pair's, such as a target for a GPU, which is then used."""
REAL_OPTIONS: Final[Options] = {
    "--widen": option(1450.0, "MB of the widened FP32 target; 0: as it is"),
    **BUNDLE_OPTIONS,
    **VERIFIER_OPTIONS,
    "--prompts": option(3, "texts of a run, the same in every run"),
    "--max-tokens": option(100),
    "--temperature": option(0.8),
}
"""Of a real pair and its texts."""
_TIMES: Final = ("STEP_MS", "EXTRA_MS", "DRAFT_MS")
PAIR_OPTIONS: Final[Options] = {
    "--emulate": option(type=float, nargs=3, metavar=_TIMES, help="no real pair: sleeps for these times"),
    "--nodes-per-call": option(1, "of an emulated draft, at most"),
    "--node-extra": option(0.0, "of each further node of such a call", metavar="MS"),
    "--form": option(Form.LINE, "what a step verifies of a tree", choices=tuple(Form)),
    **REAL_OPTIONS,
}
"""Of a pair, real or emulated."""


def pair_of(options: argparse.Namespace, verifier: Verifier | None = None) -> PairPaths:
    """The bundles that the options name, or the reference pair, its target in a format that the verifier runs."""
    if options.target is not None and options.draft is not None:
        return PairPaths(options.draft, options.target)
    pair = (verifier or Verifier()).pair(options.widen or None)
    return PairPaths(options.draft or pair.draft, options.target or pair.target)


@contextmanager
def open_pair(options: argparse.Namespace, *, beside: bool = True) -> Iterator[Subject]:
    """The pair that the options name. beside: also in one process."""
    if options.engine == VLLM and (beside or options.emulate):
        raise ConfigError("vLLM's target runs on no runtime of ours; use --leave-out beside, and no --emulate")
    with _emulated(options, beside) if options.emulate else _real(options, beside) as subject:
        yield subject


@contextmanager
def _emulated(options: argparse.Namespace, beside: bool) -> Iterator[Subject]:
    step_ms, extra_ms, draft_ms = options.emulate
    emulation = Emulation(step_ms, extra_ms, draft_ms, options.nodes_per_call, options.node_extra, options.temperature)
    cores, form = plan_cores(), ["--form", str(options.form)]
    with ExitStack() as stack:
        url = stack.enter_context(emulated_cloud(emulation, cores.cloud, form))
        turns = stack.enter_context(open_beside(EmulatedPair(emulation), cores.cloud)) if beside else None
        stack.enter_context(running_on(cores.agent))
        yield Subject(url, cores, ModelDrafter(emulated_draft(emulation)), VOCAB_SIZE, turns)


@contextmanager
def _real(options: argparse.Namespace, beside: bool) -> Iterator[Subject]:
    verifier = verifier_of(options)
    pair = pair_of(options, verifier)
    cores = plan_cores(options.cores)
    # The simulation knows no prompt lookup, so the verifier that is compared with it makes no guesses of its own.
    cloud_options = [*ALIKE, "--no-lookup", *verifier.options, "--tree", str(options.form)]
    if options.cores == 0:
        cloud_options += ["--threads", str(os.cpu_count())]
    with ExitStack() as stack:
        opener = RealPair(pair.target, pair.draft, is_batch_invariant=options.form != Form.TREE)
        turns = stack.enter_context(open_beside(opener, cores.cloud)) if beside else None
        lab = stack.enter_context(
            open_lab(pair.target, pair.draft, AS_BUNDLED, cloud_options, verifier.python, options.cores)
        )
        num_ids = lab.target.manifest.architecture.vocab_size
        yield Subject(lab.url, lab.cores, lab.drafter, num_ids, turns)


def make_requests(options: argparse.Namespace, count: int | None = None) -> list[GenerationRequest]:
    """Held-out prompts, each with its own seed. count: how many, where not `--prompts`. Raises SystemExit."""
    count = count or options.prompts
    if len(prompts := load_prompts(count)) < count:
        raise SystemExit(f"there are {len(prompts)} prompts, {count} are asked for")
    tokenizer = Tokenizer.from_dir(target_dir())
    return [
        GenerationRequest(
            prompt=tuple(tokenizer.encode(prompt.text)),
            params=SamplingParams(temperature=options.temperature, seed=seed),
            max_tokens=options.max_tokens,
            stop_ids=frozenset(),
            ignore_eos=True,
        )
        for seed, prompt in enumerate(prompts)
    ]
