"""Emulates a target and a draft with exact times: they sleep for a given time, and speak a fake language.

Measures the protocol alone, even on a busy machine: sleeping takes no processor and no memory bandwidth. The cloud is
the real one, in its own process, over `FakeBatchRuntime`. The draft's logits are the target's plus noise; how peaked
the target is and how strong the noise is changes from token to token, so that the ranks of the target's picks among the
draft's guesses, and the gaps between them, come close to those of the reference pair.

`Paced` is for what needs real texts: this fake language forgets its prompt at the first token that differs. A real
model that is faster than its pace sleeps for the rest, so several share a core and keep their times.

    python -m bench.emulated --step-ms 40 --extra-ms 1 [--target BUNDLE]      # the cloud's process
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.processes import announce
from bench.report import option, parser
from fastapi import FastAPI
from numpy.typing import NDArray
from tests.fake_runtime import SHARPNESS, FakeBatchRuntime, FakeSequenceRuntime

from outrider.cloud.api.app import create_app
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import ServedModel, ServerSettings
from outrider.cloud.engine import EngineConfig, EngineThread, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.cores import Cores
from outrider.edge.modes.assemble import open_draft_bundle, open_draft_model
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.bundle import Bundle
from outrider.models.ingress.collector import relieve_collector
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, ModelLimits, RuntimeOptions, SequenceRuntime, SequenceSlice
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

Logits = NDArray[np.float32]

VOCAB_SIZE: Final = 4096
MAX_POSITIONS: Final = 2048


@dataclass(frozen=True, slots=True)
class Language:
    """How peaked the target is, and how noisy the draft.

    At a context with standard normal variates x and y, the target's logits are the fake language's times
    peak * exp(peak_spread * x), and the draft adds an unrelated fake language times
    noise * exp(noise_spread * (together * x + sqrt(1 - together ** 2) * y)).
    """

    peak: float
    peak_spread: float
    noise: float
    noise_spread: float
    together: float

    def peaks(self, rows: Logits) -> Logits:
        """[R, V] of the fake language -> [R]: by how much the target's logits are larger."""
        peaks: Logits = (self.peak * np.exp(self.peak_spread * _variates(rows)[0])).astype(np.float32)
        return peaks

    def noises(self, rows: Logits) -> Logits:
        """[R, V] of the fake language -> [R]: how much of the unrelated one the draft adds."""
        x, y = _variates(rows)
        mixed = self.together * x + (1.0 - self.together**2) ** 0.5 * y
        noises: Logits = (self.noise * np.exp(self.noise_spread * mixed)).astype(np.float32)
        return noises


# Fitted to tests/data/reference_ranks_0.8.json and reference_ranks_0.0.json by random search over shares of picks by
# rank, shares of gaps, and acceptance by gap. No one fit suits both temperatures: the reference draft errs more in the
# tails.
SAMPLED: Final = Language(0.899, 0.584, 0.195, 0.557, -0.666)
GREEDY: Final = Language(1.252, 0.410, 0.154, 0.608, -0.580)

_NOISE_LANGUAGE: Final = 1


@dataclass(frozen=True, slots=True)
class Emulation:
    """Times in ms. A step takes step + extra for each token after the first; a draft call takes draft, and node_extra
    for each node after the first, of which it takes nodes_per_call at most. temperature: 0 speaks as GREEDY, else as
    SAMPLED.
    """

    step: float
    extra: float
    draft: float
    nodes_per_call: int = 1
    node_extra: float = 0.0
    temperature: float = 0.8

    @property
    def language(self) -> Language:
        """The one that fits the temperature."""
        return SAMPLED if self.temperature else GREEDY

    def step_of(self, batch: Sequence[SequenceSlice]) -> AbstractContextManager[None]:
        """What is inside takes as long as this step, at least."""
        return lasting(self.step + self.extra * (sum(len(item.tokens) for item in batch) - 1))


@contextmanager
def lasting(least_ms: float) -> Iterator[None]:
    """What is inside takes so long at least."""
    due_s = time.perf_counter() + least_ms / 1e3
    yield
    time.sleep(max(0.0, due_s - time.perf_counter()))


@contextmanager
def emulated_cloud(emulation: Emulation, cores: Cores, options: Sequence[str] = ()) -> Iterator[str]:
    """Runs the verifier's process; gives its URL. options: more arguments of this module's command."""
    serve = ["-m", "bench.emulated", "--step-ms", str(emulation.step), "--extra-ms", str(emulation.extra)]
    serve += ["--temperature", str(emulation.temperature), *options]
    with child_process(serve, ready_prefix=READY_PREFIX, cores=cores) as url:
        yield url


class EmulatedTarget(FakeBatchRuntime):
    """The target: a step takes exactly its time."""

    def __init__(self, emulation: Emulation, max_positions: int = MAX_POSITIONS) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, max_positions=max_positions, num_blocks=4096)
        self._language, self._emulation = emulation.language, emulation

    def forward(self, batch: Sequence[SequenceSlice]) -> Logits:
        """One step."""
        with self._emulation.step_of(batch):
            rows = super().forward(batch)
            if rows.size:
                rows *= self._language.peaks(rows)[:, None]
            return rows


