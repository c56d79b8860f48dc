"""Rounds cache blocks to FP16 or FP8 for their files, and checks the error of every element.

A row is what stands along the last axis of a cache tensor: one token's keys or values of one head. It is multiplied by
a power of two, which is exact, so that its largest magnitude m lies just below the type's upper end, and rounded to
the nearest even. With p bits of fraction, rounding a normal number x changes it by 2^-(p+1) |x| at most, and a
subnormal one by half of the smallest step (Goldberg, "What Every Computer Scientist Should Know About Floating-Point
Arithmetic", 1991, section 1.2, for the first; IEEE 754-2019, section 3.3, for the step). So

    |rounded - x| <= 2^-(p+1) |x| + f m

    fp16  binary16 of IEEE 754: p = 10, step 2^-24, m scaled to at least 2^14, so f = 2^-25 / 2^14 = 2^-39
    fp8   E4M3 of "OCP 8-bit Floating Point Specification", rev. 1.0: p = 3, step 2^-9, m scaled to at least 2^7, so
          f = 2^-10 / 2^7 = 2^-17

A block is decoded as it will be read, and compared with this. One with an element beyond it (an infinity, NaN, a
magnitude that rounds beyond the cache's own type) is kept as it is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.config import SpillType

_PART: Final = re.compile(r"(?:torch\.)?([a-z]+[0-9]+)\[([0-9, ]+)\]")
_NAMES: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_ELEMENTS: Final[dict[str, np.dtype[Any]]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
"""Of a cache tensor; of bfloat16, which numpy does not have, the bits."""
_MOST_SHIFT: Final = 126
"""2^126 and 2^-126 are normal numbers of float32."""
_CHUNK_BYTES: Final = 8 << 20
"""Of blocks that are rounded at a time: it takes some times as much memory."""

Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """A row's elements x change by `relative` |x| + `floor` m at most; m: the row's largest magnitude.

    top: m is scaled below 2 to this power. code: numpy's type of the rounded elements.
    """

    relative: float
    floor: float
    top: int
    code: np.dtype[Any]


BOUNDS: Final = {
    SpillType.FP16: ErrorBound(2.0**-11, 2.0**-39, 15, np.dtype("<f2")),
    SpillType.FP8: ErrorBound(2.0**-4, 2.0**-17, 8, np.dtype("u1")),
}


class BlockCodec:
    """Rounds blocks of one cache layout to one type. Any thread may call it."""

    def __init__(self, kind: SpillType, layout: tuple[str, ...]) -> None:
        """layout: as `BlockRuntime.block_layout`. Raises ValueError for a cache whose elements are no wider."""
        self._bound = bound = BOUNDS[kind]
        parts = [_part(each) for each in layout]
        found = sorted({name for name, _ in parts})
        if any(name not in _ELEMENTS or _ELEMENTS[name].itemsize <= bound.code.itemsize for name in found):
            raise ValueError(f"a KV cache of {', '.join(found)} is no wider than {kind}")
        # A block, and its rounded form: for each cache tensor a shift of each row, then the rows.
        self._block = np.dtype([(f"{index}", _ELEMENTS[name], shape) for index, (name, shape) in enumerate(parts)])
        self._rounded = np.dtype(
            [
                (f"{index}", [("shifts", np.dtype(np.int8), shape[:1]), ("codes", bound.code, shape)])
                for index, (_, shape) in enumerate(parts)
            ]
        )
        self.block_bytes, self.packed_bytes = self._block.itemsize, self._rounded.itemsize

    def pack(self, data: Bytes) -> tuple[Bytes, Flags]:
        """The bytes of [N, block_bytes] blocks, one after the other, and which of them [N] are kept as they are."""
        step = max(1, _CHUNK_BYTES // self.block_bytes)
        pieces: list[Bytes] = []
        is_exact = np.zeros(len(data), np.bool_)
        for start in range(0, len(data), step):
            chunk = data[start : start + step]
            packed, is_within = self._round(chunk)
            is_exact[start : start + step] = ~is_within
            pieces += [packed[i] if is_within[i] else chunk[i] for i in range(len(chunk))]
        return np.concatenate(pieces), is_exact

    def num_packed(self, is_exact: Flags) -> int:
        """Bytes that `pack` makes of so many blocks."""
        num_exact = int(is_exact.sum())
        return num_exact * self.block_bytes + (len(is_exact) - num_exact) * self.packed_bytes

    def unpack(self, packed: Bytes, is_exact: Flags) -> Bytes:
        """The blocks [N, block_bytes] of what `pack` gave."""
        data = np.empty((len(is_exact), self.block_bytes), np.uint8)
        ends = np.cumsum(np.where(is_exact, self.block_bytes, self.packed_bytes))
        assert len(packed) == ends[-1], f"{len(packed)} bytes for blocks of {ends[-1]}"
        for index, end in enumerate(ends):
            if is_exact[index]:
                data[index] = packed[end - self.block_bytes : end]
            else:
                data[index] = self._decoded(packed[end - self.packed_bytes : end][None])[0]
        return data

    def _round(self, data: Bytes) -> tuple[Bytes, Flags]:
        """[n, packed_bytes], and which of the n blocks keep to the bound."""
        bound, blocks = self._bound, np.ascontiguousarray(data).view(self._block)[:, 0]
        rounded = np.empty(len(data), self._rounded)
        is_within = np.ones(len(data), np.bool_)
        for part in self._block.names or ():
            values = _values(blocks[part])
            with np.errstate(all="ignore"):  # what overflows, or is NaN, is beyond the bound
                most = np.abs(values).max(axis=2)
                shifts = np.clip(bound.top - np.frexp(most)[1], -_MOST_SHIFT, _MOST_SHIFT).astype(np.int8)
                codes = self._codes(values * _powers(shifts))
                back = _values(_stored(_numbers(codes) * _powers(-shifts), blocks[part].dtype))
                limit = bound.relative * np.abs(values) + bound.floor * most[..., None]
                is_near = (np.abs(back - values) <= limit).all(axis=(1, 2))
            is_within &= is_near & np.isfinite(most).all(axis=1)
            rounded[part]["shifts"], rounded[part]["codes"] = shifts, codes
        return rounded.view(np.uint8).reshape(len(data), -1), is_within

    def _decoded(self, packed: Bytes) -> Bytes:
        """[n, block_bytes] of [n, packed_bytes]."""
        rounded, blocks = packed.view(self._rounded)[:, 0], np.empty(len(packed), self._block)
        for part in self._block.names or ():
            numbers = _numbers(rounded[part]["codes"]) * _powers(-rounded[part]["shifts"])
            blocks[part] = _stored(numbers, blocks[part].dtype)
        return blocks.view(np.uint8).reshape(len(packed), -1)

    def _codes(self, scaled: Floats) -> NDArray[Any]:
        return e4m3_codes(scaled) if self._bound.code.kind == "u" else scaled.astype(self._bound.code)


def e4m3_codes(values: Floats) -> Bytes:
    """The codes of the nearest E4M3 numbers, ties to even; NaN's code for what rounds to 480 or more.

    E4M3: sign, 4 bits of exponent with bias 7, 3 of fraction; largest 448, smallest 2^-9, no infinity.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    # Half of what is cut, less one where the last kept bit is even; then the exponent's bias goes from 127 to 7.
    normal = ((magnitudes + 0x7FFFF + (magnitudes >> 20 & 1)) >> 20).astype(np.int32) - (120 << 3)
    is_small = magnitudes < 0x3C800000  # below 2^-6: steps of 2^-9, and 8 of them have the code of 2^-6
    small = np.rint(np.where(is_small, np.abs(values), 0.0) * 512.0).astype(np.int32)
    codes: Bytes = np.minimum(np.where(is_small, small, normal), 0x7F).astype(np.uint8)
    return codes | (bits >> 24 & 0x80).astype(np.uint8)


