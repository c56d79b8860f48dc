"""Watches a server while it is attacked: the latency of /health/live, and its memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.attacks.exchange import HOST, read_answer, request_bytes
from bench.attacks.rows import percentile
from bench.attacks.subject import Server

_EVERY_S = 0.01


@dataclass(slots=True)
class Latency:
    """Seconds that each GET /health/live took; a connection that was refused or closed is a failure."""

    values: list[float] = field(default_factory=list)
    num_failures: int = 0

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
    """Asks all the while, on one connection or on a new one each time; complete when the context is left."""
    latency, is_over = Latency(), threading.Event()
    thread = threading.Thread(target=_ask, args=(server.port, latency, is_over, reconnects, timeout_s), daemon=True)
    thread.start()
    try:
        yield latency
    finally:
        is_over.set()
        thread.join()


def latency_of(reports: Any) -> Latency:
    """What `attackers.probe` has reported so far."""
    latency = Latency()
    while reports.poll():
        latency.values.append(reports.recv())
    return latency


def _ask(port: int, latency: Latency, is_over: threading.Event, reconnects: bool, timeout_s: float) -> None:
    request = request_bytes(port, "GET", "/health/live")
    connection: socket.socket | None = None
    while not is_over.is_set():
        began_s = time.perf_counter()
        try:
            if connection is None:
                connection = socket.create_connection((HOST, port), timeout_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request)
            if read_answer(connection) != 200:
                raise ConnectionError
        except TimeoutError:
            connection = None
        except OSError:
            latency.num_failures += 1
            connection = None
            is_over.wait(_EVERY_S)
            continue
        latency.values.append(time.perf_counter() - began_s)
        if reconnects and connection is not None:
            connection.close()
            connection = None
        is_over.wait(_EVERY_S)
    if connection is not None:
        connection.close()


@dataclass(slots=True)
class Memory:
    """MB of a server before an attack, and the most during it."""

    before_mb: float
    peak_mb: float

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
            memory.peak_mb = max(memory.peak_mb, server.memory_mb())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        is_over.set()
        thread.join()
        memory.peak_mb = max(memory.peak_mb, server.memory_mb())