class EmulatedDraft:
    """The draft, a `SequenceRuntime`: a call takes exactly its time."""

    def __init__(self, emulation: Emulation) -> None:
        self._language = emulation.language
        self._call_ms = emulation.draft
        self._truth = FakeSequenceRuntime(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS)
        self._noise = FakeSequenceRuntime(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, seed=_NOISE_LANGUAGE)

    @property
    def limits(self) -> ModelLimits:
        """As the target's."""
        return self._truth.limits

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self._truth.length

    def extend(self, tokens: Sequence[int]) -> Logits:
        """Appends tokens; returns the logits after the last one."""
        with lasting(self._call_ms):
            return self._row_after(tokens)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        self._truth.truncate(length)
        self._noise.truncate(length)

    def close(self) -> None:
        """Nothing to release."""

    def _row_after(self, tokens: Sequence[int]) -> Logits:
        truth, noise = self._truth.extend(tokens), self._noise.extend(tokens)
        noise *= self._language.noises(truth[None])[0]
        truth *= self._language.peaks(truth[None])[0]
        truth += noise
        return truth


class EmulatedBranches(EmulatedDraft):
    """The draft, also a `BranchingRuntime`."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(emulation)
        self.max_branches = emulation.nodes_per_call
        self._node_ms = emulation.node_extra

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> Logits:
        """Logits after each branch, [B, vocab_size]."""
        length, rows = self.length, list[Logits]()
        with lasting(self._call_ms + self._node_ms * (len(branches) - 1)):
            for branch in branches:
                rows.append(self._row_after(branch))
                self.truncate(length)
        return np.stack(rows)


def emulated_draft(emulation: Emulation) -> EmulatedDraft:
    """The draft that takes as many nodes a call as `emulation` says."""
    return EmulatedBranches(emulation) if emulation.nodes_per_call > 1 else EmulatedDraft(emulation)


def _variates(rows: Logits) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two standard normal variates for each row of the fake language, from two of its logits (Box and Muller 1958)."""
    first, second = rows[:, -1].astype(np.float64) / SHARPNESS, rows[:, -2].astype(np.float64) / SHARPNESS
    radius, angle = np.sqrt(2.0 * first), 2.0 * np.pi * np.exp(-second)
    return radius * np.cos(angle), radius * np.sin(angle)


class Paced:
    """A real target that verifies no trees, or a draft that runs one node a call: each takes its time at least."""

    def __init__(self, inner: Any, pace: Emulation) -> None:
        self._inner, self._pace = inner, pace

    def __getattr__(self, name: str) -> Any:
        # No more: what a runtime can beside these has no pace.
        if name not in ("limits", "block_size", "num_blocks", "length", "truncate", "close"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def forward(self, batch: Sequence[SequenceSlice]) -> Logits:
        """One step of the target."""
        with self._pace.step_of(batch):
            rows: Logits = self._inner.forward(batch)
            return rows

    def extend(self, tokens: Sequence[int]) -> Logits:
        """One call of the draft."""
        with lasting(self._pace.draft):
            row: Logits = self._inner.extend(tokens)
            return row


def target_options(target: Bundle) -> RuntimeOptions:
    """How the cloud opens a target: on a GPU where it was exported for one, in the precision of its bundle."""
    manifest = target.manifest
    device = "CPU" if manifest.device == "cpu" else {"torch": "cuda", "openvino": "GPU"}[manifest.runtime]
    made = ExportOptions("target", manifest.precision, manifest.runtime, device=manifest.device)  # type: ignore[arg-type]
    return made.runtime_options(device)


def open_target(path: Path, is_batch_invariant: bool | None = None) -> BatchRuntime:
    """A target bundle on one thread. is_batch_invariant: None: the runtime's default."""
    target = Bundle.open(path)
    options = replace(target_options(target), num_threads=1, is_batch_invariant=is_batch_invariant)
    return open_batch_runtime(target.manifest.runtime, target.model_file, options)


def open_draft(path: Path) -> tuple[SequenceRuntime, int]:
    """A draft bundle on one thread, in the runtime that checked it; and how many ids it may propose."""
    model = open_draft_model(open_draft_bundle(path), num_threads=1)
    assert model.runtime is not None and model.num_ids is not None, "n-gram lookup has no model"
    return model.runtime, model.num_ids


# -- the cloud's process -----------------------------------------------------------------------------------------------


def app_of(target: BatchRuntime, config: EngineConfig, settings: ServerSettings | None = None) -> FastAPI:
    """The real server over the target; its engine runs."""
    engine = EngineThread(target, config)
    engine.calibrate()
    app = create_app(engine, ServedModel("emulated", Tokenizer.from_dir(target_dir()), frozenset()), settings)
    relieve_collector()  # as `serve` does: a full collection of what is loaded takes 70 to 200 ms
    engine.start()
    return app


def serve(app: FastAPI) -> None:
    """Until it is ended."""
    announce(partial(VerifierServer, app))


def main() -> None:
    """The command."""
    options = parser(
        __doc__,
        {
            "--target": option(type=Path, help="a real bundle, whose steps take so long at least, with prompt lookup"),
            "--step-ms": option(40.0, "time of a step"),
            "--extra-ms": option(0.0, "of each token of a step after the first"),
            "--temperature": option(0.8, "of the texts to come"),
            "--form": option(TreeForm.LINE, "what a step verifies of a tree", choices=tuple(TreeForm)),
            "--policy": option(Policy.AUTO, choices=tuple(Policy)),
            "--max-running": option(EngineConfig().max_running, "sequences in one step"),
            "--max-positions": option(MAX_POSITIONS, "of a sequence"),
        },
    ).parse_args()
    config = EngineConfig(
        looks_up=options.target is not None,
        form=TreeForm(options.form),
        policy=Policy(options.policy),
        max_running=options.max_running,
    )
    emulation = Emulation(options.step_ms, options.extra_ms, 0.0, temperature=options.temperature)
    target: Any = EmulatedTarget(emulation, options.max_positions)
    if options.target is not None:
        target = Paced(open_target(options.target), emulation)
    serve(app_of(target, config))


if __name__ == "__main__":
    main()
