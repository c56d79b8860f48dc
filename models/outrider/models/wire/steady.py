"""Frames of a steady session: so many bytes at a fixed pace in both directions, whatever there is to say.

An observer who sees sizes and times then learns that a text runs, and for how long. What is pending fills the next
frame, filler the rest; a message may span frames. Since protocol version 3; docs/protocol.md and docs/privacy.md say
more.
"""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field

from outrider.models.wire.fields import Answer

EVERY_MS: Final = 15.0
"""Less delays less, and costs frames."""
FRAME_BYTES: Final = 192
"""Of a frame. A commit of four tokens has 100, a tree of a step as many."""
NUM_FAST: Final = 16
"""Texts of one owner that have the full pace."""
OPENING_BYTES: Final = 1024
"""The first frame down, with `open`, has a multiple of these."""
LEAST_BODY_BYTES: Final = 4096
PADDED_HEADER: Final = "Outrider-Padded"
"""Header of a request whose answer is to be padded, too."""
_FILLER: Final = re.compile(rb"\x00*")


class SteadyPace(Answer):
    """Of a session's frames, as its `open` says. up, down: bytes of a frame, without its chunk's framing."""

    every_ms: float = Field(default=EVERY_MS, ge=1.0, le=1000.0)
    up: int = Field(default=FRAME_BYTES, ge=16, le=1 << 16)
    down: int = Field(default=FRAME_BYTES, ge=16, le=1 << 16)


def pace_of(num_logprobs: int | None, num_open: int = 1) -> SteadyPace:
    """The pace of a session. num_logprobs: as it was asked for: a commit with them has some 25 bytes for each.
    num_open: texts of its owner, this one among them: frames cost the server time, whatever is in them.
    """
    every_ms = EVERY_MS * max(1.0, num_open / NUM_FAST)
    down = FRAME_BYTES if num_logprobs is None else FRAME_BYTES * (2 + num_logprobs // 4)
    return SteadyPace(every_ms=min(every_ms, 1000.0), down=down)


def down_frame(pending: bytes, size: int) -> tuple[bytes, bytes]:
    """A frame of `size` bytes, and what is left. pending: whole events, or the rest of one and others after it."""
    if len(pending) >= size:
        return pending[:size], pending[size:]
    return pending + comment(size - len(pending)), b""


def comment(size: int) -> bytes:
    """So many bytes between two events that mean nothing to who reads them."""
    return b":" + b" " * (size - 2) + b"\n" if size > 1 else b"\n" * size


def filler_end(data: bytes, begin: int) -> int:
    """Where the filler that begins there ends: zeros between the messages of a long request, which have no length 0."""
    found = _FILLER.match(data, begin)
    assert found is not None
    return found.end()


def padded(body: bytes) -> bytes:
    """A JSON body with spaces behind it, up to the next power of two and at least LEAST_BODY_BYTES."""
    return body.ljust(max(LEAST_BODY_BYTES, 1 << (len(body) - 1).bit_length()))
