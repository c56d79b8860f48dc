"""Watches a server while it is attacked: the latency of /health/live, and its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from bench.attacks.prober import the_prober
from bench.attacks.subject import Server, percentile

MAX_HEALTH_S: Final = 0.05
MAX_GROWTH_MB: Final = 64.0


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
    latency, prober = Latency(), the_prober()
    prober.send((server.port, reconnects, timeout_s))
    name = prober.recv()
    try:
        yield latency
    finally:
        prober.send(name)
        latency.began_s, latency.values, latency.num_failures = prober.recv()


@dataclass(slots=True)
class Memory:
    """MB of a server before an attack, and the most during it."""

    before_mb: float
    peak_mb: float
    samples: list[tuple[float, float]] = field(default_factory=list)
    """(time by perf_counter, MB)"""

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
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(0.05):
            memory.samples.append((time.perf_counter(), server.memory_mb()))
            memory.peak_mb = max(memory.peak_mb, memory.samples[-1][1])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        is_over.set()
        thread.join()
        memory.peak_mb = max(memory.peak_mb, server.memory_mb())


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

    @property
    def raw(self) -> dict[str, Any]:
        """For --json."""
        return {
            "health_s": self.health.values,
            "idle_s": self.idle.values,
            "before_mb": self.memory.before_mb,
            "growth_mb": self.memory.growth_mb,
        }

    @property
    def in_ms(self) -> dict[str, float]:
        """The same in a few numbers, where there are many of these."""
        return {
            "p99_ms": self.health.high * 1e3,
            "max_ms": self.health.worst * 1e3,
            "idle_p99_ms": self.idle.high * 1e3,
            "idle_max_ms": self.idle.worst * 1e3,
            "failures": self.health.num_failures,
            "peak_mb": self.memory.peak_mb,
        }

    def __str__(self) -> str:
        growth = f"+{self.memory.growth_mb:.0f} MB"
        return f"/health/live {self.health} (an idle server beside it: {self.idle}); {growth}"


@contextmanager
def beside(server: Server, idle: Server) -> Iterator[Beside]:
    """Watches all the while."""
    with memory_of(server) as memory, health_of(server) as health, health_of(idle) as its:
        yield Beside(health, its, memory)
