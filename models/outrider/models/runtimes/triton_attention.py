"""Attends over a paged KV cache in Triton: tree masks, sliding windows, soft caps, sinks, grouped heads.

**A row's result depends on its own text alone, bit for bit**: not on the batch, on how many new tokens a step has, on
how a prompt is cut into steps, or on the shape of a tree. For that the keys of a row are read in the order of their
positions, in tiles of a fixed size that begin at fixed positions, and long contexts are cut at fixed positions, whose
parts are joined in order. Where a tree puts the tokens of one position into several slots, each of its tokens reads the
slots of its own ancestors (`page_layout.tails_of`), so that a token attends the same numbers in the same order as
when its path is a line. What is masked adds exact zeros.

The softmax over tiles is that of Milakov and Gimelshein 2018 (arXiv 1805.02867), the split over long contexts that of
Flash-Decoding (Dao et al. 2023). `torch_cache.attend` through SDPA is the twin that tests compare with. Not run on CUDA
hardware; on the CPU it runs on Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from outrider.models.runtimes.page_layout import PageArrays
from outrider.models.runtimes.ragged import RaggedStep

ROWS: Final = 16
"""Rows of a program: the fewest that tensor cores take. Tokens of a sequence and heads that share keys fill them."""
TILE: Final = 128
"""Positions of a tile of keys, at most."""
_TILE_BYTES: Final = 32 << 10
"""Of a tile's keys: two tiles of keys and of values fit a GPU's fast memory."""
SPLIT: Final = 256
"""Positions of a part of a long context: a program each, where there are few others."""
_MANY: Final = 1024
"""Programs that need no more beside them: some for each of a GPU's processors."""


