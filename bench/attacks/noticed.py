"""Sends requests, four at a time, and measures what another key notices: how long its texts stand still, how long a new
one waits, and how late the server answers for its health.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any, Final

from bench.attacks.attackers import attacking, sweep
from bench.attacks.bounds import Case, Requests
from bench.attacks.probes import MAX_HEALTH_S, Latency, Memory, beside, repeatedly
from bench.attacks.subject import KEYS, Server

ATTACKER, OTHER = KEYS
NUM_TEXTS: Final = 2
"""Of the other key, all the while."""
NEWCOMERS_EVERY_S: Final = 0.2
CAP_S: Final = 10.0
_RECURS: Final = 3
"""So often a request has to delay others in one watch: any process of the machine does so once."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is attacked. plain: a small request. text: the body of the other key's text with this number, for `path`."""

    server: Server
    idle: Server
    requests: Requests
    plain: Case
    path: str
    text: Callable[[int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, and when it was in flight."""

    case: Case
    began_s: float
    ended_s: float
    status: int


@dataclass(slots=True)
class Seen:
    """What was sent, and what others noticed meanwhile. gaps: of the other key's texts, from one commit to the next.
    firsts: of its newcomers (began, seconds to the first token).
    """

    health: Latency
    idle: Latency
    memory: Memory
    sent: list[Sent] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """The newcomers' median."""
        return median(took for _, took in self.firsts) if self.firsts else CAP_S

    @property
    def longest_gap_s(self) -> float:
        """Of the other key's texts."""
        return max((after - before for before, after in self.gaps), default=CAP_S)

    def stalls(self) -> Iterator[tuple[float, float, float]]:
        """(began, ended, seconds beyond an idle server's answers at that time) of each answer for health."""
        idle = list(zip(self.idle.began_s, self.idle.values, strict=True))
        at = 0
        for began_s, took_s in zip(self.health.began_s, self.health.values, strict=True):
            if took_s <= MAX_HEALTH_S:
                continue
            while at < len(idle) and sum(idle[at]) < began_s - 1.0:
                at += 1
            beside = [its for start, its in idle[at : at + 4000] if start < began_s + took_s and start + its > began_s]
            yield began_s, began_s + took_s, took_s - max(beside, default=0.0)

    @property
    def recurring_stall_s(self) -> float:
        """So late or later `_RECURS` answers for health were."""
        return _recurring([excess for _, _, excess in self.stalls()])

    @property
    def recurring_gap_s(self) -> float:
        """So long or longer `_RECURS` gaps were."""
        return _recurring([after - before for before, after in self.gaps])

    def longest_s(self, case: Case) -> float:
        """The longest that this request took."""
        return max((one.ended_s - one.began_s for one in self.sent if one.case == case), default=0.0)

    def during(self, began_s: float, ended_s: float) -> set[Case]:
        """What was in flight then."""
        return {one.case for one in self.sent if one.began_s < ended_s and one.ended_s > began_s}

    def __str__(self) -> str:
        gaps = f"longest gap {self.longest_gap_s * 1e3:.0f} ms"
        memory = f"{self.memory.before_mb:.0f} to {self.memory.peak_mb:.0f} MB"
        return f"health {self.health}, idle {self.idle}, {gaps}, first {self.first_s * 1e3:.0f} ms, {memory}"


def watched(place: Place, cases: list[Case], key: str | None, timeout_s: float, limit_s: float) -> Seen:
    """Sends the cases, four at a time, for at most `limit_s`, and looks what others notice."""
    numbers, firsts = count(1000), list[tuple[float, float]]()

    def newcomer() -> None:
        began_s, body = time.perf_counter(), place.text(next(numbers))
        took_s = place.server.first_token_s(body, CAP_S, key=OTHER, path=place.path)
        firsts.append((began_s, CAP_S if took_s is None else took_s))

    bodies = [place.text(number) for number in range(NUM_TEXTS)]
    with (
        place.server.crowd(bodies, key=OTHER, path=place.path, keeps=True) as crowd,
        beside(place.server, place.idle) as costs,
        repeatedly(newcomer, NEWCOMERS_EVERY_S),
    ):
        crowd.require_running(NUM_TEXTS)
        seen = Seen(costs.health, costs.idle, costs.memory, firsts=firsts)
        with attacking(sweep, place.server.port, place.requests, cases, key, timeout_s) as reports:
            began_s = time.perf_counter()
            deadline_s = began_s + limit_s
            while (left_s := deadline_s - time.perf_counter()) > 0.0 and reports.poll(left_s):
                if (report := reports.recv()) is None:
                    break
                index, *times = report
                seen.sent.append(Sent(cases[index], *times))
        # A text that stands still to the end has one more.
        open_gaps = [
            (stream.commits[-1][0], time.perf_counter())
            for stream in crowd.streams
            if stream.commits and not stream.is_over
        ]
        seen.gaps = [gap for gap in (*crowd.gaps(), *open_gaps) if gap[1] > began_s]
    return seen


def _recurring(values: list[float]) -> float:
    """The `_RECURS` largest one; 0 of fewer."""
    return sorted(values, reverse=True)[_RECURS - 1] if len(values) >= _RECURS else 0.0
