"""Drafts ahead of the target: keeps the belief, has it extended, and sends what is new.

Knows no network: it takes commits and calls `send`. Runs on the event loop; `DraftWorker`, its base, in the thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.edge.drafting.belief import Belief, CommitOutcome
from outrider.edge.drafting.calibration import PROVISIONAL_RANK
from outrider.edge.drafting.depth import DraftPlan
from outrider.edge.drafting.price import SendPrice
from outrider.edge.drafting.tree import GuessNode, look
from outrider.edge.drafting.worker import Drafting, DraftWorker
from outrider.edge.results import GenerationRequest

logger = logging.getLogger(__name__)

MAX_SENT = 256  # nodes of a message

# Called with the number of known tokens, the nodes to send, parents first, and whether they are a whole turn (and maybe
# none); returns the bytes that were sent: 0 where the server has no use for these nodes.
Send = Callable[[int, Sequence[GuessNode], bool], int]


class DraftAhead(DraftWorker):
    """The drafting side of one generation. Make it inside a running event loop; `close` it there.

    is_free: whether `send` would send now. known: committed tokens, in order. hits: tokens of the text that were in the
    tree, by rank. num_turns: commits that were waited for in turns. error: why drafting ended early, if it did.
    """

    def __init__(
        self,
        request: GenerationRequest,
        drafting: Drafting,
        price: SendPrice,
        send: Send,
        is_free: Callable[[], bool],
    ) -> None:
        # A path is drafted as far as the plan says, however unlikely.
        least = _LEAST_KEPT if drafting.limits.width > 1 else 0.0
        super().__init__(request, drafting, Belief(drafting.estimates.calibration.chance, least))
        self._send = send
        self._is_free = is_free
        self._price = price
        self._running: asyncio.Future[None] | None = None
        self._provisional: list[int] = []  # tokens after the known ones, which a cascade's mid has committed
        self.known: Sequence[int] = self._belief.known
        self.num_sent = 0
        self.num_turns = 0
        self.hits: Counter[int] = Counter()
        self.error: str | None = None

    @property
    def plan(self) -> DraftPlan:
        """What to draft now; nothing after the drafter's failure."""
        return self._plan() if self.error is None else DraftPlan(0)

    def _plan(self) -> DraftPlan:
        """The controller's plan, counted from the end of the provisional tokens."""
        plan, num_provisional = super()._plan(), len(self._provisional)
        return replace(plan, depth=plan.depth + num_provisional) if plan.depth and num_provisional else plan

    def on_commit(self, base: int, tokens: Sequence[int], interval_ms: float | None) -> CommitOutcome:
        """Takes a commit; call `pump` afterwards. Raises CloudError as `Belief.on_commit` does.

        interval_ms: time since the previous commit; None where that does not measure the server's pace.
        """
        with self.lock:
            outcome = self._belief.on_commit(base, tokens)
            if not outcome.tokens:
                return outcome
            self.num_turns += self._has_answered
            self._has_answered = False
            self._estimates.on_commit(outcome, interval_ms)
            self._depth.observe(outcome, self._scheduler.is_alone)
            self._belief.tree.replant()
            is_right = list(outcome.tokens[: len(self._provisional)]) == self._provisional[: len(outcome.tokens)]
            self._provisional = self._provisional[len(outcome.tokens) :] if is_right else []
            self._price.committed(len(outcome.tokens))
            self.hits.update(node.rank for node in outcome.hits if node.rank != PROVISIONAL_RANK)
        return outcome

    def on_provisional(self, base: int, tokens: Sequence[int]) -> None:
        """Takes what a cascade's mid committed after `base` tokens, known or provisional; call `pump` afterwards.

        They are no text: the draft goes on after them, and a commit confirms or replaces them.
        """
        num_known = len(self._belief.known)
        if base < num_known:
            tokens, base = tokens[num_known - base :], num_known
        if not tokens or base - num_known > len(self._provisional):
            return
        self._provisional[base - num_known :] = tokens
        del self._provisional[_MOST_PROVISIONAL:]
        with self.lock:
            self._belief.tree.add_trunk(self._provisional)

    def resend(self) -> None:
        """Takes the whole tree as not sent: a new session does not have it."""
        self._provisional = []
        with self.lock:
            self._has_answered = self._is_waited_for = False
            self._belief.tree.renumber()

    def lost(self, nodes: Sequence[GuessNode]) -> None:
        """Takes nodes whose message was lost as not sent.

        They go out with what is sent next, not at once: a server that refuses drafts would get them again and again.
        """
        with self.lock:
            self._belief.tree.unsend(nodes)

    def path(self) -> list[int]:
        """The likeliest path, for a server that takes no trees."""
        return [node.token for node in self._belief.tree.likeliest()]

    def look(self, most: int) -> list[tuple[GuessNode, int]]:
        """The likeliest guesses of what follows the known tokens, as `look`. Their chances may change meanwhile."""
        with self.lock:
            return look(self._belief.tree, most)

    def pump(self) -> None:
        """Sends what is worth it and is not sent yet, and goes on drafting."""
        if self._is_closed or self._running is not None:
            return
        if not self.in_turns:
            self.flush()
        with self.lock:
            has_work = self.error is None and self.has_work()
        if not has_work and self.in_turns:
            self.flush()
        if has_work:
            self._running = self.run()
            self._running.add_done_callback(self._on_run_done)

    def close(self) -> None:
        """Stops drafting after the call in progress, without waiting for it: the text is over."""
        if self._is_closed:
            return
        super().close()
        self._send, self._is_free = lambda num_known, nodes, is_turn: 0, lambda: False  # the text's, which has this
        with self.lock:
            self._belief.tree.clear()
        if (run := self._running) is not None and run.done():
            self._settle(run)

    def flush(self) -> None:
        """Sends unsent nodes that are worth their bytes, unless the plan is silent; in turns all at once, also none.

        After turns a message without the mark ends them, if need be without nodes.
        """
        if self._is_closed or not self._is_free():
            return
        with self.lock:
            is_turn = self.in_turns
            if is_turn and (self._has_answered or not self._belief.known or self._room() <= 0):
                return
            nodes = [] if self.plan.silent else self._belief.tree.take_unsent(self._price.floor, MAX_SENT)
            self._unsent_since = None
            if not (nodes or is_turn or self._is_waited_for):
                return
            if num_bytes := self._send(len(self._belief.known), nodes, is_turn):
                self._price.sent(num_bytes)
                self.num_sent += len(nodes)
                self._has_answered = self._is_waited_for = is_turn

    def _on_run_done(self, run: asyncio.Future[None]) -> None:
        if not run.cancelled():
            self._settle(run)
        self.pump()

    def _settle(self, run: asyncio.Future[None]) -> None:
        """Takes a finished run's error; only once, because closing may have done it already."""
        if self._running is not run:
            return
        self._running = None
        if (error := run.exception()) is not None:
            # Without a draft the text is the same, only slower: go on, and report it.
            logger.warning("drafting failed and is off for this text: %s", error, exc_info=error)
            self.error = f"{type(error).__name__}: {error}"


_MOST_PROVISIONAL = 128
_LEAST_KEPT = 5e-4
"""Guesses of a tree that are less likely to be reached are not kept."""
