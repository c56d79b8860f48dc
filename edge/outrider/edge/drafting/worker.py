"""Expands the tree of guesses of one text off the event loop, in the scheduler's thread.

Switching threads costs about as much as a call of a small model, so a run expands node after node, the likeliest first,
until none is worth it. It takes new commits into account before every call, also while the drafter still reads the
prompt: a late draft joins where the text is by then. The loop is woken only when guesses are worth sending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from outrider.edge.drafting.belief import Belief
from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.depth import LEAST_REACH, DepthController, DraftPlan
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.scheduler import DraftCall, DraftScheduler
from outrider.edge.drafting.tree import GuessNode
from outrider.edge.results import GenerationRequest
from outrider.models.runtimes.base import BRANCH_COUNTS, padded_branches

_CLEARLY = 1.2  # how much better another number of nodes per call must be
_MAX_CHAIN = 16  # tokens that a source without a model may add at once

OnCall = Callable[[float, float, int], None]
"""Called with when a call of the drafter began and ended, and the nodes that it expanded."""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """width: guesses of one token; 1 drafts a path. max_nodes: of the tree, at most; flush_s: a guess that the server
    waits for is sent after about this time. calm_s: the same for what it does not wait for.
    """

    width: int = 4
    max_nodes: int = 400
    flush_s: float = 0.004
    calm_s: float = 0.010


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts a text. scheduler: its thread drafts. on_call: called there after each call."""

    drafter: Drafter
    depth: DepthController
    estimates: Estimates
    limits: TreeLimits
    scheduler: DraftScheduler
    on_call: OnCall | None = None


