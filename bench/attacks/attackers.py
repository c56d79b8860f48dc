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
from bench.attacks.exchange import HOST, OTHER_ADDRESS, answer_status, connect, read_answer, request_bytes

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


def received(reports: Any) -> list[Any]:
    """What an attacker has reported since the last time."""
    found = []
    while reports.poll():
        found.append(reports.recv())
    return found


def received_for(reports: Any, seconds: float) -> list[Any]:
    """What an attacker reports in that time."""
    found, deadline_s = [], time.monotonic() + seconds
    while (left_s := deadline_s - time.monotonic()) > 0.0 and reports.poll(left_s):
        found.append(reports.recv())
    return found


def _run(report: Any, one: Callable[[int], None], count: int) -> None:
    """Calls one(0), one(1), ... in a thread each, and waits for all."""
    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    report.send("begun")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def for_ever(report: Any, talk: Callable[[], object], num_threads: int) -> None:
    """Talks in each of so many threads, and again whenever that ends or the connection breaks."""

    def one(_: int) -> None:
        while True:
            with suppress(OSError):
                talk()
            time.sleep(0.05)

    _run(report, one, num_threads)


def repeat(report: Any, port: int, requests: Sequence[bytes], num_connections: int, timeout_s: float) -> None:
    """Keeps a request in flight on each of `num_connections` connections, for ever; reports every answer's status."""
    lock = threading.Lock()

    def one(offset: int) -> None:
        index = offset
        while True:
            status = answer_status(port, requests[index % len(requests)], timeout_s)
            index += num_connections
            with lock:
                report.send(status)
            if not status:
                time.sleep(0.01)

    _run(report, one, num_connections)


def sweep(report: Any, port: int, requests: Requests, cases: Sequence[Case], key: str | None, timeout_s: float) -> None:
    """Sends each case, four at a time on connections that stay open; reports (index, began, ended, status) of each,
    then None. A status of 0: no answer, or none within `timeout_s`. Times are perf_counter's, one for all processes.
    """
    lock, turn = threading.Lock(), count()
    if any("{session_id}" in case.route for case in cases):
        threading.Thread(target=_keep_session, args=(port, requests.names, key), daemon=True).start()

    def one(_: int) -> None:
        connection: socket.socket | None = None
        while (index := next(turn)) < len(cases):
            method, path, media, body = requests.request(cases[index], index)
            began_s, status = time.perf_counter(), 0
            try:
                connection = connection or connect(port, timeout_s)
                connection.sendall(request_bytes(port, method, path, body, key, media))
                status, is_open = _read_whole(connection, method, began_s + timeout_s)
            except (OSError, http.client.HTTPException):
                is_open = False
            if connection is not None and not is_open:
                connection.close()
                connection = None
            with lock:
                report.send((index, began_s, time.perf_counter(), status))

    _run(report, one, 4)
    report.send(None)
    time.sleep(3600)


def _read_whole(connection: socket.socket, method: str, deadline_s: float) -> tuple[int, bool]:
    """The status of an answer of any form, read to its end, and whether the connection stays open."""
    with http.client.HTTPResponse(connection, method=method) as response:
        response.begin()
        while response.read1(1 << 20):
            if time.perf_counter() > deadline_s:
                raise TimeoutError
        return response.status, not response.will_close


def _keep_session(port: int, names: dict[str, str], key: str | None) -> None:
    """Keeps a session open, whose name is then `names["session_id"]`: another one when it ends."""
    body = json.dumps({"prompt": [5], "max_tokens": 1 << 20, "ignore_eos": True, "patience_ms": 1000.0}).encode()
    while True:
        with suppress(OSError), socket.create_connection((HOST, port), 60.0) as connection:
            connection.sendall(request_bytes(port, "POST", "/v1/sessions", body, key))
            unread = b""
            while data := connection.recv(65536):
                unread += data
                if (found := unread.find(b'"session":"')) >= 0 and (end := unread.find(b'"', found + 11)) >= 0:
                    names["session_id"], unread = unread[found + 11 : end].decode(), b""
                if b'"type":"end"' in unread:
                    break
                unread = unread[-4096:]
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
        with socket.create_connection((HOST, port)) as connection:
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


def draft_bytes(port: int, session: str, key: str | None = None) -> bytes:
    """The largest draft message: 8 paths of 64 tokens."""
    body = json.dumps({"base": 0, "paths": [[(p * 64 + t) % 4000 + 1 for t in range(64)] for p in range(8)]})
    return request_bytes(port, "POST", f"/v1/sessions/{session}/drafts", body.encode(), key)
