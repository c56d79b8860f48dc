"""Attends over a paged KV cache in Triton: tree masks, sliding windows, soft caps, sinks, grouped heads.

**A row's result depends on its own text alone, bit for bit**: not on the batch, on how many new tokens a step has, on
how a prompt is cut into steps, or on the shape of a tree. For that the keys of a row are read in the order of their
positions, in tiles of a fixed size that begin at fixed positions, and long contexts are cut at fixed positions, whose
parts are joined in order. Where a tree puts the tokens of one position into several slots, each of its tokens reads the
slots of its own ancestors (`page_layout.tails_of`), so that a token attends the same numbers in the same order as
when its path is a line. What is masked adds exact zeros.

The softmax over tiles is that of Milakov and Gimelshein 2018 (arXiv 1805.02867), the split over long contexts that of
Flash-Decoding (Dao et al. 2023). `torch_cache.attend` through SDPA is the twin that tests compare with. On the
CPU it runs on Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from outrider.models.runtimes import attention_kernels
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
_MOST_BYTES: Final = 256 << 20
"""Of the parts of all contexts; where they would take more, each program joins its own."""


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
        self._parts = [part.view(shape).numpy() for part, shape in zip(torch.split(host, sizes), shapes, strict=True)]
        on_device = [part.view(shape) for part, shape in zip(torch.split(self._device, sizes), shapes, strict=True)]
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

    @staticmethod
    def write(
        keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores the new tokens' key and value, [kv_heads, T, size] each, in a layer's cache, [slots, kv_heads, size].

        slots: int64 [T].
        """
        key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (key, value))
        heads, num_tokens, key_size = key.shape
        value_size = value.shape[2]
        launch: Any = attention_kernels.write_both[(num_tokens,)]
        launch(
            keys,
            values,
            key,
            value,
            slots,
            key.stride(1),
            key.stride(0),
            value.stride(1),
            value.stride(0),
            HEADS=heads,
            HEAD_WIDTH=triton.next_power_of_2(heads),
            KEY_SIZE=key_size,
            KEY_WIDTH=triton.next_power_of_2(key_size),
            VALUE_SIZE=value_size,
            VALUE_WIDTH=triton.next_power_of_2(value_size),
        )

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
        of_parts = 4 * self._num_splits * num_tokens * heads * value_size
        is_whole = self._num_splits == 1 or math.prod(programs) >= _MANY or of_parts > _MOST_BYTES
        parts = 1 if is_whole else self._num_splits
        sums = peaks = weights = out  # not used
        if not is_whole:
            sums = query.new_empty((parts, num_tokens, heads, value_size), dtype=torch.float32)
            peaks, weights = query.new_empty((2, parts, num_tokens, heads), dtype=torch.float32)
        launch: Any = attention_kernels.attend[(*programs, parts)]
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
            join: Any = attention_kernels.join_parts[(num_tokens,)]
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
