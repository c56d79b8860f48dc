"""Holds a paged KV cache in torch tensors, and reads, writes and moves its blocks and slots. Knows no model.

Behind the last block lies one slot that stays zero: what pads a context reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.runtimes.torch_attention import LayerCache, SlotShape

BLOCK_SIZE: Final = 32


class TorchCache:
    """Keys and values of all layers, by layer; none before `_allocate`. num_blocks: blocks; block_bytes: of one block
    over all layers.
    """

    block_size: int = BLOCK_SIZE
    why_no_blocks: str | None = None
    """Blocks can be read and written, on a GPU too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: dict[int, LayerCache] | None = None
        self.num_blocks = self.block_bytes = self._padding_slot = 0

    def _allocate(self, shapes: Mapping[int, SlotShape], dtype: torch.dtype, num_bytes: int) -> None:
        """Makes zeroed tensors of at most `num_bytes`. Raises ConfigError where these do not hold one block."""
        elements = sum(heads * size for shape in shapes.values() for heads, size in shape)
        self.block_bytes = BLOCK_SIZE * elements * dtype.itemsize
        self.num_blocks = num_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise ConfigError(f"kv_cache_bytes is {num_bytes}; one block of this model takes {self.block_bytes}")
        self._padding_slot = self.num_blocks * BLOCK_SIZE  # behind the last block, so that no block table names it

        def zeros(slot: tuple[int, int]) -> torch.Tensor:
            return torch.zeros((self._padding_slot + 1, *slot), dtype=dtype, device=self._device)

        self._layers = {layer: LayerCache(zeros(keys), zeros(values)) for layer, (keys, values) in shapes.items()}

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies keys and values of all layers from slots to slots: an indexed copy per layer."""
        assert len(sources) == len(targets)
        assert min(*sources, *targets) >= 0 and max(*sources, *targets) < self._padding_slot, "a slot outside the cache"
        read, written = torch.tensor([sources, targets], dtype=torch.int64, device=self._device)
        for layer in (self._layers or {}).values():
            layer.move(read, written)

    @property
    def block_layout(self) -> tuple[str, ...]:
        """Type and shape of each cache tensor's part of a block."""
        return tuple(f"{part.dtype}{[BLOCK_SIZE, *part.shape[1:]]}" for part in self._parts())

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of these blocks over all layers: [len(blocks), bytes of a block]."""
        chosen = torch.tensor(list(blocks), dtype=torch.int64, device=self._device)
        data: NDArray[np.uint8] = torch.cat([part[chosen] for part in self._blocks()], dim=1).cpu().numpy()
        return data

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Writes what `read_blocks` gave."""
        chosen = torch.tensor(list(blocks), dtype=torch.int64, device=self._device)
        given = torch.from_numpy(data).to(self._device)
        start = 0
        for part in self._blocks():
            part[chosen] = given[:, start : start + part.shape[1]]
            start += part.shape[1]
        assert start == data.shape[1], f"{data.shape[1]} bytes for a block of {start}"

    def _parts(self) -> list[torch.Tensor]:
        return [part for _, layer in sorted((self._layers or {}).items()) for part in (layer.keys, layer.values)]

    def _blocks(self) -> list[torch.Tensor]:
        """The memory of each cache tensor, the padding left out: [blocks, bytes]."""
        return [part[: self._padding_slot].view(self.num_blocks, -1).view(torch.uint8) for part in self._parts()]
