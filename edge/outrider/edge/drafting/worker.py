"""Drafts off the event loop: runs of tokens in one worker thread.

Switching threads costs about as much as drafting a token with a small model, so a run drafts many tokens and checks a
flag between them. The loop may read the proposals at any time; the thread wakes it only when they are worth sending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from outrider.edge.drafting.drafter import Drafter, Proposal
from outrider.models.sampling import SamplingParams


class DraftRun:
    """One run. The worker thread writes it and the loop reads it; for `is_cancelled` it is the other way round.

    keep, tail: rewind the drafter to `keep` tokens and extend it by `tail` before drafting at most `limit` tokens.
    ahead: confidences of the tokens that are drafted already. took_s: time of `num_timed` proposals, without the first
    of a sequence, which includes the prompt. answer: number of proposals to send together as soon as all are drafted;
    0: no such number.
    """

    __slots__ = ("ahead", "answer", "is_cancelled", "keep", "limit", "num_timed", "proposals", "tail", "took_s")

    def __init__(self, keep: int, tail: Sequence[int], limit: int, ahead: Sequence[float], answer: int = 0) -> None:
        self.keep = keep
        self.tail = tail
        self.limit = limit
        self.ahead = ahead
        self.answer = answer
        self.proposals: list[Proposal] = []
        self.took_s = 0.0
        self.num_timed = 0
        self.is_cancelled = False


class DraftWorker:
    """One thread that owns a drafter during a run, for one sequence. Make it inside a running event loop.

    wants_more: called between tokens with the confidences so far. wake: called on the loop when the run's answer is
    complete or a proposal has waited for `flush_s`, but not at the end of a run.
    """

    def __init__(
        self,
        drafter: Drafter,
        prompt: Sequence[int],
        params: SamplingParams,
        wants_more: Callable[[Sequence[float]], bool],
        wake: Callable[[], None],
        flush_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter = drafter
        self._prompt = prompt
        self._params = params
        self._wants_more = wants_more
        self._wake = wake
        self._flush_s = flush_s
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-draft")
        self._is_cold = True

    def submit(self, run: DraftRun) -> asyncio.Future[None]:
        """Starts a run; the future ends with it, with the drafter's exception if it raised one."""
        return self._loop.run_in_executor(self._thread, self._draft, run)

    def close(self) -> None:
        """Ends the thread; no run may be active. The drafter stays open: it is the caller's."""
        self._thread.shutdown(wait=True)

    def _draft(self, run: DraftRun) -> None:
        is_first = self._is_cold
        if self._is_cold:
            self._drafter.begin(self._prompt, self._params)
            self._is_cold = False
        self._drafter.rewind(run.keep)
        self._drafter.extend(run.tail)
        confidences = list(run.ahead)
        before = unsent_since = self._clock()
        num_unsent = 0
        while not run.is_cancelled and len(run.proposals) < run.limit and self._wants_more(confidences):
            proposal = self._drafter.propose()
            if proposal is None:
                break
            confidences.append(proposal.confidence)
            run.proposals.append(proposal)
            now = self._clock()
            if not (is_first and len(run.proposals) == 1):
                run.took_s += now - before
                run.num_timed += 1
            before = now
            num_unsent += 1
            if self._is_due(run.answer - len(run.proposals), num_unsent, now - unsent_since):
                unsent_since, num_unsent = now, 0
                self._loop.call_soon_threadsafe(self._wake)

    def _is_due(self, num_missing: int, num_unsent: int, unsent_s: float) -> bool:
        """Whether to send now instead of waiting for more; num_missing: proposals missing from the answer."""
        if num_missing == 0:
            return True
        # If the answer will be complete soon, wait for it.
        is_nearly_whole = num_missing > 0 and num_missing * unsent_s / num_unsent < self._flush_s
        return unsent_s >= self._flush_s and not is_nearly_whole