@triton.jit
def _tile_scores(queries, keys, scale, softcap, HAS_CAP: tl.constexpr):
    """[ROWS, TILE] float32, of queries [ROWS, size] and keys [TILE, size]."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # softcap * tanh(scores / softcap)
    return scores


@triton.jit
def _own_slots(tail_slots, first, index, count, tail_width, tail_begin, place, slot, is_place):
    """Where a token of a tree finds these places: slots [TILE] int64, -1 where it has none."""
    behind = place - tail_begin
    is_own = is_place & (behind >= 0) & (behind < tail_width) & (count > index + 0 * place)
    own = tl.load(tail_slots + (first + index) * tail_width + behind, mask=is_own, other=-1)
    return tl.where(is_place & (behind < 0), slot, own.to(tl.int64))


@triton.jit
def _read(cache, slot, kv_head, at, KV_HEADS: tl.constexpr, SIZE: tl.constexpr):
    """[TILE, width] of a layer's keys or values; zeros where the slot is negative."""
    return tl.load(
        cache + (slot * KV_HEADS + kv_head)[:, None] * SIZE + at[None, :],
        mask=(slot >= 0)[:, None] & (at < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def _join(peak, weight, total, own_peak, own_weight, own_total):
    """The parts so far, and one more: peaks and weights [rows], totals [rows, width]. In one order of roundings, given
    by `fma`, in each kernel that joins.
    """
    higher = tl.maximum(peak, own_peak)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, grow = tl.exp(peak - safe), tl.exp(own_peak - safe)
    weight = tl.fma(weight, shrink, own_weight * grow)
    total = tl.fma(total, tl.broadcast_to(shrink[:, None], total.shape), own_total * grow[:, None])
    return higher, weight, total


@triton.jit
def _attend_part(
    part,
    queries,
    key_cache,
    value_cache,
    tables,
    tail_begin,
    tail_slots,
    position,
    is_row,
    of_token,
    last,
    sequence,
    kv_head,
    first,
    count,
    scale,
    softcap,
    table_width,
    tail_width,
    KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TREE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A part of the contexts of a tile's rows: peak [ROWS], weight [ROWS], total [ROWS, VALUE_WIDTH] float32."""
    key_at, value_at = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    begin = part * SPLIT
    if WINDOW > 0:  # tiles before every row's window add exact zeros: left out
        least = tl.min(tl.where(is_row, position, 2147483647), axis=0) - WINDOW + 1
        begin = tl.maximum(begin, least // TILE * TILE)
    for at in range(begin, tl.minimum(part * SPLIT + SPLIT, last + 1), TILE):
        place = at + tl.arange(0, TILE)
        seen = (place[None, :] <= position[:, None]) & is_row[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - place[None, :] < WINDOW)
        is_place = place <= last
        block = tl.load(tables + sequence * table_width + place // BLOCK, mask=is_place, other=0)
        slot = tl.where(is_place, block.to(tl.int64) * BLOCK + place % BLOCK, -1)
        is_shared = True
        if HAS_TREE:
            is_shared = at + TILE <= tail_begin
        if is_shared:
            keys = _read(key_cache, slot, kv_head, key_at, KV_HEADS, KEY_SIZE).to(queries.dtype)
            scores = _tile_scores(queries, keys, scale, softcap, HAS_CAP)
        else:
            scores = tl.zeros([ROWS, TILE], tl.float32)
            for index in range(TOKENS):
                own = _own_slots(tail_slots, first, index, count, tail_width, tail_begin, place, slot, is_place)
                keys = _read(key_cache, own, kv_head, key_at, KV_HEADS, KEY_SIZE).to(queries.dtype)
                of_own = _tile_scores(queries, keys, scale, softcap, HAS_CAP)
                scores = tl.where((of_token == index)[:, None], of_own, scores)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(peak - safe)
        parts = tl.exp(scores - safe[:, None])
        weight = tl.fma(weight, shrink, tl.sum(parts, axis=1))
        peak = higher
        likely = parts.to(queries.dtype)
        # The product begins with what is there. Added afterwards, the compiler joined both for a line and not for a
        # tree, whose last bits then differed.
        before = total * shrink[:, None]
        if is_shared:
            values = _read(value_cache, slot, kv_head, value_at, KV_HEADS, VALUE_SIZE).to(queries.dtype)
            total = tl.dot(likely, values, before, input_precision="ieee")
        else:
            total = before
            for index in range(TOKENS):
                own = _own_slots(tail_slots, first, index, count, tail_width, tail_begin, place, slot, is_place)
                values = _read(value_cache, own, kv_head, value_at, KV_HEADS, VALUE_SIZE).to(queries.dtype)
                of_own = tl.dot(likely, values, before, input_precision="ieee")
                total = tl.where((of_token == index)[:, None], of_own, total)
    return peak, weight, total


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "table_width", "tail_width"])
def _attend(
    query,
    key_cache,
    value_cache,
    sinks,
    out,
    sums,
    peaks,
    weights,
    positions,
    sequences,
    tiles,
    tables,
    tail_begins,
    tail_slots,
    scale,
    softcap,
    num_tokens,
    num_tiles,
    table_width,
    tail_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A tile's rows attend, out [T, HEADS, VALUE_SIZE]. IS_WHOLE: each program joins the parts of its contexts; else it
    makes one, for `_join_parts`: sums [parts, T, HEADS, VALUE_SIZE], peaks and weights [parts, T, HEADS].

    A row is a token and one of the GROUP heads that share keys, which are cut into CHUNKS of at most ROWS. *_WIDTH:
    sizes, padded to a power of 2.
    """
    tile, chunk, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = chunk // CHUNKS
    first, count = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    row = tl.arange(0, ROWS)
    of_token = row // (ROWS // TOKENS)
    in_group = chunk % CHUNKS * ROWS + row % (ROWS // TOKENS)
    is_row = (of_token < count) & (in_group < GROUP)
    token = first + of_token
    head = kv_head * GROUP + in_group
    position = tl.load(positions + token, mask=is_row, other=-1)
    last = tl.max(position, axis=0)
    begin, end = part, part + 1
    if IS_WHOLE:
        begin, end = 0, last // SPLIT + 1
        if WINDOW > 0:  # parts before every row's window change nothing
            least = tl.min(tl.where(is_row, position, 2147483647), axis=0) - WINDOW + 1
            begin = tl.maximum(least, 0) // SPLIT
    if begin * SPLIT <= last:
        sequence = tl.load(sequences + first)
        tail_begin = tl.load(tail_begins + sequence)
        key_at, value_at = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
        queries = tl.load(
            query + (token * HEADS + head)[:, None] * KEY_SIZE + key_at[None, :],
            mask=is_row[:, None] & (key_at < KEY_SIZE)[None, :],
            other=0.0,
        )
        peak, weight, total = _no_part(sinks, head, is_row, HAS_SINKS & IS_WHOLE, ROWS, VALUE_WIDTH)
        for at in range(begin, end):
            own_peak, own_weight, own_total = _attend_part(
                at,
                queries,
                key_cache,
                value_cache,
                tables,
                tail_begin,
                tail_slots,
                position,
                is_row,
                of_token,
                last,
                sequence,
                kv_head,
                first,
                count,
                scale,
                softcap,
                table_width,
                tail_width,
                KV_HEADS,
                KEY_SIZE,
                VALUE_SIZE,
                KEY_WIDTH,
                VALUE_WIDTH,
                WINDOW,
                HAS_CAP,
                HAS_TREE,
                TOKENS,
                BLOCK,
                TILE,
                SPLIT,
                ROWS,
            )
            if IS_WHOLE:
                peak, weight, total = _join(peak, weight, total, own_peak, own_weight, own_total)
            else:
                peak, weight, total = own_peak, own_weight, own_total
        is_value = is_row[:, None] & (value_at < VALUE_SIZE)[None, :]
        if IS_WHOLE:
            at_out = (token * HEADS + head)[:, None] * VALUE_SIZE + value_at[None, :]
            tl.store(out + at_out, total / tl.where(is_row, weight, 1.0)[:, None], mask=is_value)
        else:
            at_row = (part * num_tokens + token) * HEADS + head
            tl.store(peaks + at_row, peak, mask=is_row)
            tl.store(weights + at_row, weight, mask=is_row)
            tl.store(sums + at_row[:, None] * VALUE_SIZE + value_at[None, :], total, mask=is_value)


@triton.jit
def _no_part(sinks, head, is_head, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Peak, weight and total of rows before their first part."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # a logit without a value
        peak = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
        weight = weight + 1.0
    return peak, weight, tl.zeros([ROWS, VALUE_WIDTH], tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def _join_parts(
    sums,
    peaks,
    weights,
    sinks,
    positions,
    out,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Joins a token's parts, as many as its position has, in their order: out [T, HEADS, VALUE_SIZE]."""
    token = tl.program_id(0)
    head, value_at = tl.arange(0, HEAD_WIDTH), tl.arange(0, VALUE_WIDTH)
    is_head = head < HEADS
    is_in = is_head[:, None] & (value_at < VALUE_SIZE)[None, :]
    peak, weight, total = _no_part(sinks, head, is_head, HAS_SINKS, HEAD_WIDTH, VALUE_WIDTH)
    for part in range(tl.load(positions + token) // SPLIT + 1):
        at_row = (part * num_tokens + token) * HEADS + head
        own_peak = tl.load(peaks + at_row, mask=is_head, other=0.0)
        own_weight = tl.load(weights + at_row, mask=is_head, other=1.0)
        own_total = tl.load(sums + at_row[:, None] * VALUE_SIZE + value_at[None, :], mask=is_in, other=0.0)
        peak, weight, total = _join(peak, weight, total, own_peak, own_weight, own_total)
    at_out = (token * HEADS + head)[:, None] * VALUE_SIZE + value_at[None, :]
    tl.store(out + at_out, total / weight[:, None], mask=is_in)


def tokens_of_a_tile(heads: int, kv_heads: int) -> int:
    """New tokens of a program."""
    return ROWS // int(min(ROWS, triton.next_power_of_2(heads // kv_heads)))


def tile_of(width: int, element_size: int) -> int:
    """Positions of a tile of keys and values with so many bytes each."""
    return min(TILE, max(16, _TILE_BYTES // (width * element_size)))


def layout_of(step: RaggedStep, slots: NDArray[np.int64], tile_tokens: Iterable[int]) -> PageArrays:
    """As `PageArrays.of`."""
    return PageArrays.of(step, slots, tile_tokens, SPLIT)


class StepPages:
    """A layout on the device, with which each layer attends: int32 tensors, parts of one, filled in one copy."""

    def __init__(self, like: PageArrays, block_size: int, device: torch.device) -> None:
        """like: of the sizes that `fill` takes at most."""
        self._block_size = block_size
        shapes = [part.shape for part in like.parts()]
        sizes = [math.prod(shape) for shape in shapes]
        host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host, self._device = host, torch.empty_like(host, device=device)
        self._parts = [part.view(shape).numpy() for part, shape in zip(host.split(sizes), shapes, strict=True)]
        on_device = [part.view(shape) for part, shape in zip(self._device.split(sizes), shapes, strict=True)]
        self._positions, self._sequences, self._tables, self._tail_begins, self._tail_slots, *tiles = on_device
        self._tiles = dict(zip(like.tiles, tiles, strict=True))
        self._num_splits, self._has_tree = like.num_splits, like.has_tree
        self.fill(like)

    def fill(self, arrays: PageArrays) -> None:
        """Takes a layout that is no larger."""
        self._host.fill_(-1)  # a slot that is none, a tile without tokens
        for part, array in zip(self._parts, arrays.parts(), strict=True):
            part[tuple(slice(0, size) for size in array.shape)] = array
        self._device.copy_(self._host, non_blocking=True)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the T new tokens, whose own keys and values are written: [T, heads, value size], query's dtype.

        query: [T, heads, key size]. keys, values: a layer's cache, [slots, kv_heads, size]. sinks: [heads].
        """
        num_tokens, heads, key_size = query.shape
        kv_heads, value_size = values.shape[1:]
        group = heads // kv_heads
        chunks, tokens = triton.cdiv(group, ROWS), tokens_of_a_tile(heads, kv_heads)
        tiles = self._tiles[tokens]
        out = query.new_empty((num_tokens, heads, value_size))
        key_width, value_width = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
        programs = tiles.shape[1], kv_heads * chunks
        # Enough programs keep a GPU busy, and parts of all contexts would take much memory.
        is_whole = self._num_splits == 1 or math.prod(programs) >= _MANY
        parts = 1 if is_whole else self._num_splits
        sums = peaks = weights = out  # not used
        if not is_whole:
            sums = query.new_empty((parts, num_tokens, heads, value_size), dtype=torch.float32)
            peaks, weights = query.new_empty((2, parts, num_tokens, heads), dtype=torch.float32)
        launch: Any = _attend[(*programs, parts)]
        launch(
            query.contiguous(),
            keys,
            values,
            out if sinks is None else sinks,
            out,
            sums,
            peaks,
            weights,
            self._positions,
            self._sequences,
            tiles,
            self._tables,
            self._tail_begins,
            self._tail_slots,
            scale,
            1.0 if softcap is None else softcap,
            num_tokens,
            tiles.shape[1],
            self._tables.shape[1],
            self._tail_slots.shape[1],
            HEADS=heads,
            KV_HEADS=kv_heads,
            GROUP=group,
            CHUNKS=chunks,
            KEY_SIZE=key_size,
            VALUE_SIZE=value_size,
            KEY_WIDTH=key_width,
            VALUE_WIDTH=value_width,
            WINDOW=window or 0,
            HAS_CAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            HAS_TREE=self._has_tree,
            IS_WHOLE=is_whole,
            TOKENS=tokens,
            BLOCK=self._block_size,
            TILE=tile_of(max(key_width, value_width), query.element_size()),
            SPLIT=SPLIT,
            ROWS=ROWS,
            num_stages=2,
        )
        if not is_whole:
            join: Any = _join_parts[(num_tokens,)]
            join(
                sums,
                peaks,
                weights,
                out if sinks is None else sinks,
                self._positions,
                out,
                num_tokens,
                HEADS=heads,
                HEAD_WIDTH=triton.next_power_of_2(heads),
                VALUE_SIZE=value_size,
                VALUE_WIDTH=value_width,
                HAS_SINKS=sinks is not None,
                SPLIT=SPLIT,
            )
        return out
