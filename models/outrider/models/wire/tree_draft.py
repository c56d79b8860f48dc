"""Encodes a device's guesses as a tree in which each node is sent once: the draft message since protocol version 2.

A node is a guessed token, its parent, and the chance that it follows if its parent does. The device numbers a session's
nodes 0, 1, 2, ... as it sends them, so a later message goes on below any node of an earlier one. Messages may be lost,
repeated or reordered: a node whose parent never arrives is dropped, nothing else.

The body, in bytes (a varint is LEB128: seven bits a byte, the lowest first, the high bit set on all but the last):

    varint   base: tokens that the device has seen committed in this session
    varint   first: the number of the first node; the others count up from it
    then for each node:
    byte     high four bits: the index of its chance in CHANCES. Low four bits, `back`:
             0: its parent is the last of the `base` tokens; 1 to 14: its parent's number is this much lower;
             15: a varint follows that says by how much
    varint   its token id
last, since protocol version 3 and only where device and target take turns: the bytes 15 and 0
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from outrider.models.errors import RequestError
from outrider.models.wire.fields import MAX_COUNT

TREE_MEDIA_TYPE: Final = "application/vnd.outrider.tree"
MAX_MESSAGE_NODES: Final = 512
ROOT: Final = -1
"""The parent of a node that follows the last committed token that the device knows."""

CHANCES: Final = (0.005, 0.01, 0.02, 0.04, 0.07, 0.11, 0.17, 0.25, 0.34, 0.44, 0.55, 0.67, 0.78, 0.88, 0.95, 0.99)
"""What a node's chance may be: that the target picks it where it has picked its parent."""

_MIDDLES: Final = tuple((a * b / ((1 - a) * (1 - b))) ** 0.5 for a, b in pairwise(CHANCES))
_ESCAPE: Final = 15
_TURN: Final = bytes((_ESCAPE, 0))


def level_of(chance: float) -> int:
    """The index of the entry of CHANCES nearest to `chance`, by log-odds."""
    odds = chance / (1.0 - chance) if chance < 1.0 else float("inf")
    return bisect_right(_MIDDLES, odds)


@dataclass(frozen=True, slots=True)
class TreeDraft:
    """One message. Node i has the number first + i, the token tokens[i], a parent and the chance CHANCES[levels[i]].

    parents: numbers of earlier nodes of this message or of others, or ROOT. is_turn: the device drafts no more before
    the next commit, and answers that with one message, which the verifier may wait for. A message may be empty: nothing
    is to be waited for.
    """

    base: int
    first: int
    tokens: Sequence[int]
    parents: Sequence[int]
    levels: Sequence[int]
    is_turn: bool = False

    def encode(self) -> bytes:
        """The message's body."""
        body = bytearray()
        put_varint(body, self.base)
        put_varint(body, self.first)
        nodes = zip(self.tokens, self.parents, self.levels, strict=True)
        for number, (token, parent, level) in enumerate(nodes, start=self.first):
            back = 0 if parent == ROOT else number - parent
            body.append(level << 4 | min(back, _ESCAPE))
            if back >= _ESCAPE:
                put_varint(body, back)
            put_varint(body, token)
        return bytes(body + _TURN if self.is_turn else body)


def decode_tree(body: bytes) -> TreeDraft:
    """Decodes a message. Raises RequestError `invalid_request` for other bytes.

    Takes varints that are longer than needed, up to five bytes, which `TreeDraft.encode` never writes.
    """
    try:
        base, at = read_varint(body, 0)
        first, at = read_varint(body, at)
        tokens: list[int] = []
        parents: list[int] = []
        levels: list[int] = []
        is_turn = False
        number, size = first, len(body)
        while at < size:
            head = body[at]
            back = head & 15
            if back == _ESCAPE:
                if is_turn := body[at:] == _TURN:
                    break
                back, at = read_varint(body, at + 1)
                if back < _ESCAPE:
                    raise _invalid(f"node {number} encodes the distance {back} of its parent as if it were 15 or more")
            else:
                at += 1
            if back > number:
                raise _invalid(f"node {number} has a parent {back} numbers before it")
            token = body[at]
            if token < 128:  # one byte or two inline: this runs for every node
                at += 1
            elif body[at + 1] < 128:
                token += (body[at + 1] << 7) - 128
                at += 2
            else:
                token, at = read_varint(body, at)
            tokens.append(token)
            parents.append(number - back if back else ROOT)
            levels.append(head >> 4)
            number += 1
    except IndexError:
        raise _invalid("it ends within a node") from None
    if len(tokens) > MAX_MESSAGE_NODES:
        raise _invalid(f"it has {len(tokens)} nodes; expected at most {MAX_MESSAGE_NODES}")
    return TreeDraft(base, first, tokens, parents, levels, is_turn)


def put_varint(body: bytearray, value: int) -> None:
    """Appends a number."""
    while value > 127:
        body.append(value & 127 | 128)
        value >>= 7
    body.append(value)


def read_varint(body: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next one begins; raises IndexError at the body's end."""
    value = shift = 0
    while True:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 28:
            raise _invalid(f"a number has more than {MAX_COUNT.bit_length()} bits")
    if value > MAX_COUNT:
        raise _invalid(f"a number is {value}; expected at most {MAX_COUNT}")
    return value, at


def _invalid(reason: str) -> RequestError:
    return RequestError("invalid_request", f"the body is not a tree of drafts: {reason}; see docs/protocol.md")
