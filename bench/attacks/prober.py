"""Asks servers for their health, in one process for all of them: how long an answer takes to come, and nothing else.

The process that measures has its own work, and attackers leave it little of a small machine: on two cores its threads
waited up to 3.5 s for a processor, and what it then measured was its own wait (docs/log.md). So the prober goes before
every other process where the system lets it (Linux, as root). Standard library only.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

from bench.attacks.exchange import connect, read_answer, request_bytes

EVERY_S: Final = 0.01
Seen = tuple[list[float], list[float], int]
"""When each answer was asked for (perf_counter), the seconds that it took, and how often the server refused or closed a
connection."""


@cache
def the_prober() -> Connection:
    """A pipe to the one prober of this process, which ends with it. Not safe to share between threads.

    (port, reconnects, timeout_s) begins to ask 127.0.0.1:port, on one connection or on a new one each time; the answer
    is a number. The number ends it; the answer is what was `Seen`.
    """
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs,), daemon=True).start()
    theirs.close()
    if not pipe.recv():
        print("health is probed without priority: on a busy machine the prober's own wait counts", file=sys.stderr)
    return pipe


def _serve(pipe: Connection) -> None:
    """In the prober's process."""
    running: dict[int, _Probe] = {}
    pipe.send(_has_priority())
    while True:
        try:
            order: Any = pipe.recv()
        except EOFError:
            return
        if isinstance(order, int):
            pipe.send(running.pop(order).end())
        else:
            name = max(running, default=0) + 1
            running[name] = _Probe(*order)
            pipe.send(name)


def _has_priority() -> bool:
    """Gives the process, and threads that it starts later, priority over all others."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        return False
    return True


class _Probe:
    def __init__(self, port: int, reconnects: bool, timeout_s: float) -> None:
        self._port, self._reconnects, self._timeout_s = port, reconnects, timeout_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> Seen:
        self._is_over.set()
        self._thread.join()
        return self._seen

    def _run(self) -> None:
        request = request_bytes(self._port, "GET", "/health/live")
        connection: socket.socket | None = None
        began_s, values, num_failures = list[float](), list[float](), 0
        while not self._is_over.is_set():
            began = time.perf_counter()
            try:
                connection = connection or connect(self._port, self._timeout_s)
                connection.sendall(request)
                if read_answer(connection) != 200:
                    raise ConnectionError
            except TimeoutError:
                connection = None
            except OSError:
                num_failures += 1
                connection = None
                self._is_over.wait(EVERY_S)
                continue
            began_s.append(began)
            values.append(time.perf_counter() - began)
            if self._reconnects and connection is not None:
                connection.close()
                connection = None
            self._is_over.wait(EVERY_S)
        if connection is not None:
            connection.close()
        self._seen: Seen = began_s, values, num_failures
