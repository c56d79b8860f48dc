"""Sends requests, four at a time, and measures what another key notices: how long its texts stand still, how long a new
one waits, and how late the server answers for its health.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from bench.attacks.attackers import attacking, sweep
from bench.attacks.bounds import Case, Requests
from bench.attacks.probes import MAX_HEALTH_S, Latency, Memory, health_of, memory_of
from bench.attacks.subject import KEYS, Server, percentile

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

    @property
    def gap_s(self) -> float:
        """The 99th percentile."""
        return percentile([after - before for before, after in self.gaps], 0.99) if self.gaps else CAP_S

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

    @property
    def is_refused(self) -> bool:
        """Whether every request was, so that others of its fields may have found less than they could."""
        return all(400 <= one.status < 500 for one in self.sent)

    def longest_s(self, case: Case) -> float:
        """The longest that this request took."""
        return max((one.ended_s - one.began_s for one in self.sent if one.case == case), default=0.0)

    def during(self, began_s: float, ended_s: float) -> set[Case]:
        """What was in flight then."""
        return {one.case for one in self.sent if one.began_s < ended_s and one.ended_s > began_s}

    def __str__(self) -> str:
        gaps = f"gap p99 {self.gap_s * 1e3:.0f} ms, longest {self.longest_gap_s * 1e3:.0f} ms"
        memory = f"{self.memory.before_mb:.0f} to {self.memory.peak_mb:.0f} MB"
        return f"health {self.health}, idle {self.idle}, {gaps}, first {self.first_s * 1e3:.0f} ms, {memory}"

    @property
    def raw(self) -> dict[str, Any]:
        """For --json."""
        return {
            "num_sent": len(self.sent),
            "p99_ms": self.health.high * 1e3,
            "max_ms": self.health.worst * 1e3,
            "idle_max_ms": self.idle.worst * 1e3,
            "gap_p99_ms": self.gap_s * 1e3,
            "gap_max_ms": self.longest_gap_s * 1e3,
            "first_token_ms": self.first_s * 1e3,
            "peak_mb": self.memory.peak_mb,
        }


@contextmanager
def _newcomers(place: Place) -> Iterator[list[tuple[float, float]]]:
    """Texts of the other key that begin all the while: (began, seconds to the first token)."""
    found: list[tuple[float, float]] = []
    is_over = threading.Event()

    def ask_again() -> None:
        number = 1000
        while not is_over.wait(NEWCOMERS_EVERY_S):
            number += 1
            began_s = time.perf_counter()
            took_s = place.server.first_token_s(place.text(number), CAP_S, key=OTHER, path=place.path)
            found.append((began_s, CAP_S if took_s is None else took_s))

    thread = threading.Thread(target=ask_again, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def watched(place: Place, cases: list[Case], key: str | None, timeout_s: float, limit_s: float) -> Seen:
    """Sends the cases, four at a time, for at most `limit_s`, and looks what others notice."""
    bodies = [place.text(number) for number in range(NUM_TEXTS)]
    with (
        place.server.crowd(bodies, key=OTHER, path=place.path, keeps=True) as crowd,
        memory_of(place.server) as memory,
        health_of(place.server) as health,
        health_of(place.idle) as idle,
        _newcomers(place) as firsts,
    ):
        crowd.require("the other key's texts did not run", lambda: crowd.num_running() >= NUM_TEXTS, 30.0)
        seen = Seen(health, idle, memory, firsts=firsts)
        with attacking(sweep, place.server.port, place.requests, cases, key, timeout_s) as reports:
            began_s = time.perf_counter()
            deadline_s = began_s + limit_s
            while (left_s := deadline_s - time.perf_counter()) > 0.0 and reports.poll(left_s):
                if (report := reports.recv()) is None:
                    break
                index, start_s, end_s, status = report
                seen.sent.append(Sent(cases[index], start_s, end_s, status))
        # A text that stands still to the end has one more.
        ended_s = time.perf_counter()
        open_gaps = [
            (stream.commits[-1][0], ended_s) for stream in crowd.streams if stream.commits and not stream.is_over
        ]
        seen.gaps = [gap for gap in (*crowd.gaps(), *open_gaps) if gap[1] > began_s]
    return seen


def _recurring(values: list[float]) -> float:
    """The `_RECURS` largest one; 0 of fewer."""
    return sorted(values, reverse=True)[_RECURS - 1] if len(values) >= _RECURS else 0.0
