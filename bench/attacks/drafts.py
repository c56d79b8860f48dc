"""Attacks by drafts: as many as a server takes, trees without parents, as large as they may be and malformed, and long
requests that are sent too fast. That wrong and late drafts cost others nothing is said by tests.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Final

import psutil
from bench.attacks.attackers import attacking, for_ever, pipeline
from bench.attacks.exchange import HOST, NotMeasured, connect, next_bytes, request_bytes
from bench.attacks.probes import MAX_GROWTH_MB, beside, memory_of
from bench.attacks.subject import Row, Server, Subject, prompt_of, rates_of, slowed
from tests.hostile_bodies import BROKEN_TREES

from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, framed
from outrider.models.wire.tree_draft import CHANCES, MAX_MESSAGE_NODES, ROOT, TREE_MEDIA_TYPE, TreeDraft

MAX_MESSAGE_MS: Final = 10.0
WARM_UP_MESSAGES: Final = 10
NUM_MESSAGES: Final = 60
MESSAGES_PER_S: Final = 10.0
"""Of 512 nodes: within the budget of a session's drafts."""
LONG: Final[dict[str, Any]] = {"max_tokens": 1900, "ignore_eos": True, "patience_ms": 0}


def draft_floods(subject: Subject) -> Iterator[Row]:
    """Floods one session with drafts over four connections: with the most that a message may have, with the largest
    trees, whose nodes have parents that were never sent, and with bodies that no encoder writes. That each is refused
    is said by tests.
    """
    largest = {"base": 0, "paths": [[(p * 64 + t) % 4000 + 1 for t in range(64)] for p in range(8)]}
    # Parents a million numbers back: no message has them.
    size, back = MAX_MESSAGE_NODES, 1_000_000
    firsts = range(2 * back, 2 * back + 8 * size, size)
    orphans = [tree(0, first, range(1, 1 + size), range(first - back, first - back + size)) for first in firsts]
    malformed = sorted((body for body, _ in BROKEN_TREES), key=len)
    with subject.emulated(step_ms=10.0) as server, subject.serve() as idle:
        yield _flooded(server, idle, "drafts", [json.dumps(largest).encode()] * 8)
        yield _flooded(server, idle, "nodes without parents", orphans, content_type=TREE_MEDIA_TYPE)
        yield _flooded(server, idle, f"{len(malformed)} malformed trees", malformed, content_type=TREE_MEDIA_TYPE)


def _flooded(server: Server, idle: Server, what: str, bodies: Sequence[bytes], **options: str) -> Row:
    """What four others and the server's health notice of the bodies, in turn with none."""

    @contextmanager
    def flooded(is_flooded: bool) -> Iterator[None]:
        with server.crowd([{"prompt": prompt_of(9), **LONG}]) as crowd:
            path = f"/v1/sessions/{crowd.running().session}/drafts"
            block = b"".join(server.request("POST", path, body, **options) for body in bodies)
            with attacking(pipeline, server.port, block, 4, True) if is_flooded else nullcontext():
                yield

    server.wait_until_awake()
    with beside(server, idle) as seen:
        rates = rates_of(server, flooded)
    return slowed(
        "10",
        f"a flood of {what} to one session, step of 10 ms",
        rates,
        f"; {seen}",
        limit=f"; p99 under 50 ms, max under 50 ms more than the idle server's; +{MAX_GROWTH_MB:.0f} MB",
        is_kept=seen.is_prompt and seen.is_small,
    )


