"""Drafts for several texts in one thread: they take turns, call by call, and share a call where their model can.

One thread, because a draft model is one: two calls at a time would only contend for its cores. A text that ends does
not wait for the call in progress; the thread ends with the last text.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.drafter import Drafter, guess_together
from outrider.edge.drafting.tree import GuessNode

THREAD_NAME = "outrider-draft"


@dataclass(frozen=True, slots=True)
class DraftCall:
    """Nodes to expand in one call, and the branches that lead to them."""

    nodes: Sequence[GuessNode]
    branches: Sequence[Sequence[int]]


class DraftJob(Protocol):
    """The drafting of one text, as the scheduler's thread drives it. Any method may raise what the drafter raises."""

    @property
    def drafter(self) -> Drafter:
        """What guesses."""

    @property
    def width(self) -> int:
        """Guesses per token."""

    def is_wanted(self) -> bool:
        """Whether anything is worth drafting now; gives the drafter the newest commits."""

    def next_call(self, most: int) -> DraftCall | None:
        """The next call, of at most `most` nodes; None where nothing is worth one."""

    def take(self, call: DraftCall, found: list[list[Guess]], before: float, now: float) -> None:
        """Takes a call's guesses. before, now: from when the text was ready for the call to its end."""


@dataclass(slots=True, eq=False)
class _Run:
    job: DraftJob
    done: Future[None]
    since: float = field(default=0.0)  # when the job was ready for its next call


class DraftScheduler:
    """One thread for all texts of a draft model. num_calls, num_shared: of the model, and those of several texts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_calls = 0
        self.num_shared = 0
        self.clock = clock
        self._changed = threading.Condition()
        self._runs: deque[_Run] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._num_texts = 0
        self._is_working = False
        self._thread: threading.Thread | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other text has this draft model."""
        return self._num_texts == 1

    def enter(self) -> None:
        """A text begins."""
        with self._changed:
            self._num_texts += 1

    def leave(self) -> None:
        """A text has ended; its run, if any, ends before its next call."""
        with self._changed:
            self._num_texts -= 1
            self._changed.notify()

    def run(self, job: DraftJob) -> asyncio.Future[None]:
        """Drafts for a text until nothing is worth it; the future gets the drafter's exception if it raised one.

        Call it on the text's event loop.
        """
        run = _Run(job, Future(), self.clock())
        run.done.set_running_or_notify_cancel()  # so that a text that leaves does not cancel it
        with self._changed:
            self._runs.append(run)
            self._wake()
        time.sleep(0.0)  # lets the thread have Python at once: this one goes on for a while
        return asyncio.wrap_future(run.done)

    def do(self, errand: Callable[[], None]) -> None:
        """Has the thread call `errand`, which must not raise, between two calls of drafters."""
        with self._changed:
            self._errands.append(errand)
            self._wake()

    def join(self) -> None:
        """Waits until the thread has ended; no text may be left."""
        assert self._num_texts == 0, f"{self._num_texts} texts have not ended"
        if (thread := self._thread) is not None:
            thread.join()

    def _wake(self) -> None:
        if self._is_working:
            self._changed.notify()
            return
        self._is_working = True
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME)
        self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                is_fresh = False
                while not self._runs and not self._errands:
                    if not self._num_texts:
                        self._is_working = False
                        return
                    self._changed.wait()
                    is_fresh = True
                errand = self._errands.popleft() if self._errands else None
                runs = list(self._runs)
                if is_fresh:  # the time that a sleeping thread takes to wake is not the draft's
                    now = self.clock()
                    for run in runs:
                        run.since = now
            if errand is not None:
                errand()
            else:
                self._turn(runs)

    def _turn(self, runs: list[_Run]) -> None:
        """One call, of the text that has waited longest, and of others that can share it."""
        first, *others = runs
        with self._changed:
            self._runs.rotate(-1)
        if (call := self._prepare(first, len(runs))) is None:
            return
        if not others:  # nothing was waited for: the time is the call's own
            first.since = self.clock()
        calls = [(first, call)]
        num_left = first.job.drafter.max_branches - len(call.nodes)
        model = _model(first.job)
        for run in others if model is not None else ():
            if num_left < 1:
                break
            if _model(run.job) != model or run.job.drafter.is_behind:
                continue
            share = min(num_left, _share(run, len(runs)))
            if (call := self._prepare(run, len(runs), share)) is not None:
                calls.append((run, call))
                num_left -= len(call.nodes)
        if len(calls) > 1 and self._call_together(calls):
            return
        for run, own in calls:
            self._call(run, own)

    def _prepare(self, run: _Run, num_runs: int, share: int | None = None) -> DraftCall | None:
        """The run's next call; None where it has ended, or read on instead."""
        try:
            is_wanted = run.job.is_wanted()
            if is_wanted and run.job.drafter.is_behind:
                if share is None:
                    run.job.drafter.read_on()
                    run.since = self.clock()
                return None
            call = run.job.next_call(share or _share(run, num_runs)) if is_wanted else None
        except Exception as error:
            self._end(run, error)
            return None
        if call is None:
            self._end(run)
        return call

    def _call_together(self, calls: Sequence[tuple[_Run, DraftCall]]) -> bool:
        """Runs them in one call; False where that fails: each is then tried alone."""
        asked = [(run.job.drafter, call.branches) for run, call in calls]
        try:
            found = guess_together(asked, calls[0][0].job.width)
        except Exception:
            return False  # whose fault it was shows when each runs alone
        self.num_calls += 1
        self.num_shared += 1
        now = self.clock()
        for (run, call), own in zip(calls, found, strict=True):
            self._give(run, call, own, now)
        return True

    def _call(self, run: _Run, call: DraftCall) -> None:
        try:
            found = run.job.drafter.guess(call.branches, run.job.width)
        except Exception as error:
            return self._end(run, error)
        self.num_calls += 1
        self._give(run, call, found, self.clock())

    def _give(self, run: _Run, call: DraftCall, found: list[list[Guess]], now: float) -> None:
        try:
            run.job.take(call, found, run.since, now)
        except Exception as error:
            self._end(run, error)
        run.since = now

    def _end(self, run: _Run, error: Exception | None = None) -> None:
        with self._changed:
            self._runs.remove(run)
        if error is None:
            run.done.set_result(None)
        else:
            run.done.set_exception(error)


def _share(run: _Run, num_runs: int) -> int:
    """Nodes that a text may take of a call while so many draft."""
    return max(1, run.job.drafter.max_branches // num_runs)


def _model(job: DraftJob) -> object | None:
    """What texts must have in common to share a call; None for one that runs alone."""
    drafter = job.drafter.model_drafter if job.width > 1 else None
    return (drafter.model, job.width) if drafter is not None else None
