"""Watches a server while it is attacked: the latency of /health/live, and its memory."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Final

from bench.attacks.subject import Server, percentile
from bench.bare_http import connect, read_answer, request_bytes

MAX_HEALTH_S: Final = 0.05
MAX_GROWTH_MB: Final = 64.0
_EVERY_S: Final = 0.01
Seen = tuple[list[float], list[float], int]
"""When each answer was asked for (perf_counter), the seconds that it took, and how often the server refused or closed a
connection."""


class Probe:
    """Asks a server for its health all the while, on one connection or on a new one each time."""

    def __init__(self, port: int, reconnects: bool, timeout_s: float) -> None:
        self._seen: Seen
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port, reconnects, timeout_s), daemon=True)
        self._thread.start()

    def end(self) -> Seen:
        """Ends it."""
        self._is_over.set()
        self._thread.join()
        return self._seen

    def _run(self, port: int, reconnects: bool, timeout_s: float) -> None:
        request = request_bytes(port, "GET", "/health/live")
        connection: socket.socket | None = None
        began_s, values, num_failures, pause_s = list[float](), list[float](), 0, 0.0
        while not self._is_over.wait(pause_s):
            began, pause_s = time.perf_counter(), _EVERY_S
            try:
                connection = connection or connect(port, timeout_s)
                connection.sendall(request)
                if read_answer(connection) != 200:
                    raise ConnectionError
            except OSError as error:
                connection = None
                if not isinstance(error, TimeoutError):
                    num_failures += 1
                    continue
            began_s.append(began)
            values.append(time.perf_counter() - began)
            connection = None if reconnects else connection
        self._seen = began_s, values, num_failures


class _Probers(BaseManager):
    """One process for all probes.

    The process that measures has its own work, and attackers leave it little of a small machine: on two cores its
    threads waited up to 3.5 s for a processor, and what it then measured was its own wait (docs/log.md). So the prober
    goes before every other process where the system lets it (Linux, as root).
    """

    probe: Callable[[int, bool, float], Probe]


_Probers.register("probe", Probe)


@cache
def _probers() -> _Probers:
    """It ends with this process."""
    probers = _Probers(ctx=get_context("spawn"))
    probers.start(_take_priority)
    return probers


def _take_priority() -> None:
    """Of the process, and of threads that it starts later, over all others."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        print("health is probed without priority: on a busy machine the prober's own wait counts", file=sys.stderr)


@dataclass(slots=True)
class Latency:
    """Seconds that each GET /health/live took; a connection that was refused or closed is a failure. began_s: when each
    was asked for, by perf_counter.
    """

    values: list[float] = field(default_factory=list)
    num_failures: int = 0
    began_s: list[float] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The largest."""
        return max(self.values, default=float("inf"))

    @property
    def high(self) -> float:
        """The 99th percentile."""
        return percentile(self.values, 0.99) if self.values else float("inf")

    def __str__(self) -> str:
        words = f"p99 {self.high * 1e3:.0f} ms, max {self.worst * 1e3:.0f} ms"
        return words + (f", {self.num_failures} refused" if self.num_failures else "")


@contextmanager
def health_of(server: Server, *, reconnects: bool = False, timeout_s: float = 20.0) -> Iterator[Latency]:
    """Asks all the while, on one connection or on a new one each time; filled in when the context is left."""
    latency, probe = Latency(), _probers().probe(server.port, reconnects, timeout_s)
    try:
        yield latency
    finally:
        latency.began_s, latency.values, latency.num_failures = probe.end()


@contextmanager
def repeatedly(act: Callable[[], object], every_s: float) -> Iterator[None]:
    """Does it all the while, in a thread."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@dataclass(slots=True)
class Memory:
    """MB of a server before an attack, and the most during it. samples: (time by perf_counter, MB)."""

    before_mb: float
    peak_mb: float
    samples: list[tuple[float, float]] = field(default_factory=list)

    @property
    def growth_mb(self) -> float:
        """How much was added."""
        return self.peak_mb - self.before_mb

    @property
    def is_small(self) -> bool:
        """Whether that is within the limit."""
        return self.growth_mb <= MAX_GROWTH_MB


@contextmanager
def memory_of(server: Server) -> Iterator[Memory]:
    """Samples resident memory all the while."""
    memory = Memory(before := server.memory_mb(), before)

    def sample() -> None:
        memory.samples.append((time.perf_counter(), server.memory_mb()))
        memory.peak_mb = max(memory.peak_mb, memory.samples[-1][1])

    with repeatedly(sample, 0.05):
        yield memory
    sample()


@dataclass(frozen=True, slots=True)
class Beside:
    """What an attack costs: the server's health, an idle server's, and the server's memory; whole once the context that
    watched is left.
    """

    health: Latency
    idle: Latency
    memory: Memory

    @property
    def is_small(self) -> bool:
        """Whether memory stays within the limit."""
        return self.memory.is_small

    @property
    def is_prompt(self) -> bool:
        """Whether health answers within the limit, and at its slowest within it beyond the idle server's slowest."""
        return self.health.high < MAX_HEALTH_S and self.health.worst < MAX_HEALTH_S + self.idle.worst

    @property
    def is_steady(self) -> bool:
        """Whether health answers always, and within the limit beyond the idle server's answers."""
        return self.health.high < MAX_HEALTH_S + self.idle.high and not self.health.num_failures

    @property
    def is_well(self) -> bool:
        """Whether all stays within the limits of a local endpoint."""
        return self.is_small and self.is_steady and self.health.worst < 2 * MAX_HEALTH_S + self.idle.worst

    def __str__(self) -> str:
        growth = f"+{self.memory.growth_mb:.0f} MB"
        return f"/health/live {self.health} (an idle server beside it: {self.idle}); {growth}"


@contextmanager
def beside(server: Server, idle: Server) -> Iterator[Beside]:
    """Watches all the while."""
    with memory_of(server) as memory, health_of(server) as health, health_of(idle) as its:
        yield Beside(health, its, memory)
