"""Drafts ahead of the target: keeps the belief, extends it, and sends what is new.

Knows no network: it takes commits and calls `send`. Runs on the event loop; `DraftWorker` does the drafting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from outrider.edge.drafting.belief import Belief, CommitOutcome
from outrider.edge.drafting.depth import DepthController, DraftPlan
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.worker import DraftRun, DraftWorker
from outrider.edge.results import GenerationRequest

logger = logging.getLogger(__name__)

# Called with the number of known tokens and all drafted tokens after them.
Send = Callable[[int, Sequence[int]], None]


class DraftAhead:
    """The drafting side of one generation. Make it inside a running event loop; `aclose` it there.

    drafter: None never drafts; then only the known tokens are kept.
    """

    def __init__(
        self,
        request: GenerationRequest,
        drafter: Drafter | None,
        depth: DepthController,
        send: Send,
        estimates: Estimates,
        flush_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._request = request
        self._depth = depth
        self._send = send
        self._estimates = estimates
        self._belief = Belief()
        self._confidences: list[float] = []  # of the belief's drafted tokens
        self._worker = (
            DraftWorker(drafter, request.prompt, request.params, depth.wants_more, self._flush, flush_s, clock)
            if drafter is not None
            else None
        )
        self._run: DraftRun | None = None
        self._run_future: asyncio.Future[None] | None = None
        self._num_taken = 0  # proposals of the run that are in the belief
        self._num_agreed = len(request.prompt)  # first tokens of the drafter's sequence that agree with the belief
        self._is_stuck = False  # the drafter has nothing to propose until the next commit
        self._has_unsent = False
        self._is_closed = False
        self.num_drafted = 0
        self.error: str | None = None

    @property
    def known(self) -> Sequence[int]:
        """Committed tokens, in order."""
        return self._belief.known

    @property
    def num_ahead(self) -> int:
        """Drafted tokens that follow the known ones."""
        return self._belief.num_drafted

    @property
    def plan(self) -> DraftPlan:
        """What to draft now; nothing without a drafter or after its failure."""
        return self._depth.plan() if self._worker is not None and self.error is None else DraftPlan(0)

    def on_commit(self, base: int, tokens: Sequence[int], interval_ms: float | None) -> CommitOutcome:
        """Takes a commit; call `pump` afterwards. Raises CloudError as `Belief.on_commit` does.

        interval_ms: time since the previous commit; None where that does not measure the server's pace.
        """
        self._take_proposals()
        known_before = self._belief.num_known
        outcome = self._belief.on_commit(base, tokens)
        if not outcome.tokens:
            return outcome
        self._estimates.on_commit(outcome, self._confidences, interval_ms)
        self._confidences = self._confidences[outcome.num_matched :] if self._belief.num_drafted else []
        if outcome.diverged or outcome.overtaken:
            # The current run drafts after a rejected token, or drafts tokens already known.
            self._num_agreed = min(self._num_agreed, len(self._request.prompt) + known_before + outcome.num_matched)
            if self._run is not None:
                self._run.is_cancelled = True
        self._has_unsent = self._has_unsent and self._belief.num_drafted > 0
        self._is_stuck = False
        self._depth.observe(outcome)
        return outcome

    def resend(self) -> None:
        """Marks the belief as not sent: a new session does not have it."""
        self._has_unsent = self._belief.num_drafted > 0

    def pump(self) -> None:
        """Sends what a finished run drafted, and starts the next run."""
        if self._run is not None or self._is_closed:
            return
        self._flush()
        plan, num_drafted = self.plan, self._belief.num_drafted
        room = min(plan.depth, self._room()) - num_drafted
        if room > 0 and not self._is_stuck and self._worker is not None and self._depth.wants_more(self._confidences):
            tail = self._belief.tokens_from(self._num_agreed - len(self._request.prompt))
            answer = max(0, plan.answer - num_drafted)
            self._run = DraftRun(self._num_agreed, tail, room, tuple(self._confidences), answer)
            self._num_taken = 0
            self._num_agreed += len(tail)
            self._run_future = self._worker.submit(self._run)
            self._run_future.add_done_callback(self._on_run_done)

    async def aclose(self) -> None:
        """Stops drafting after the token in progress and ends the thread."""
        self._is_closed = True
        if self._worker is None:
            return
        if self._run is not None and self._run_future is not None:
            self._run.is_cancelled = True
            await asyncio.wait([self._run_future])
            self._settle(self._run_future)
        self._worker.close()

    def _room(self) -> int:
        """How many drafted tokens the rest of the text can use: its last token is always the target's own."""
        return self._request.max_tokens - self._belief.num_known - 1

    def _flush(self) -> None:
        """Sends the belief if part of it is new and the plan is not silent."""
        self._take_proposals()
        if self._has_unsent and not self.plan.silent and not self._is_closed:
            self._has_unsent = False
            self._send(self._belief.num_known, self._belief.drafted)

    def _take_proposals(self) -> None:
        """Moves the run's proposals so far into the belief."""
        run = self._run
        if run is None or run.is_cancelled or len(run.proposals) == self._num_taken:
            return
        fresh = run.proposals[self._num_taken :]
        self._num_taken += len(fresh)
        self._num_agreed += len(fresh)
        self._belief.extend([proposal.token for proposal in fresh])
        self._confidences.extend(proposal.confidence for proposal in fresh)
        self._has_unsent = True

    def _on_run_done(self, future: asyncio.Future[None]) -> None:
        self._settle(future)
        self.pump()

    def _settle(self, future: asyncio.Future[None]) -> None:
        """Takes a finished run's proposals, time and error; only once, because closing may have done it already."""
        if (run := self._run) is None:
            return
        self._take_proposals()
        self._run = None
        self.num_drafted += len(run.proposals)
        self._estimates.on_drafted(run.took_s * 1e3, run.num_timed)
        if (error := future.exception()) is not None:
            # Without a draft the text is the same, only slower: go on, and report it.
            logger.warning("drafting failed and is off for this text: %s", error, exc_info=error)
            self.error = f"{type(error).__name__}: {error}"
        self._is_stuck = not run.is_cancelled and not run.proposals
