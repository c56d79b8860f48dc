"""The kernels of `triton_attention`: new tokens attend over a paged cache, parts are joined, new keys are written."""

from __future__ import annotations

import triton
import triton.language as tl


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
def attend(
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
    makes one, for `join_parts`: sums [parts, T, HEADS, VALUE_SIZE], peaks and weights [parts, T, HEADS].

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
def join_parts(
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


@triton.jit
def _write(
    cache,
    new,
    slots,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A new token's keys or values to its slot."""
    token = tl.program_id(0)
    head, at = tl.arange(0, HEAD_WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    is_in = (head < HEADS) & (at < SIZE)
    read = tl.load(new + token * token_stride + head * head_stride + at, mask=is_in)
    tl.store(cache + (tl.load(slots + token) * HEADS + head) * SIZE + at, read, mask=is_in)


@triton.jit
def write_both(
    keys,
    values,
    new_keys,
    new_values,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    _write(keys, new_keys, slots, key_token, key_head, HEADS, HEAD_WIDTH, KEY_SIZE, KEY_WIDTH)
    _write(values, new_values, slots, value_token, value_head, HEADS, HEAD_WIDTH, VALUE_SIZE, VALUE_WIDTH)
