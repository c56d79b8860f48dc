"""Emulates a target and a draft with exact times: they sleep for a given time, and speak the fake language.

Measures the protocol alone, even on a busy machine: sleeping takes no processor and no memory bandwidth. The cloud is
the real one, in its own process, over `FakeBatchRuntime`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from bench.round_trips import Subject
from numpy.typing import NDArray

from outrider.cloud.api.app import create_app
from outrider.cloud.api.state import ServedModel
from outrider.cloud.engine import Engine, EngineThread
from outrider.cloud.server.serve import READY_PREFIX
from outrider.cloud.server.serving import VerifierServer, open_socket, url_of
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.runtimes.fake import FakeBatchRuntime, FakeSequenceRuntime
from outrider.models.tokenizer import Tokenizer
from outrider.reference import target_dir

VOCAB_SIZE = 4096
MAX_POSITIONS = 2048


@contextmanager
def open_emulated(step_ms: float, extra_ms: float, acceptance: float, draft_ms: float) -> Iterator[Subject]:
    """A verifier whose step takes step_ms + extra_ms for each token after the first, and a draft that takes draft_ms
    per token and is accepted with probability `acceptance`.
    """
    cores = plan_cores()
    serve = ["-m", "bench.emulated", "--step-ms", str(step_ms), "--extra-ms", str(extra_ms)]
    with child_process(serve, ready_prefix=READY_PREFIX, cores=cores.cloud) as url, running_on(cores.agent):
        draft = _SlowSequence(draft_ms / 1e3, acceptance)
        yield Subject(url, cores, ModelDrafter(draft), VOCAB_SIZE)


class _SlowSequence(FakeSequenceRuntime):
    def __init__(self, call_s: float, acceptance: float) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, agreement=acceptance)
        self._call_s = call_s

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        due_s = time.perf_counter() + self._call_s
        row = super().extend(tokens)
        _sleep_until(due_s)
        return row


class _SlowBatch(FakeBatchRuntime):
    def __init__(self, step_s: float, extra_s: float) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, max_positions=MAX_POSITIONS, num_blocks=1024)
        self._step_s, self._extra_s = step_s, extra_s

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        num_extra = sum(len(item.tokens) for item in batch) - 1
        due_s = time.perf_counter() + self._step_s + self._extra_s * num_extra
        rows = super().forward(batch)
        _sleep_until(due_s)
        return rows


def _sleep_until(due_s: float) -> None:
    if (wait_s := due_s - time.perf_counter()) > 0.0:
        time.sleep(wait_s)


def main() -> None:
    """The cloud's process."""
    cli = argparse.ArgumentParser()
    cli.add_argument("--step-ms", type=float, required=True)
    cli.add_argument("--extra-ms", type=float, required=True)
    options = cli.parse_args()
    engine = Engine(_SlowBatch(options.step_ms / 1e3, options.extra_ms / 1e3))
    engine.calibrate()
    thread = EngineThread(engine)
    thread.start()
    app = create_app(thread, ServedModel("emulated", Tokenizer.from_dir(target_dir()), frozenset()))
    with open_socket("127.0.0.1", 0) as sock:
        url = url_of(sock, is_tls=False)
        server = VerifierServer(app, drain_s=0.0, on_ready=lambda: print(READY_PREFIX + url, flush=True))
        server.run(sockets=[sock])


if __name__ == "__main__":
    main()
