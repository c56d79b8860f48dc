"""Runs attackers in processes of their own, so that they take no time from what is measured. Standard library only."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from bench.attacks.bounds import Case, Requests
from bench.bare_http import HOST, OTHER_ADDRESS, connect, read_answer

_MP = multiprocessing.get_context("spawn")


@contextmanager
def attacking(attack: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Runs `attack(report, *arguments)` in a process; gives the pipe on which it reports once it has begun."""
    ours, theirs = _MP.Pipe()
    process = _MP.Process(target=attack, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "begun"
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def received(reports: Any, seconds: float = 0.0) -> list[Any]:
    """What an attacker has reported since the last time, and in the next `seconds`."""
    found, deadline_s = [], time.monotonic() + seconds
    while reports.poll(max(0.0, deadline_s - time.monotonic())):
        found.append(reports.recv())
    return found


def in_threads(report: Any, one: Callable[[], object], num_threads: int) -> None:
    """Calls it in each of so many threads, and waits for all."""
    threads = [threading.Thread(target=one, daemon=True) for _ in range(num_threads)]
    report.send("begun")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def for_ever(report: Any, talk: Callable[[], object], num_threads: int) -> None:
    """Talks in each of so many threads, and again whenever that ends or the connection breaks."""

    def one() -> None:
        while True:
            with suppress(OSError):
                talk()
            time.sleep(0.05)

    in_threads(report, one, num_threads)


def repeat(report: Any, port: int, requests: Sequence[bytes], num_connections: int, timeout_s: float) -> None:
    """Keeps a request in flight on each of `num_connections` connections, for ever; reports every answer's status, 0
    where there was none.
    """
    lock, turn = threading.Lock(), count()

    def one() -> None:
        while True:
            status = 0
            with suppress(OSError), socket.create_connection((HOST, port), timeout_s) as connection:
                connection.sendall(requests[next(turn) % len(requests)])
                status = read_answer(connection)
            with lock:
                report.send(status)
            time.sleep(0.0 if status else 0.01)

    in_threads(report, one, num_connections)


def sweep(report: Any, port: int, requests: Requests, cases: Sequence[Case], key: str | None, timeout_s: float) -> None:
    """Sends each case, four at a time on connections that stay open; reports (index, status) of each, then None.
    A status of 0: no answer, or none within `timeout_s`.
    """
    lock, turn = threading.Lock(), count()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if any("{session_id}" in case.route for case in cases):
        threading.Thread(target=_keep_session, args=(port, requests.names, headers), daemon=True).start()

    def one() -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout_s)
        while (index := next(turn)) < len(cases):
            method, path, media, body = requests.request(cases[index], index)
            began_s, status = time.perf_counter(), 0
            try:
                connection.request(method, path, body, headers | {"Content-Type": media})
                response = connection.getresponse()
                while response.read1(1 << 20):
                    if time.perf_counter() > began_s + timeout_s:
                        raise TimeoutError
                status = response.status
            except (OSError, http.client.HTTPException):
                connection.close()
            with lock:
                report.send((index, status))

    in_threads(report, one, 4)
    report.send(None)
    time.sleep(3600)


def _keep_session(port: int, names: dict[str, str], headers: dict[str, str]) -> None:
    """Keeps a session open, whose name is then `names["session_id"]`: another one when it ends."""
    body = json.dumps({"prompt": [5], "max_tokens": 1 << 20, "ignore_eos": True, "patience_ms": 1000.0})
    while True:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(HOST, port, 60.0)
            connection.request("POST", "/v1/sessions", body, headers | {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if b'"session":' in line:
                    names["session_id"] = json.loads(line.removeprefix(b"data: "))["session"]
        time.sleep(0.05)


def pipeline(report: Any, port: int, block: bytes, num_connections: int, reads: bool) -> None:
    """Sends `block` again and again on each connection as fast as it is taken; reads answers only if `reads`."""

    def read(connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(1 << 20):
                pass

    def talk() -> None:
        with socket.create_connection((HOST, port)) as connection:
            if reads:
                threading.Thread(target=read, args=(connection,), daemon=True).start()
            else:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            while True:
                connection.sendall(block)

    for_ever(report, talk, num_connections)


def hold(report: Any, port: int, request: bytes, num_connections: int) -> None:
    """Sends `request` once on each connection and reads nothing; replaces connections that are closed."""

    def talk() -> None:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((HOST, port))
            connection.sendall(request)
            closed = select.poll()
            closed.register(connection, select.POLLRDHUP)  # bytes that arrive stay unread
            closed.poll()

    for_ever(report, talk, num_connections)


def fetch(report: Any, port: int, request: bytes, num_connections: int) -> None:
    """Sends `request` on each connection, reads the answer as fast as it comes, and asks again."""

    def talk() -> None:
        with connect(port) as connection:
            while True:
                connection.sendall(request)
                read_answer(connection)

    for_ever(report, talk, num_connections)


def trickle(report: Any, port: int, heads: Sequence[bytes], line: bytes, every_s: float) -> None:
    """Opens a connection for each of `heads` from another address, sends it, then `line` on each every `every_s`.

    Reports (seconds since the first, connections still open) once a second.
    """
    connections: list[socket.socket] = []
    began_s = time.perf_counter()
    for head in heads:
        try:
            connection = socket.create_connection((HOST, port), 2.0, source_address=(OTHER_ADDRESS, 0))
            connection.sendall(head)
            connection.setblocking(False)
            connections.append(connection)
        except OSError:
            continue  # refused
    report.send("begun")
    next_line_s = time.perf_counter() + every_s
    while True:
        sends = time.perf_counter() >= next_line_s
        next_line_s += every_s if sends else 0.0
        for connection in list(connections):
            try:
                if sends:
                    connection.send(line)
                if connection.recv(4096):
                    continue  # an answer, such as 408; the end of the stream follows
                raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                connection.close()
                connections.remove(connection)
        report.send((time.perf_counter() - began_s, len(connections)))
        time.sleep(1.0)
