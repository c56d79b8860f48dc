"""Holds vLLM's steps until the test allows them; imported by vLLM's engine process too."""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from itertools import count
from pathlib import Path
from typing import Any, Final

from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.vllm.heads import Heads
from outrider.cloud.vllm.scheduler import OutriderScheduler

STEADY: Final = "tests.vllm.gated.SteadyScheduler"
VARIABLE: Final = "OUTRIDER_TEST_GATE"
ENVIRONMENT_NAME: Final = "environment.json"
"""Beside the gate: what the engine process has in its environment, which its workers inherit."""
_STEP_S: Final = 0.020
_TOKEN_S: Final = 0.0002
"""What steps seem to take: how busy the machine is must not decide what is verified."""
_FORMAT: Final = struct.Struct("qq")  # the gate's number, and the steps that it allows; negative: all


def map_gate(path: Path, *, is_new: bool = False) -> mmap.mmap:
    """The memory that both processes see."""
    if is_new:
        path.write_bytes(_FORMAT.pack(0, -1))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _FORMAT.size)


class VllmGate:
    """As `tests.serving.StepGate`, for the steps of an engine process."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._allowed = 0
        number, _ = _FORMAT.unpack(memory[:])
        self._number = number + 1
        self._write()

    def _write(self) -> None:
        self._memory[8:] = struct.pack("q", self._allowed)
        self._memory[:8] = struct.pack("q", self._number)

    def allow(self, num_steps: int) -> None:
        """Lets `num_steps` more steps run."""
        self._allowed += num_steps
        self._write()

    def open(self) -> None:
        """Lets all steps run from now on."""
        self._allowed = -1
        self._write()


class SteadyScheduler(OutriderScheduler):
    """Takes its steps to last as long as their tokens say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        drafting, stepped = self._book.drafting, self._book.drafting.stepped

        def as_if(size: StepSize, seconds: float, has_trees: bool) -> None:
            stepped(size, _STEP_S + _TOKEN_S * size.tokens, has_trees)

        drafting.stepped = as_if  # type: ignore[method-assign]
        if self._heads is not None:
            self._heads = Heads(self._link.config.max_draft, clock=count().__next__)


class GatedScheduler(SteadyScheduler):
    """Waits for its gate before each step that has work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory = map_gate(Path(os.environ[VARIABLE]))
        Path(os.environ[VARIABLE]).with_name(ENVIRONMENT_NAME).write_text(json.dumps(dict(os.environ)))
        self._number, self._num_used = 0, 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """A step."""
        while self.get_num_unfinished_requests() and not self._may_run():
            self._catch_up()  # as while a model runs
            time.sleep(0.001)
        return super().schedule(throttle_prefills)

    def _may_run(self) -> bool:
        number, allowed = _FORMAT.unpack(self._memory[:])
        if number != self._number:
            self._number, self._num_used = number, 0
        if 0 <= allowed <= self._num_used:
            return False
        self._num_used += 1
        return True
