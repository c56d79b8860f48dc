"""Times steps on this machine, in the runtime that will run them: medians after a warm-up.

The times are of this machine and this day. They are in the manifest under `timing`, which is no part of a bundle's
identity. Knows nothing of acceptance.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from outrider.models.runtimes.base import BatchRuntime, SequenceRuntime, SequenceSlice

CONTEXT: Final = 128
"""Tokens in the cache while steps are timed, where the model's longest sequence allows it."""

EXTEND_TOKENS: Final = 8
STEP_TOKENS: Final = (1, 2, 3, 5, 9)
"""Sizes of the target's steps: the committed token and 0, 1, 2, 4, 8 drafted ones."""

_WARM_UP: Final = 3
_SAMPLES: Final = 24
_MIN_SAMPLES: Final = 5
_MAX_S: Final = 4.0  # of one median: a slow model gets fewer samples


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians in ms: steps of one and of `extend_tokens` tokens. extra_ms: what a drafted token adds to a target's."""

    token_ms: float
    extend_tokens: int
    extend_ms: float
    extra_ms: float | None = None


def timing_prompt(ids: Sequence[int], max_positions: int) -> tuple[int, ...]:
    """CONTEXT tokens, `ids` over and over; fewer for a model whose longest sequence is short."""
    length = max(1, min(CONTEXT, max_positions - 2 * max(EXTEND_TOKENS, *STEP_TOKENS)))
    return tuple(ids[index % len(ids)] for index in range(length))


def time_draft(runtime: SequenceRuntime, prompt: Sequence[int], extend_tokens: int = EXTEND_TOKENS) -> StepTimes:
    """Steps on the cache after `prompt`, rolled back every few: the sequence is left with the prompt.

    The prompt and 2 * extend_tokens more must fit the runtime's longest sequence.
    """
    context = len(prompt)
    runtime.truncate(0)
    runtime.extend(prompt)
    tokens = [prompt[index % context] for index in range(extend_tokens)]

    def one_token() -> None:
        if runtime.length >= context + extend_tokens:
            runtime.truncate(context)
        runtime.extend(tokens[:1])

    def several() -> None:
        runtime.truncate(context)
        runtime.extend(tokens)

    token_ms, extend_ms = _median_ms(one_token), _median_ms(several)
    runtime.truncate(context)
    return StepTimes(token_ms, extend_tokens, extend_ms)


def time_target(runtime: BatchRuntime, prompt: Sequence[int]) -> StepTimes:
    """One sequence's steps of STEP_TOKENS tokens after `prompt`, logits for every row, in blocks 0, 1, ...

    Medians; extra_ms is the slope of the least-squares line through the one-token step, 0 at least. The prompt and the
    largest step must fit the runtime.
    """
    context = len(prompt)
    blocks = range(-(-(context + max(STEP_TOKENS)) // runtime.block_size))
    runtime.forward([SequenceSlice(prompt, 0, blocks, 1)])

    def step(num_tokens: int) -> Callable[[], object]:
        tokens = [prompt[index % context] for index in range(num_tokens)]
        return lambda: runtime.forward([SequenceSlice(tokens, context, blocks, num_tokens)])

    times = {num_tokens: _median_ms(step(num_tokens)) for num_tokens in STEP_TOKENS}
    added = [(num_tokens - 1, times[num_tokens] - times[1]) for num_tokens in STEP_TOKENS[1:]]
    slope = sum(count * more_ms for count, more_ms in added) / sum(count**2 for count, _ in added)
    largest = max(STEP_TOKENS)
    return StepTimes(times[1], largest, times[largest], max(0.0, slope))


def machine(num_threads: int) -> str:
    """The processor and the number of threads of inference, never the machine's name. 0: all threads."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = num_threads or available
    return f"{processor()}, {count} thread{'s' if count > 1 else ''}"


def _median_ms(run: Callable[[], object]) -> float:
    for _ in range(_WARM_UP):
        run()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < _SAMPLES and (len(taken) < _MIN_SAMPLES or time.perf_counter() - began < _MAX_S):
        at = time.perf_counter()
        run()
        taken.append(time.perf_counter() - at)
    return 1e3 * median(taken)


def processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if asked.stdout.strip():
            return asked.stdout.strip()
    return platform.processor() or platform.machine() or "unknown processor"
