"""Runs the real reference pair at exact times: its texts are real, and a step or a draft call lasts as long as given.

A model that is faster than that sleeps for the rest, so several pairs share a core and keep their times. It is
`bench.emulated` for what needs texts: that fake language forgets its prompt at the first token that differs.

    python -m bench.paced_pair TARGET --step-ms 40 --extra-ms 1      # the verifier's process
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from bench.beside import open_draft, target_options
from bench.emulated import Emulation, app_of, serve
from bench.report import option, parser
from numpy.typing import NDArray

from outrider.cloud.engine import EngineConfig
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.child_process import child_process
from outrider.export.make.pair import PairPaths
from outrider.models.bundle.bundle import Bundle
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, SequenceRuntime, SequenceSlice

Logits = NDArray[np.float32]


class Paced:
    """A target that verifies no trees, or a draft that runs one node a call: each lasts for its time at least."""

    def __init__(self, inner: Any, step_ms: float, extra_ms: float = 0.0) -> None:
        self._inner, self._step_s, self._extra_s = inner, step_ms / 1e3, extra_ms / 1e3

    def __getattr__(self, name: str) -> Any:
        # No more: what a runtime can beside these has no pace.
        if name not in ("limits", "block_size", "num_blocks", "length", "truncate", "close"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def forward(self, batch: Sequence[SequenceSlice]) -> Logits:
        """One step of the target."""
        due_s = time.perf_counter() + self._step_s + self._extra_s * (sum(len(item.tokens) for item in batch) - 1)
        rows: Logits = self._inner.forward(batch)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return rows

    def extend(self, tokens: Sequence[int]) -> Logits:
        """One call of the draft."""
        due_s = time.perf_counter() + self._step_s
        row: Logits = self._inner.extend(tokens)
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return row


@contextmanager
def open_paced(pair: PairPaths, pace: Emulation) -> Iterator[tuple[str, ModelDrafter]]:
    """The verifier's process over the pair's target, as its URL, and the pair's draft in this process. pace: times."""
    times = ["--step-ms", str(pace.step), "--extra-ms", str(pace.extra)]
    with child_process(["-m", "bench.paced_pair", str(pair.target), *times], ready_prefix=READY_PREFIX) as url:
        runtime, num_ids = open_draft(pair.draft)
        drafter = ModelDrafter(cast(SequenceRuntime, Paced(runtime, pace.draft)), num_ids)
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
    target = Paced(inner, options.step_ms, options.extra_ms)
    serve(app_of(cast(BatchRuntime, target), EngineConfig(looks_up=True)))


if __name__ == "__main__":
    main()
