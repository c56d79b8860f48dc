"""Measures times and acceptance while the agent runs.

Every rate is a ratio of sums with exponential forgetting, never a mean of ratios: a mean of per-commit acceptance rates
gives a commit that tested one token the weight of one that tested ten. The agent keeps it across generations. What the
draft does is measured once, what an endpoint and the way to it do for each endpoint.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

from outrider.edge.drafting.belief import CommitOutcome
from outrider.edge.drafting.calibration import Calibration
from outrider.edge.drafting.forgetting import ForgettingRatio
from outrider.edge.drafting.turns import Turns
from outrider.models.wire.protocol import MAX_DRAFT_LAG_MS

_ANSWER_TOKENS = 4  # roughly, drafted before the answer to a commit is sent


@dataclass(slots=True)
class _EndpointTimes:
    """Times of one endpoint and of the way to it."""

    interval: ForgettingRatio = field(default_factory=lambda: ForgettingRatio(40.0, 0.01, keep=0.9))
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=24))
    opened_in_ms: float = 0.0
    step_ms: float | None = None
    extra_ms: float | None = None
    turns: Turns = field(default_factory=Turns)


class Estimates:
    """Everything a depth controller may know. All times in ms.

    The acceptance starts at an optimistic 0.6 with the weight of two tokens, so an always-wrong draft shows within ten.
    Round trips, steps and commits are those of the endpoint that `use` named last. calls: times of the drafter's calls.
    interval_ms: from the commit before to the newest; None where that does not measure the server's pace.
    """

    def __init__(self) -> None:
        self.accepted = ForgettingRatio(0.6, 2.0, keep=0.98)
        self.calibration = Calibration()
        self.calls = CallTimes()
        self.interval_ms: float | None = None
        self._endpoint = _EndpointTimes()
        self._endpoints: dict[str, _EndpointTimes] = {}

    def use(self, url: str) -> None:
        """Measures and predicts for this endpoint from now on, and goes on with what was measured there before.

        Times taken before any endpoint was named count for the first.
        """
        if not self._endpoints:
            self._endpoints[url] = self._endpoint
        self._endpoint = self._endpoints.setdefault(url, _EndpointTimes())

    def for_other_link(self) -> Estimates:
        """A copy that knows the draft, and no endpoint yet."""
        other = copy.deepcopy(self)
        other._endpoint, other._endpoints = _EndpointTimes(), {}
        return other

    def on_open(
        self,
        took_ms: float,
        step_ms: float | None,
        draft_token_ms: float | None,
        *,
        no_turns: str | None = "",
    ) -> None:
        """Takes the opening of a session, with the times that the server measured, or None.

        no_turns: as the obstacle of `Turns`.
        """
        self._endpoint.opened_in_ms = took_ms
        self._endpoint.step_ms = step_ms
        self._endpoint.extra_ms = draft_token_ms
        self._endpoint.turns.obstacle = no_turns

    def on_times(self, step_ms: float | None, draft_token_ms: float | None) -> None:
        """Takes newer times than those of the opening; None: nothing new."""
        if step_ms is not None:
            self._endpoint.step_ms = step_ms
        if draft_token_ms is not None:
            self._endpoint.extra_ms = draft_token_ms

    def on_commit(self, outcome: CommitOutcome, interval_ms: float | None) -> None:
        """Takes a commit: every guess that it tested, right or wrong."""
        self.calls.committed()
        for guesses, token in outcome.tested:
            self.calibration.observe(guesses, token)
            self.accepted.add(float(guesses[0].token == token), 1.0)
        if interval_ms is not None and outcome.tokens:
            self._endpoint.interval.add(interval_ms, 1.0)
        self.interval_ms = interval_ms

    def on_drafted(self, took_ms: float, num_nodes: int) -> None:
        """Takes the time of one call of the drafter, which expanded `num_nodes` nodes."""
        self.calls.add(took_ms, num_nodes)

    def on_posted(self, took_ms: float) -> None:
        """Takes the time from a draft message to its answer."""
        self._endpoint.round_trips.append(took_ms)

    @property
    def turns(self) -> Turns:
        """Whether to take turns with this endpoint's target."""
        return self._endpoint.turns

    @property
    def acceptance(self) -> float:
        """Chance that the target picks the draft's own pick."""
        return self.accepted.value

    @property
    def draft_ms(self) -> float:
        """Time to expand one node in a call of its own."""
        return self.calls.ms(1)

    @property
    def round_trip_ms(self) -> float:
        """Round trip of a message: the shortest of the recent ones, since the rest is queueing, not distance."""
        times = self._endpoint
        return min(times.round_trips) if times.round_trips else times.opened_in_ms

    @property
    def lag_ms(self) -> float | None:
        """Time from a commit on the server until drafts based on it arrive there; None before the first post.

        Not more than a session's request takes: a laptop that slept has measured the night.
        """
        if not self._endpoint.round_trips:
            return None
        return min(MAX_DRAFT_LAG_MS, round(self.round_trip_ms + _ANSWER_TOKENS * self.draft_ms, 1))

    @property
    def step_ms(self) -> float:
        """The target's step without drafted tokens, as the server measured it, else the mean time between commits."""
        times = self._endpoint
        return times.step_ms if times.step_ms is not None else times.interval.value

    @property
    def extra_ms(self) -> float:
        """Extra time of a drafted token in a step; 3 % of a step until the server reports it."""
        return self._endpoint.extra_ms if self._endpoint.extra_ms is not None else 0.03 * self.step_ms


