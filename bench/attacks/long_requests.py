"""Attacks by the long request of a session's drafts: as fast as it is read, or steady, or by many."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from bench.attacks.attackers import attacking, for_ever
from bench.attacks.exchange import HOST, connect, request_bytes
from bench.attacks.probes import MAX_GROWTH_MB, memory_of
from bench.attacks.subject import NotMeasured, Row, Server, Subject, prompt_of, rates_of, slowed

from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, framed
from outrider.models.wire.tree_draft import MAX_MESSAGE_NODES, ROOT, TreeDraft

LONG: Final[dict[str, Any]] = {"max_tokens": 1900, "ignore_eos": True, "patience_ms": 0}


def long_requests(subject: Subject) -> Iterator[Row]:
    """Sends drafts up long requests as fast as they are read. That others trickle or never end, is said by tests."""
    count = MAX_MESSAGE_NODES
    fan = TreeDraft(0, 0, range(1, 1 + count), [ROOT] * count, [15] * count)
    messages = _chunk(framed(fan.encode())) * 40
    with subject.emulated(step_ms=10.0) as server:
        yield _flooded(
            server, "4 sessions that send 512-node messages up a long request as fast as it is read", messages
        )
        yield _flooded(server, "the same of steady sessions, with filler", _chunk(bytes(1 << 16)), num=4, steady=True)
        yield _flooded(server, "256 steady sessions of one client that send nothing", b"", num=256, steady=True)


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
