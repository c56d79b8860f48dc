"""Defines the messages between the server and vLLM's engine process: msgpack over two sockets in a private directory.

Orders go down (drafts), reports come up (commits, ends, counters). Requests and their cancellation go vLLM's own way.
Both sides are of one version and on one machine, so times are those of the monotonic clock. No pickle.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from outrider.cloud.seam import Totals
from outrider.cloud.vllm.terms import Refusal

SETTINGS_NAME: Final = "engine.json"
MAX_ORDERS: Final = 4096
"""Drafts that each side keeps unread; what comes beyond is dropped, as a draft may be at any time."""
_TOTALS: Final = tuple(field.name for field in fields(Totals))


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine process needs to know; names as in EngineConfig."""

    max_running: int
    max_draft: int
    policy: str
    looks_up: bool


class PathsOrder(msgspec.Struct, tag="paths", array_like=True):
    """Guesses of what follows the first `base` committed tokens, likeliest first. arrived: seconds."""

    number: int
    base: int
    paths: list[list[int]]
    arrived: float


class TreeOrder(msgspec.Struct, tag="tree", array_like=True):
    """The same as a part of a tree; fields as in TreeDraft."""

    number: int
    base: int
    first: int
    tokens: list[int]
    parents: list[int]
    levels: list[int]
    arrived: float


Order = PathsOrder | TreeOrder


class Commit(msgspec.Struct, array_like=True):
    """A pass of a sequence; as CommitEvent. logprobs: as `choosers.LOGPROBS`."""

    number: int
    base: int
    tokens: list[int]
    accepted: int
    proposed: int
    looked_up: int
    logprobs: list[tuple[int, float, list[int], list[float]]] = []


class End(msgspec.Struct, array_like=True):
    """The end of a sequence. reason: "stop", "full" (length or context), "once", "cancelled", "fault", "refused".

    refusal: as `terms.Refusal`, with "refused".
    """

    number: int
    reason: str
    passes: int
    accepted: int
    rejected: int
    looked_up: int
    cached_prompt_tokens: int
    waited_s: float
    refusal: Refusal | None = None


class Gauges(msgspec.Struct, array_like=True):
    """The engine's state; as EngineStats. totals: the fields of Totals in order. distributions: their `numbers`."""

    totals: list[int | float]
    running: int
    queued: int
    num_blocks: int
    free_blocks: int
    block_size: int
    patience_ms: float
    step_ms: float | None
    draft_token_ms: float | None
    distributions: list[list[float]]

    def to_totals(self) -> Totals:
        """The counters."""
        values: dict[str, Any] = dict(zip(_TOTALS, self.totals, strict=True))
        return Totals(**values)


class Report(msgspec.Struct, array_like=True):
    """What a step, or a cancellation, did."""

    commits: list[Commit]
    ends: list[End]
    gauges: Gauges


def totals_list(totals: Totals) -> list[int | float]:
    """The counters in the order of their fields."""
    return [getattr(totals, name) for name in _TOTALS]


encode: Final = msgspec.msgpack.Encoder().encode
decode_order: Final = msgspec.msgpack.Decoder(Order).decode
decode_report: Final = msgspec.msgpack.Decoder(Report).decode


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