@cache
def e4m3_numbers() -> Floats:
    """The numbers of the 256 codes."""
    numbers = [
        math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10) for code in range(127)
    ]
    positive = [*numbers, math.nan]
    return np.array([*positive, *(-number for number in positive)], np.float32)


def _numbers(codes: NDArray[Any]) -> Floats:
    return e4m3_numbers().take(codes) if codes.dtype.kind == "u" else codes.astype(np.float32)


def _part(text: str) -> tuple[str, tuple[int, int]]:
    """A cache tensor's part of a block: its element type, and the number of its rows and their length."""
    found = _PART.fullmatch(text)
    if found is None:
        return text, (0, 0)
    *rows, row = (int(number) for number in found[2].split(","))
    return _NAMES.get(found[1], found[1]), (math.prod(rows), row)


def _powers(shifts: NDArray[np.int8]) -> Floats:
    """2 to these powers, for each row: [..., 1]."""
    powers: Floats = np.ldexp(np.float32(1.0), shifts[..., None].astype(np.int32))
    return powers


def _values(elements: NDArray[Any]) -> Floats:
    """A part's elements, of the same shape."""
    if elements.dtype.kind == "u":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32)


def _stored(values: Floats, element: np.dtype[Any]) -> NDArray[Any]:
    """The same as elements of a cache tensor. bfloat16 has room for all bits of a rounded number."""
    return (values.view(np.uint32) >> 16).astype(element) if element.kind == "u" else values.astype(element)