def large_trees(subject: Subject) -> Iterator[Row]:
    """Sends the deepest and the widest trees of 512 nodes, one message after the other, beside messages of one node."""
    rng, size = random.Random(2), MAX_MESSAGE_NODES
    shapes: dict[str, Callable[[int], Sequence[int]]] = {  # the parents, by the number of the first node
        "one node": lambda first: [ROOT],
        "a chain of 512": lambda first: [ROOT, *range(first, first + size - 1)],
        "a chain that each message goes on with": lambda first: range(first - 1, first + size - 1),  # -1: ROOT
        "512 children of one node": lambda first: [ROOT] * size,
    }
    cpu_ms: dict[str, float] = {}
    longest_s: dict[str, float] = {}
    with subject.emulated(step_ms=50.0) as server:
        for name, parents_of in shapes.items():
            server.wait_until_idle()
            with server.crowd([{"prompt": prompt_of(3), **LONG}]) as crowd:
                stream, first, before_s = crowd.running(), 0, 0.0
                for index in range(WARM_UP_MESSAGES + NUM_MESSAGES):
                    if index == WARM_UP_MESSAGES:
                        before_s = _cpu_s(server)
                    parents = parents_of(first)
                    message = tree(len(stream.tokens), first, rng.sample(range(1, 4000), len(parents)), parents)
                    took_s = _post(server, f"/v1/sessions/{stream.session}/drafts", message)
                    first += len(parents)
                    time.sleep(max(0.0, 1.0 / MESSAGES_PER_S - took_s))
                cpu_ms[name] = 1e3 * (_cpu_s(server) - before_s) / NUM_MESSAGES
                longest_s[name] = max((after - before for before, after in crowd.gaps()), default=0.0)
    slowest = max(list(shapes)[1:], key=lambda name: cpu_ms[name])
    extra_ms = cpu_ms[slowest] - cpu_ms["one node"]
    yield Row(
        "18",
        f"the deepest and the widest trees of {size} nodes: the server's CPU per message, over one of one node",
        f"{extra_ms:+.1f} ms to {cpu_ms['one node']:.1f}, most with: {slowest}; longest step "
        f"{longest_s[slowest] * 1e3:.0f} ms of 50",
        f"{MAX_MESSAGE_MS:g} ms",
        extra_ms <= MAX_MESSAGE_MS,
        {"cpu_ms": cpu_ms, "longest_step_s": longest_s},
    )


def _post(server: Server, path: str, body: bytes) -> float:
    """Posts a tree; returns the seconds that it took. Raises NotMeasured where it is not taken."""
    answer = server.ask("POST", path, body, headers={"Content-Type": TREE_MEDIA_TYPE})
    if answer.status != 204:
        raise NotMeasured(f"the server takes no trees: status {answer.status}: {answer.body[:200]!r}")
    return answer.took_s


def _cpu_s(server: Server) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def tree(base: int, first: int, tokens: Sequence[int], parents: Sequence[int]) -> bytes:
    """A message of sure nodes."""
    return TreeDraft(base, first, tokens, parents, [len(CHANCES) - 1] * len(tokens)).encode()


def long_requests(subject: Subject) -> Iterator[Row]:
    """Sends drafts up long requests as fast as they are read. That those end which trickle, are two, or go on after
    their session, is said by tests.
    """
    messages = _chunk(framed(tree(0, 0, range(1, 1 + MAX_MESSAGE_NODES), [ROOT] * MAX_MESSAGE_NODES))) * 40
    with subject.emulated(step_ms=10.0) as server:
        what = "4 sessions that send 512-node messages up a long request as fast as it is read"
        yield _beside_plain(server, what, 4, messages)
        what = "the same of steady sessions, with filler"
        yield _beside_plain(server, what, 4, _chunk(bytes(1 << 16)), steady=True)
        yield _beside_plain(server, "256 steady sessions of one client that send nothing", 256, b"", steady=True)


def _beside_plain(server: Server, what: str, num: int, piece: bytes, **more: bool) -> Row:
    """What floods cost others beside as many sessions that send nothing, and have no pace."""

    @contextmanager
    def flooding(is_flooded: bool) -> Iterator[None]:
        flooded = (piece, more) if is_flooded else (b"", {})
        with ExitStack() as stack:
            for index in range(4):
                stack.enter_context(attacking(flood, server.port, prompt_of(20 + index), num // 4, *flooded))
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
            data = b""
            while not (session := re.search(rb'"session":"([^"]+)"', data)):
                data += next_bytes(stream)
            lines = [f"POST /v1/sessions/{session[1].decode()}/drafts HTTP/1.1", f"Host: {HOST}:{port}"]
            lines += [f"Content-Type: {DRAFTS_MEDIA_TYPE}", "Transfer-Encoding: chunked", "", ""]
            while not piece:
                next_bytes(stream)
            stream.setblocking(False)
            for _ in range(1000):  # the request is ended: again, as often as that is answered
                with suppress(OSError), connect(port, 30.0) as up:
                    up.sendall("\r\n".join(lines).encode())
                    while True:
                        up.sendall(piece)
                        with suppress(BlockingIOError):
                            stream.recv(1 << 20)

    for_ever(report, talk, num)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
