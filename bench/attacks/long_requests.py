"""Attacks by the long request of a session's drafts: too fast, steady, by many, trickled, endless, two at a time."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from bench.attacks.attackers import attacking, for_ever
from bench.attacks.exchange import HOST, connect, read_answer, request_bytes
from bench.attacks.probes import MAX_GROWTH_MB, memory_of
from bench.attacks.subject import NotMeasured, Row, Server, Subject, prompt_of, rates_of, slowed

from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, framed
from outrider.models.wire.tree_draft import MAX_MESSAGE_NODES, ROOT, TreeDraft

NUM_TRICKLES: Final = 64
FINISH_S: Final = 15.0
"""A message has 10 s, and connections are looked at once a second."""
LONG: Final[dict[str, Any]] = {"max_tokens": 1900, "ignore_eos": True, "patience_ms": 0}


def long_requests(subject: Subject) -> Iterator[Row]:
    """Sends drafts up long requests as fast as they are read, and others that trickle or never end."""
    messages = _chunk(framed(_fan(MAX_MESSAGE_NODES))) * 40
    with subject.emulated(step_ms=10.0) as server:
        yield _flooded(
            server, "4 sessions that send 512-node messages up a long request as fast as it is read", messages
        )
        yield _flooded(server, "the same of steady sessions, with filler", _chunk(bytes(1 << 16)), num=4, steady=True)
        yield _flooded(server, "256 steady sessions of one client that send nothing", b"", num=256, steady=True)
        server.wait_until_idle()
        yield _trickles(server)
        server.wait_until_idle()
        yield _endless(server)


def _flooded(server: Server, what: str, piece: bytes, num: int = 4, **more: bool) -> Row:
    """What floods cost others beside as many sessions that send nothing, and have no pace."""

    @contextmanager
    def flooding(is_flooded: bool) -> Iterator[None]:
        flooding = (piece, more) if is_flooded else (b"", {})
        with ExitStack() as stack:
            for index in range(4):
                stack.enter_context(attacking(flood, server.port, prompt_of(20 + index), num // 4, *flooding))
            yield

    with memory_of(server) as memory:
        rates = rates_of(server, flooding)
    growth, limit = f"; +{memory.growth_mb:.0f} MB", f"; +{MAX_GROWTH_MB:.0f} MB"
    return slowed("52", f"{what}, step of 10 ms; memory", rates, growth, limit=limit, is_kept=memory.is_small)


def flood(report: Any, port: int, prompt: list[int], num: int, piece: bytes, more: dict[str, bool]) -> None:
    """Opens `num` sessions at a time, again and again; each has a long request with `piece` for ever, if there is one.
    more: fields of the sessions.
    """
    body = json.dumps({"prompt": prompt, **LONG, **more}).encode()

    def talk() -> None:
        with connect(port) as stream:
            stream.sendall(request_bytes(port, "POST", "/v1/sessions", body))
            head = _long_head(port, _session_of(stream))
            while not piece and stream.recv(1 << 20):
                pass
            stream.setblocking(False)
            for _ in range(1000):  # the request is ended: again, as often as that is answered
                with suppress(OSError), connect(port, 30.0) as up:
                    up.sendall(head)
                    while True:
                        up.sendall(piece)
                        with suppress(BlockingIOError):
                            stream.recv(1 << 20)

    for_ever(report, talk, num)


def _trickles(server: Server) -> Row:
    """The beginnings of messages, then a byte a second: each is refused in time, and the text goes on."""
    with ExitStack() as stack:
        crowd = stack.enter_context(server.crowd([{"prompt": prompt_of(i), **LONG} for i in range(NUM_TRICKLES)]))
        crowd.require("the sessions did not run", lambda: all(each.session for each in crowd.streams), 30.0)
        ups = [stack.enter_context(connect(server.port, FINISH_S)) for _ in crowd.streams]
        for up, each in zip(ups, crowd.streams, strict=True):
            up.sendall(_long_head(server.port, each.session) + _chunk(framed(bytes(6000))[:2]))
        began_s, statuses = time.monotonic(), dict[int, int]()
        while len(statuses) < len(ups) and time.monotonic() - began_s < FINISH_S:
            time.sleep(1.0)
            for index, up in enumerate(ups):
                if index not in statuses:
                    with suppress(OSError):
                        up.sendall(_chunk(b"\x01"))
                        up.settimeout(0.001)
                        statuses[index] = read_answer(up)
        took_s = time.monotonic() - began_s
        # A session that has ended by itself answers 204.
        met = len(statuses) == len(ups) and set(statuses.values()) <= {408, 204} and 408 in statuses.values()
    return Row(
        "52",
        f"{NUM_TRICKLES} long requests whose first message trickles, a byte a second: answered 408",
        f"{sum(status == 408 for status in statuses.values())} within {took_s:.0f} s",
        f"all, within {FINISH_S:g} s",
        met,
        {"statuses": statuses, "took_s": took_s},
    )


def _endless(server: Server) -> Row:
    """A body that stays open after its session, and goes on: answered at once, then closed; and a second one."""
    with server.crowd([{"prompt": prompt_of(3), **LONG}]) as crowd, connect(server.port, 30.0) as up:
        session = crowd.running().session
        message = _chunk(framed(_fan(1)))
        up.sendall(_long_head(server.port, session) + message)
        crowd.require("the session did not go on", lambda: crowd.num_commits() > 20, 30.0)
        with connect(server.port, 30.0) as second:
            second.sendall(_long_head(server.port, session) + message)
            second_status = read_answer(second)
        server.ask("DELETE", f"/v1/sessions/{session}")
        began_s = time.monotonic()
        status = read_answer(up)
        answered_s = time.monotonic() - began_s
        closed_s: float | None = None
        with suppress(TimeoutError):
            while time.monotonic() - began_s < 90.0:
                try:
                    up.sendall(_chunk(b"\x01"))
                except OSError:
                    closed_s = time.monotonic() - began_s
                    break
                time.sleep(0.5)
    return Row(
        "52",
        "a second long request beside the first; a long request that goes on after its session's end",
        f"the second {second_status}; the first {status} after {answered_s * 1e3:.0f} ms, "
        + ("not closed" if closed_s is None else f"closed after {closed_s:.0f} s"),
        "409; 204 within a second; closed within 80 s",
        second_status == 409 and status == 204 and answered_s < 1.0 and closed_s is not None and closed_s < 80.0,
        {"second": second_status, "first": status, "answered_s": answered_s, "closed_s": closed_s},
    )


def _fan(count: int) -> bytes:
    return TreeDraft(0, 0, range(1, 1 + count), [ROOT] * count, [15] * count).encode()


def _long_head(port: int, session: str) -> bytes:
    lines = [f"POST /v1/sessions/{session}/drafts HTTP/1.1", f"Host: {HOST}:{port}"]
    lines += [f"Content-Type: {DRAFTS_MEDIA_TYPE}", "Transfer-Encoding: chunked", "", ""]
    return "\r\n".join(lines).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _session_of(stream: socket.socket) -> str:
    """From the first event. Raises OSError."""
    data = b""
    while b"\n\n" not in data.partition(b"data: ")[2]:
        if not (piece := stream.recv(1 << 16)):
            raise ConnectionResetError("the server closed the stream")
        data += piece
    found = json.loads(data.partition(b"data: ")[2].partition(b"\n\n")[0])
    if found.get("protocol", 0) < 3:
        raise NotMeasured("the server takes no long requests")
    return str(found["session"])