class DraftWorker:
    """The side of one text's drafting that runs in the scheduler's thread. Make it inside a running event loop.

    belief: shared with the loop's side, `DraftAhead`; both hold `lock` to touch it. num_drafted: nodes that the drafter
    had guesses of what follows.
    """

    def __init__(self, request: GenerationRequest, drafting: Drafting, belief: Belief) -> None:
        self.lock = threading.Lock()
        self.num_drafted = 0
        self.drafter = drafting.drafter
        self._request = request
        self._belief = belief
        self._depth = drafting.depth
        self._estimates = drafting.estimates
        self._limits = drafting.limits
        self._on_call = drafting.on_call
        self._loop = asyncio.get_running_loop()
        self._scheduler = drafting.scheduler
        self._scheduler.enter()
        self._size = 1  # nodes of a call
        self._has_begun = False
        self._has_guessed = False
        self._is_closed = False
        self._has_answered = False  # the newest commit, by the one message of a turn
        self._is_waited_for = False  # the server has such a message, and waits for the next
        self._continued: GuessNode | None = None  # the root whose continuation was looked up
        self._unsent_since: float | None = None

    @property
    def width(self) -> int:
        """Guesses per token."""
        return 1 if self.in_turns else self._limits.width

    @property
    def in_turns(self) -> bool:
        """Whether the target waits for the next message, and nothing else is sent until the next commit."""
        return self._plan().in_turns

    def run(self) -> asyncio.Future[None]:
        """Starts a run; the future ends with it, with the drafter's exception if it raised one."""
        return self._scheduler.run(self)

    def close(self) -> None:
        """Ends the run after the call in progress, without waiting for it. The drafter stays open: the caller's."""
        if not self._is_closed:
            self._is_closed = True
            self._scheduler.leave()

    def has_work(self) -> bool:
        """Whether a run would expand anything; hold the lock."""
        depth, tree = self._depth_now(), self._belief.tree
        reach = tree.best_reach(depth) if depth > 0 and tree.num_nodes < self._limits.max_nodes else 0.0
        return reach > 0.0 and reach >= self._floor()

    def _plan(self) -> DraftPlan:
        """What to draft now; thread-safe."""
        return self._depth.plan(self._estimates.turns.are_possible and self._scheduler.is_alone)

    def _room(self) -> int:
        """How many guessed tokens the rest of the text can use: its last token is always the target's own."""
        return self._request.max_tokens - len(self._belief.known) - 1

    def _depth_now(self) -> int:
        return 0 if self._has_answered and self.in_turns else min(self._plan().depth, self._room())

    def flush(self) -> None:
        """Called on the loop when guesses should be sent."""

    # -- in the scheduler's thread -------------------------------------------------------------------------------------

    def is_wanted(self) -> bool:
        """Whether anything is worth drafting; gives the drafter the newest commits."""
        if self._is_closed:
            return False
        if not self._has_begun:
            self.drafter.begin(self._request.prompt, self._request.params, self._request.plan)
            self._has_begun = True
        with self.lock:
            self._catch_up()
            return self.has_work()

    def next_call(self, most: int) -> DraftCall | None:
        """The nodes of the next call, at most `most`."""
        with self.lock:
            nodes = self._next_nodes(most)
            branches = [node.path() for node in nodes]
        return DraftCall(nodes, branches) if nodes else None

    def take(self, call: DraftCall, found: list[list[Guess]], before: float, now: float) -> None:
        """Takes a call's guesses."""
        if self._is_closed:
            return  # the estimates are another text's by now
        if self._on_call is not None:
            self._on_call(before, now, len(call.nodes))
        with self.lock:
            if not self._belief.tree.unsent:
                self._unsent_since = None  # a commit took what was waiting
            for node, guesses in zip(call.nodes, found, strict=True):
                self._belief.tree.expand(node, guesses)
            self.num_drafted += sum(map(bool, found))
            # The first call includes the prompt; one without guesses ran nothing.
            if self._has_guessed and any(found):
                self._estimates.on_drafted((now - before) * 1e3, padded_branches(len(call.nodes)))
            is_due = self._is_due(before, now)
        self._has_guessed = True
        if is_due:
            self._loop.call_soon_threadsafe(self.flush)

    def _catch_up(self) -> None:
        """Gives the drafter the tokens committed since its last call."""
        num_new = len(self._request.prompt) + len(self._belief.known) - self.drafter.length
        if num_new:
            self.drafter.extend(self._belief.known[-num_new:])
        tree = self._belief.tree
        if self._limits.width > 1 and self._continued is not tree.root and not tree.root.children:
            self._continued = tree.root
            tree.add_path(self.drafter.continuation(min(_MAX_CHAIN, self._room(), self._plan().depth)))

    def _floor(self) -> float:
        return max(self._plan().floor, LEAST_REACH if self._limits.width > 1 else 0.0)

    def _next_nodes(self, most: int) -> list[GuessNode]:
        """The nodes of the next call: as many as give the most chance of being reached per millisecond."""
        tree, depth = self._belief.tree, self._depth_now()
        if self._is_closed or depth <= 0 or tree.num_nodes >= self._limits.max_nodes:
            return []
        if self._estimates.calls.lacks_one:
            most = 1
        if most > 1:
            reaches = tree.reaches(most)
            sizes = [size for size in BRANCH_COUNTS if size <= most]
            rates = {size: sum(reaches[:size]) / self._estimates.calls.ms(size) for size in sizes}
            best = max(sizes, key=rates.__getitem__)
            # A change of size is dear where a runtime prepares for it.
            if self._size not in rates or rates[best] > _CLEARLY * rates[self._size]:
                self._size = best
        floor, size = self._floor(), min(most, self._size)
        nodes = tree.take_best(1, floor, depth)
        if nodes and size > 1:  # drafting the others costs what they add to the call: on an NPU next to nothing
            sending = min(floor, max(LEAST_REACH, self._plan().sending))
            share = min(1.0, self._estimates.calls.added(size))
            nodes += tree.take_best(size - 1, sending + share * (floor - sending), depth)
        return nodes

    def _is_due(self, before: float, now: float) -> bool:
        """Whether to send now instead of waiting for more. before, now: when the last call began and ended."""
        tree = self._belief.tree
        if not tree.unsent or self.in_turns:
            return False
        if self._unsent_since is None:
            self._unsent_since = before  # else the first guess of a slow draft would wait for the second
        waited_s = now - self._unsent_since
        if tree.has_sent:  # the server has something to verify
            return waited_s >= self._limits.calm_s
        answer, path = self._plan().answer, len(tree.likeliest())
        if answer and path >= answer:
            return True
        # If the answer will be complete soon, wait for it.
        missing_s = (answer - path) * self._estimates.calls.ms(1) / 1e3
        is_nearly_whole = answer > path and missing_s < self._limits.flush_s
        # But not for long: the best nodes may be alternatives, which do not make the path longer.
        return waited_s >= self._limits.flush_s * (2 if is_nearly_whole else 1)