class CallTimes:
    """Time of a drafter's call by the number of nodes that it expands: ratios of sums, on the line between two sizes,
    and beyond the largest on the line through the last two, which is nearly flat on an NPU.

    Until a second size was measured, each further node costs a quarter of a call: little enough to try some, and what
    is tried is measured. A size that was not run for long is forgotten: its few calls may have been slow for another
    reason, and nobody would try it again. The smallest is kept, and a call of one node asked for. A call that takes
    much longer than those before counts as _MOST times these: the device may have slept in it.
    """

    _KEEP = 0.95
    _GUESS = 0.25
    _LONG = 256  # calls
    _MOST = 8.0
    _ODD_MS = 100.0  # shorter calls are always believed

    def __init__(self) -> None:
        self._seen: dict[int, ForgettingRatio] = {}
        self._last: dict[int, tuple[int, int]] = {}  # by size: calls and commits before its last call
        self._num_calls = self._num_commits = 0

    def add(self, took_ms: float, num_nodes: int) -> None:
        """Takes one call."""
        if num_nodes in self._seen:
            took_ms = min(took_ms, max(self._ODD_MS, self._MOST * self._seen[num_nodes].value))
        self._num_calls += 1
        seen = self._seen.setdefault(num_nodes, ForgettingRatio(1.0, 0.01, self._KEEP))
        seen.fade(self._num_commits - self._last.get(num_nodes, (0, self._num_commits))[1])
        seen.add(took_ms, 1.0)
        self._last[num_nodes] = self._num_calls, self._num_commits
        for size in sorted(self._seen)[1:]:
            if self._num_calls - self._last[size][0] > self._LONG:
                del self._seen[size]

    def committed(self) -> None:
        """Counts a commit. Probes come once in many: then few of them must show that the draft is fast again."""
        self._num_commits += 1

    @property
    def lacks_one(self) -> bool:
        """Whether a single node was last run long ago."""
        return self._num_calls - self._last.get(1, (0, 0))[0] > self._LONG

    def added(self, num_nodes: int) -> float:
        """What each node of a call beyond its first adds to it, over a call of one; at least 0."""
        one = self.ms(1)
        return max(0.0, self.ms(num_nodes) - one) / (max(1e-6, one) * max(1, num_nodes - 1))

    def ms(self, num_nodes: int) -> float:
        """Predicted milliseconds."""
        if not self._seen:
            return 1.0 + self._GUESS * (num_nodes - 1)
        sizes = sorted(self._seen)
        below = [size for size in sizes if size <= num_nodes]
        above = [size for size in sizes if size >= num_nodes]
        if below and above:
            low, high = below[-1], above[0]
            start, end = self._seen[low].value, self._seen[high].value
            return start + (end - start) * ((num_nodes - low) / (high - low) if high > low else 0.0)
        if len(below) > 1:
            low, high = below[-2:]
            start, end = self._seen[low].value, self._seen[high].value
            return end + max(0.0, end - start) / (high - low) * (num_nodes - high)
        nearest = below[-1] if below else above[0]
        one = self._seen[nearest].value / (1.0 + self._GUESS * (nearest - 1))
        return self._seen[nearest].value + self._GUESS * one * (num_nodes - nearest)
