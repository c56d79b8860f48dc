"""Watches a server while it is attacked: the latency of /health/live, and its memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.attacks.prober import the_prober
from bench.attacks.rows import percentile
from bench.attacks.subject import Server


@dataclass(slots=True)
class Latency:
    """Seconds that each GET /health/live took; a connection that was refused or closed is a failure."""

    values: list[float] = field(default_factory=list)
    num_failures: int = 0
    began_s: list[float] = field(default_factory=list)
    """When each was asked for, by perf_counter; only of `health_of`."""

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
    name = prober.begin(server.port, reconnects=reconnects, timeout_s=timeout_s)
    try:
        yield latency
    finally:
        latency.began_s, latency.values, latency.num_failures = prober.end(name)


def latency_of(reports: Any) -> Latency:
    """What `attackers.probe` has reported so far."""
    latency = Latency()
    while reports.poll():
        latency.values.append(reports.recv())
    return latency


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
