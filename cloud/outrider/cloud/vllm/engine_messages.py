"""Defines the messages between the server and vLLM's engine process: msgpack over two sockets in a private directory.

Orders go down (drafts), reports come up (commits, ends, counters). Requests and their cancellation go vLLM's own way.
Both sides are of one version and on one machine, so times are those of the monotonic clock. No pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from outrider.cloud.distributions import Distributions
from outrider.cloud.seam import SequenceUsage, Totals
from outrider.cloud.vllm.commits import Commit as Commit
from outrider.cloud.vllm.terms import Refusal
from outrider.models.wire.tree_draft import TreeDraft

SETTINGS_NAME: Final = "engine.json"
"""The file with the engine's `VllmConfig`, for the engine process."""
MAX_ORDERS: Final = 4096
"""Drafts that each side keeps unread; what comes beyond is dropped, as a draft may be at any time."""


_SHORT_ARRAY: Final = 0x9
_SHORT_TEXT: Final = 0b101
_UINT8: Final = 0xCC  # 16, 32 and 64 bits follow


class PathsOrder(msgspec.Struct, tag="paths", array_like=True):
    """Guesses of what follows the first `base` committed tokens, likeliest first. arrived: seconds."""

    number: int
    base: int
    paths: list[list[int]]
    arrived: float


class TreeOrder(msgspec.Struct, tag="tree", array_like=True):
    """The same as a part of a tree."""

    number: int
    message: TreeDraft
    arrived: float


Order = PathsOrder | TreeOrder


class End(msgspec.Struct, array_like=True):
    """The end of a sequence. reason: "stop", "full" (length or context), "once", "cancelled", "fault", "refused".

    refusal: as `terms.Refusal`, with "refused".
    """

    number: int
    reason: str
    usage: SequenceUsage
    refusal: Refusal | None = None


class Gauges(msgspec.Struct, array_like=True):
    """The engine's state, as EngineStats; by default, before the first report. distributions: their `numbers`."""

    totals: Totals = msgspec.field(default_factory=Totals)
    running: int = 0
    queued: int = 0
    num_blocks: int = 1
    free_blocks: int = 1
    block_size: int = 0
    patience_ms: float = 0.0
    step_ms: float | None = None
    draft_token_ms: float | None = None
    distributions: list[list[float]] = msgspec.field(default_factory=lambda: Distributions().numbers())


class Report(msgspec.Struct, array_like=True):
    """What a step, or a cancellation, did. gauges: None where only tokens were committed: they follow by themselves."""

    commits: list[Commit]
    ends: list[End]
    gauges: Gauges | None = None


encode: Final = msgspec.msgpack.Encoder().encode
decode_order: Final = msgspec.msgpack.Decoder(Order).decode
decode_report: Final = msgspec.msgpack.Decoder(Report).decode


def number_of(order: bytes) -> int:
    """The sequence that an encoded order is for; of a long one too, without reading it. Raises ValueError, IndexError.

    It is behind the array's head and the tag: a byte, or a byte that tells how many follow.
    """
    if order[0] >> 4 != _SHORT_ARRAY or order[1] >> 5 != _SHORT_TEXT:
        raise ValueError("no order begins like this")
    at = 2 + (order[1] & 31)
    head = order[at]
    if head < 128:
        return head
    if not 0 <= head - _UINT8 <= 3:
        raise ValueError("an order's number is a whole number from 0")
    return int.from_bytes(order[at + 1 : at + 1 + (1 << head - _UINT8)], "big")


def orders_address(place: Path) -> str:
    """Where the engine process listens."""
    return f"ipc://{place}/orders"


def reports_address(place: Path) -> str:
    """Where the server listens."""
    return f"ipc://{place}/reports"


def open_socket(context: zmq.Context[Any], kind: int, most: int = 0) -> zmq.Socket[Any]:
    """A socket that keeps nothing after it is closed. most: messages that each side keeps unread; 0: all."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, most)
    socket.set(zmq.RCVHWM, most)
    return socket
