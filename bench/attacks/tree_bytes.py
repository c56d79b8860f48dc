"""Writes tree messages to the byte, valid and invalid, and sends wrong ones. Standard library only."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterable
from typing import Any, Final

from bench.attacks.attackers import for_ever
from bench.attacks.exchange import HOST, read_answer, request_bytes

MEDIA_TYPE: Final = "application/vnd.outrider.tree"
MAX_NODES: Final = 512
SURE: Final = 15
"""The highest level: 99 of 100."""


def varint(value: int) -> bytes:
    """LEB128."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def tree_bytes(base: int, first: int, nodes: Iterable[tuple[int, int]], level: int = SURE) -> bytes:
    """A message; a node is (token, how many numbers its parent is before it; 0 for the root)."""
    body = bytearray(varint(base) + varint(first))
    for token, back in nodes:
        body.append(level << 4 | min(back, 15))
        body += (varint(back) if back >= 15 else b"") + varint(token)
    return bytes(body)


def chain(count: int, rng: random.Random, *, below: bool = False) -> list[tuple[int, int]]:
    """`count` nodes, each below the one before it. below: also the first, below the node before the message's."""
    return [(rng.randrange(1, 4000), 1 if index or below else 0) for index in range(count)]


def fan(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """`count` different nodes below the root."""
    return [(token, 0) for token in rng.sample(range(1, 4000), count)]


def post_bytes(port: int, session: str, body: bytes) -> bytes:
    """The request with a message."""
    return request_bytes(port, "POST", f"/v1/sessions/{session}/drafts", body, content_type=MEDIA_TYPE)


def wrong_trees(report: Any, port: int, prompt: list[int], sends: bool) -> None:
    """Keeps a session open that answers each commit with four chains of 16 wrong and sure nodes, if `sends`.

    Reports the status of each answer.
    """
    rng = random.Random(1)
    for_ever(report, lambda: _session(report, port, prompt, sends, rng), 1)


def _session(report: Any, port: int, prompt: list[int], sends: bool, rng: random.Random) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1000, "ignore_eos": True}).encode()
    session, first = "", 0
    with socket.create_connection((HOST, port)) as stream, socket.create_connection((HOST, port)) as posts:
        stream.sendall(request_bytes(port, "POST", "/v1/sessions", body))
        for line in stream.makefile("rb"):
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event.get("type") == "open":
                session = event["session"]
            elif event.get("type") == "end":
                return
            elif sends:
                nodes = [node for _ in range(4) for node in chain(16, rng)]
                posts.sendall(post_bytes(port, session, tree_bytes(event["base"] + len(event["tokens"]), first, nodes)))
                report.send(read_answer(posts))
                first += len(nodes)
