"""Frames of a steady session: so many bytes at a fixed pace in both directions, whatever there is to say.

An observer who sees sizes and times then learns that a text runs, and for how long. What is pending fills the next
frame, filler the rest; a message may span frames. Since protocol version 3; docs/protocol.md and docs/privacy.md say
more.
"""

from __future__ import annotations

import math
import re
from typing import Final, Self

from pydantic import Field, model_validator

from outrider.models.wire.fields import Answer

EVERY_MS: Final = 15.0
"""Less delays less, and costs frames."""
FRAME_BYTES: Final = 192
"""Of a frame. A commit of four tokens has 100, a tree of a step as many."""
MOST_PER_MS: Final = 64.0
"""Bytes up, and an eighth of those down: half a megabit a second."""
_USUAL_STEP_MS: Final = 12.0
NUM_FAST: Final = 16
"""Texts of one owner that have the full pace."""
OPENING_BYTES: Final = 1024
"""The first frame down, with `open`, has a multiple of these."""
LEAST_BODY_BYTES: Final = 4096
PADDED_HEADER: Final = "Outrider-Padded"
"""Header of a request whose answer is to be padded, too."""
_FILLER: Final = re.compile(rb"\x00*")


class SteadyPace(Answer):
    """Of a session's frames, as its `open` says. up, down: bytes of a frame, without its chunk's framing. No device
    takes a pace that would fill its line.
    """

    every_ms: float = Field(default=EVERY_MS, ge=10.0, le=1000.0, allow_inf_nan=False)
    up: int = Field(default=FRAME_BYTES, ge=16)
    down: int = Field(default=FRAME_BYTES, ge=16)

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if max(self.up, self.down / 8) > MOST_PER_MS * self.every_ms:
            raise ValueError(f"frames of {self.up} and {self.down} bytes every {self.every_ms:g} ms are too many bytes")
        return self


def pace_of(num_logprobs: int | None, num_open: int = 1, step_ms: float | None = None) -> SteadyPace:
    """The pace of a session. num_logprobs: as it was asked for: a commit with them has some 25 bytes for each.

    num_open: texts of its owner, this one among them: frames cost the server time, so they come less often then, and
    are larger. step_ms: of the target, if it is known: one that takes few ms has more to say.
    """
    slower = min(64.0, max(1.0, num_open / NUM_FAST))
    size = FRAME_BYTES * slower * max(1.0, min(4.0, _USUAL_STEP_MS / max(step_ms or _USUAL_STEP_MS, 1e-3)))
    down = size if num_logprobs is None else size * (2 + num_logprobs // 4)
    return SteadyPace(every_ms=EVERY_MS * slower, up=math.ceil(size), down=math.ceil(down))


def down_frame(pending: bytearray, size: int) -> bytes:
    """A frame of `size` bytes, taken from what is pending: whole events, or the rest of one and others after it."""
    frame = bytes(pending[:size])
    del pending[:size]
    return frame + comment(size - len(frame))


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
