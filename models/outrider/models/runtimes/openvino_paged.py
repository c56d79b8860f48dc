"""Runs a `BatchRuntime` on OpenVINO paged attention: CPU, Intel GPU.

Knows block numbers and slots, not who owns them. Everything that changes from step to step goes to the infer request as
tensors over numpy memory; the caches are bound once. Inference releases the GIL.

Bit-for-bit invariance: the CPU plugin has three attention kernels that round differently: for one new token, for
several, and for fewer sequences than threads (this one splits the context between threads). INT8 models amplify a
last-bit difference to a per cent of the logits' scale, because activations are quantized on the fly. So on CPU every
token is a sequence of its own that attends its predecessors through the cache (the plugin writes all keys and values of
a step before any token attends), and a step has at least as many of these as threads: always the same kernel.
Without AVX-512 the plugin multiplies one row by INT8 weights in another kernel than several: where it does, which is
tried at the start, a step has two rows at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.openvino_graph import (
    PagedModel,
    bind_step,
    load_paged_model,
    run_request,
    shared_tensor,
    step_logits,
)
from outrider.models.runtimes.ragged import RaggedStep, lay_out

_WHOLE_BYTES: Final = frozenset({"f32", "f16", "u8", "i8"})
"""Types of KV caches whose memory numpy can address."""


class OpenVinoPagedRuntime:
    """Ragged batches, tree masks included, over a cache of `options.kv_cache_bytes`."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the IR at `path` (directory or .xml).

        Raises BundleError, ConfigError or RuntimeUnavailable, as `load_paged_model` does; ConfigError when
        `kv_cache_bytes` does not hold one block.
        """
        self._model = load_paged_model(path, options, tree_masks=True)
        model = self._model
        self.limits = model.limits
        self.block_size, self.block_bytes = model.block_size, model.block_bytes
        self.num_blocks = options.kv_cache_bytes // model.block_bytes
        if self.num_blocks < 1:
            raise ConfigError(
                f"kv_cache_bytes is {options.kv_cache_bytes}; one block of this model takes {self._model.block_bytes}"
            )
        self._caches: list[Any] = self._model.bind_cache(self.num_blocks)
        self.why_no_trees = _why_no_trees(self._model, options)
        self.why_no_blocks = _why_no_blocks(self._caches, options)
        self._is_split = options.is_batch_invariant is not False and options.device == "CPU"
        self._request: Any = self._model.request
        self._bound: RaggedStep | None = None
        self._num_rows = 0
        self._min_pieces = self._min_rows = 1
        if self._is_split:
            self._min_pieces = int(self._model.compiled.get_property("INFERENCE_NUM_THREADS"))
            if self._rounds_one_row_differently():
                self._min_pieces, self._min_rows = max(2, self._min_pieces), 2

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Runs one step; returns logits [sum of num_rows, vocab_size] float32, valid until the next call.

        Blocking, without the GIL; one thread at a time. Writes the new tokens' slots and nothing else.
        """
        step = lay_out(
            batch,
            vocab_size=self.limits.vocab_size,
            max_positions=self.limits.max_positions,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            is_split=self._is_split,
            min_pieces=self._min_pieces,
            min_rows=self._min_rows,
        )
        self._num_rows = sum(item.num_rows for item in batch)
        self._bound = step  # the request reads this memory but does not keep it alive
        self._request.set_tensor("qq_bias", shared_tensor(step.mask))
        self._request.set_tensor("qq_bias_begins", shared_tensor(step.mask_begins))
        bind_step(self._request, self._model, step)
        run_request(self._request)
        return step_logits(self._request, self._model, step)[: self._num_rows]

    def _rounds_one_row_differently(self) -> bool:
        """Whether a token alone has logits that differ in any bit. Writes the first slots of the cache."""
        tokens = range(min(2, self.limits.vocab_size))
        alone = [self.forward([SequenceSlice([token], 0, [0], 1)]).copy() for token in tokens]
        twice = [self.forward([SequenceSlice([token, token], 0, [0], 2)])[:1].copy() for token in tokens]
        return not np.array_equal(alone, twice)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies keys and values of all layers from slots to slots, in the memory that the infer request reads."""
        assert self.why_no_trees is None, self.why_no_trees
        read, written = np.array([sources, targets])
        assert min(read.min(), written.min()) >= 0, "a slot outside the cache"
        assert max(read.max(), written.max()) < self.num_blocks * self.block_size, "a slot outside the cache"
        size = self.block_size
        for cache in self._caches:
            slots = cache.data  # [blocks, heads, block size, head size]
            slots[written // size, :, written % size] = slots[read // size, :, read % size]

    @property
    def block_layout(self) -> tuple[str, ...]:
        """Type and shape of each cache tensor's part of a block."""
        return tuple(f"{cache.element_type.get_type_name()}{list(cache.shape)[1:]}" for cache in self._caches)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """The bytes of these blocks over all layers: [len(blocks), bytes of a block]."""
        return np.concatenate([part[list(blocks)] for part in self._block_bytes()], axis=1)

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Writes what `read_blocks` gave, into the memory that the infer request reads."""
        start = 0
        for part in self._block_bytes():
            part[list(blocks)] = data[:, start : start + part.shape[1]]
            start += part.shape[1]
        assert start == data.shape[1], f"{data.shape[1]} bytes for a block of {start}"

    def _block_bytes(self) -> list[NDArray[np.uint8]]:
        """The memory of each cache tensor: [blocks, bytes]."""
        assert self.why_no_blocks is None, self.why_no_blocks
        return [cache.data.reshape(self.num_blocks, -1).view(np.uint8) for cache in self._caches]

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        self._request = None
        self._bound = None
        self._caches = []
        self._model = None  # type: ignore[assignment]


def _why_no_trees(model: PagedModel, options: RuntimeOptions) -> str | None:
    if options.device != "CPU":
        return f"masks are not checked on {options.device}; use --tree line"
    if options.is_batch_invariant is not False:
        return "a batch-invariant load takes no masks; load with is_batch_invariant=False, or use --tree line"
    if not model.masks_by_position:
        return "OpenVINO's masks are wrong with a sliding window or ALiBi, which this model has; use --tree line"
    if not model.has_plain_cache:
        return "slots of a quantized KV cache cannot be moved; use an f32 cache, or --tree line"
    return None


def _why_no_blocks(caches: Sequence[Any], options: RuntimeOptions) -> str | None:
    if options.device != "CPU":
        return f"the KV cache of OpenVINO on {options.device} cannot be read"
    types = {cache.element_type.get_type_name() for cache in caches}
    if not types <= _WHOLE_BYTES:
        return f"a KV cache of {', '.join(sorted(types - _WHOLE_BYTES))} cannot be read"
    return None
