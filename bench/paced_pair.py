"""Runs the real reference pair at exact times: its texts are real, and a step or a draft call lasts as long as given.

A model that is faster than that sleeps for the rest, so several pairs share a core and keep their times. It is
`bench.emulated` for what needs texts: that fake language forgets its prompt at the first token that differs.

    python -m bench.paced_pair TARGET --step-ms 40 --extra-ms 1      # the verifier's process
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from bench.beside import open_draft, target_options
from bench.processes import announce
from bench.report import option, parser
from numpy.typing import NDArray

from outrider.cloud.api.app import create_app
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import ServedModel
from outrider.cloud.engine import EngineConfig, EngineThread
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.child_process import child_process
from outrider.export.make.pair import PairPaths
from outrider.models.bundle.bundle import Bundle
from outrider.models.ingress.collector import relieve_collector
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, ModelLimits, SequenceRuntime, SequenceSlice

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pace:
    """Times in ms. A step takes step + extra for each token after the first; a draft call takes draft."""

    step: float
    extra: float
    draft: float


class PacedTarget:
    """Another target, a `BatchRuntime` that verifies no trees."""

    def __init__(self, inner: BatchRuntime, pace: Pace) -> None:
        self._inner, self._step_s, self._extra_s = inner, pace.step / 1e3, pace.extra / 1e3

    @property
    def limits(self) -> ModelLimits:
        """The inner target's."""
        return self._inner.limits

    @property
    def block_size(self) -> int:
        """The inner target's."""
        return self._inner.block_size

    @property
    def num_blocks(self) -> int:
        """The inner target's."""
        return self._inner.num_blocks

    def forward(self, batch: Sequence[SequenceSlice]) -> Logits:
        """One step."""
        due_s = time.perf_counter() + self._step_s
        due_s += self._extra_s * (sum(len(item.tokens) for item in batch) - 1)
        rows = self._inner.forward(batch)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return rows

    def close(self) -> None:
        """Closes the inner target."""
        self._inner.close()


class PacedDraft:
    """Another draft, a `SequenceRuntime` that runs one node a call."""

    def __init__(self, inner: SequenceRuntime, pace: Pace) -> None:
        self._inner, self._call_s = inner, pace.draft / 1e3

    @property
    def limits(self) -> ModelLimits:
        """The inner draft's."""
        return self._inner.limits

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self._inner.length

    def extend(self, tokens: Sequence[int]) -> Logits:
        """Appends tokens; returns the logits after the last one."""
        due_s = time.perf_counter() + self._call_s
        row = self._inner.extend(tokens)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return row

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        self._inner.truncate(length)

    def close(self) -> None:
        """Closes the inner draft."""
        self._inner.close()


@contextmanager
def open_paced(pair: PairPaths, pace: Pace) -> Iterator[tuple[str, ModelDrafter]]:
    """The verifier's process over the pair's target, as its URL, and the pair's draft in this process."""
    times = ["--step-ms", str(pace.step), "--extra-ms", str(pace.extra)]
    with child_process(["-m", "bench.paced_pair", str(pair.target), *times], ready_prefix=READY_PREFIX) as url:
        runtime, num_ids = open_draft(pair.draft)
        drafter = ModelDrafter(PacedDraft(runtime, pace), num_ids)
        try:
            yield url, drafter
        finally:
            drafter.close()


def main() -> None:
    """The verifier's process: as `outrider-cloud serve --no-recent`, but for the pace."""
    options = parser(
        __doc__,
        {
            "target": {"type": Path, "help": "its bundle"},
            "--step-ms": option(40.0, "time of a step"),
            "--extra-ms": option(1.0, "of each token of a step after the first"),
        },
    ).parse_args()
    bundle = Bundle.open(options.target)
    runtime_options = replace(target_options(bundle), num_threads=1)
    inner = open_batch_runtime(bundle.manifest.runtime, bundle.model_file, runtime_options)
    pace = Pace(options.step_ms, options.extra_ms, 0.0)
    engine = EngineThread(PacedTarget(inner, pace), EngineConfig(looks_up=True))
    engine.calibrate()
    engine.start()
    app = create_app(engine, ServedModel("paced", bundle.tokenizer(), frozenset()))
    relieve_collector()  # as `serve` does: a full collection of what is loaded takes 70 to 200 ms
    announce(partial(VerifierServer, app))


if __name__ == "__main__":
    main()
