"""Generates with the draft beside the target, in turn, with no network: the yardstick of drafts over a network.

One process, one thread, on the cloud's core. A round drafts a path, runs it behind the last token in one step of the
target, and commits the target's picks, until the first that differs from the path. How far a round drafts is fixed, or
decided by the gaps of the draft's guesses (`Stop`). No engine and no HTTP, so nothing is faster with these two models
and one sequence. `bench.never_slower` compares with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench.emulated import EmulatedTarget, Emulation, emulated_draft, open_draft, open_target
from bench.processes import Remote, remote

from outrider.edge.drafting.calibration import Calibration, Guess
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.cores import Cores
from outrider.export.check.acceptance import Continuation, read_along
from outrider.export.report.simulation.ranks import Picked
from outrider.models.picks.sampling import SamplingParams, candidates, pick
from outrider.models.runtimes.base import BatchRuntime, SequenceRuntime, SequenceSlice

MOST_DRAFTED: Final = 24
"""Tokens of a round at most."""
GUESSES: Final = 16


@dataclass(frozen=True, slots=True)
class Stop:
    """How far a round drafts: `depth` tokens; or, where it is 0, while the path's calibrated chance is at least
    `floor`, and one token at least.
    """

    depth: int = 0
    floor: float = 0.0

    def __str__(self) -> str:
        return f"depth {self.depth}" if self.depth else f"floor {self.floor:g}"


@dataclass(frozen=True, slots=True)
class Written:
    """One text. arrival_s: seconds from the start to each token, as `GenerationResult` has it. draft_s: of all
    `num_drafted` draft calls, where it is measured.
    """

    tokens: tuple[int, ...]
    arrival_s: tuple[float, ...]
    num_passes: int
    num_drafted: int
    num_accepted: int
    draft_s: float = 0.0


Opener = Callable[[], tuple[BatchRuntime, SequenceRuntime, int]]
"""Opens target and draft, and says how many ids the draft may propose. It is sent to the process that runs them, and
called once there.
"""


@dataclass(frozen=True, slots=True)
class RealPair:
    """Two bundles, opened as the cloud and the agent open them, with one thread each. is_batch_invariant: as the
    cloud's runtime, which gives it up to verify trees.
    """

    target: Path
    draft: Path
    is_batch_invariant: bool = True

    def __call__(self) -> tuple[BatchRuntime, SequenceRuntime, int]:
        """Loads both."""
        return open_target(self.target, self.is_batch_invariant), *open_draft(self.draft)


@dataclass(frozen=True, slots=True)
class EmulatedPair:
    """The pair of `bench.emulated`."""

    emulation: Emulation

    def __call__(self) -> tuple[BatchRuntime, SequenceRuntime, int]:
        """Makes both."""
        target, draft = EmulatedTarget(self.emulation), emulated_draft(self.emulation)
        return target, draft, draft.limits.vocab_size


class Turns:
    """The two models and their turns. Calibration is kept from text to text, as an agent keeps it."""

    def __init__(self, target: BatchRuntime, draft: SequenceRuntime, num_ids: int) -> None:
        self._target = target
        self._draft = draft
        self._num_ids = num_ids
        self._calibration = Calibration()
        self._blocks = list(range(target.num_blocks))

    def generate(self, prompt: Sequence[int], params: SamplingParams, num_tokens: int, stop: Stop) -> Written:
        """Writes `num_tokens` tokens after the prompt."""
        started_s = time.perf_counter()
        self._draft.truncate(0)
        drafter = ModelDrafter(self._draft, self._num_ids)
        drafter.begin(prompt, params)
        text, past = list(prompt), 0
        arrival_s: list[float] = []
        num_passes = num_drafted = num_accepted = 0
        draft_s = 0.0
        while (left := num_tokens - len(arrival_s)) > 0:
            # The first pass reads the prompt, as the cloud's does; the draft reads it in its first round.
            before_s = time.perf_counter()
            path, num_calls = self._path(drafter, min(left - 1, MOST_DRAFTED), stop) if past else (list[Guess](), 0)
            draft_s += time.perf_counter() - before_s
            drafted = [guess.token for guess in path]
            new = [*text[past:], *drafted]
            rows = self._target.forward([SequenceSlice(new, past, self._blocks, len(path) + 1)])
            picked: list[int] = []
            for row in rows:
                picked.append(pick(row, params, len(text) + len(picked)))
                if len(picked) > len(path) or drafted[len(picked) - 1] != picked[-1]:
                    break
            for guess, token in zip(path, picked, strict=False):
                self._calibration.observe((guess,), token)
            past = len(text) + len(picked) - 1
            text += picked
            drafter.extend(picked)
            now_s = time.perf_counter() - started_s
            arrival_s += [now_s] * len(picked)
            num_passes += 1
            num_drafted += num_calls
            num_accepted += len(picked) - 1
        written = tuple(text[len(prompt) :])
        return Written(written, tuple(arrival_s), num_passes, num_drafted, num_accepted, draft_s)

    def ranks(self, texts: Sequence[Continuation]) -> list[list[Picked]]:
        """Ranks of the texts' tokens among the draft's guesses."""
        return [
            [
                Picked.among(candidates(logits, text.params, position, GUESSES), token)
                for position, token, logits in read_along(self._draft, text, self._num_ids)
            ]
            for text in texts
        ]

    def _path(self, drafter: ModelDrafter, most: int, stop: Stop) -> tuple[list[Guess], int]:
        """The guesses to verify, and the draft calls made for them."""
        path: list[Guess] = []
        reached, num_calls = 1.0, 0
        while len(path) < (min(stop.depth, most) if stop.depth else most):
            (guesses,) = drafter.guess([[guess.token for guess in path]], 1)
            num_calls += 1
            if not guesses:
                break
            reached *= self._calibration.chance(guesses[0].cell)
            if not stop.depth and path and reached < stop.floor:
                break
            path.append(guesses[0])
        return path, num_calls

    def close(self) -> None:
        """Releases both."""
        self._target.close()
        self._draft.close()


def open_beside(opener: Opener, cores: Cores) -> AbstractContextManager[Remote]:
    """A process on `cores` with the `Turns` of both models. It ends with the context."""
    return remote(partial(_turns, opener), cores)


def _turns(opener: Opener) -> closing[Turns]:
    return closing(Turns(*opener()))
