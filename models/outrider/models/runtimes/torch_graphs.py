"""Records the model's pass as CUDA graphs, by the number of new tokens, so that a step is one launch.

A step is padded to the next size: the tokens behind its own are one more sequence, whose keys go to the slot behind the
last block, where nobody else reads. Rows do not meet, so padding changes none of them. What cannot be recorded, such as
rotary embeddings that look at the positions on the host, goes on without graphs.

A transformer's layer in transformers' code is some 40 small kernels beside its products, which take a third of an 8B
model's step. torch's compiler joins them (`fused`), unless the order of sums is promised.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.models.runtimes.page_layout import PageArrays
from outrider.models.runtimes.ragged import RaggedStep
from outrider.models.runtimes.triton_attention import SPLIT, StepPages, layout_of, tokens_of_a_tile

SIZES: Final = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""New tokens of a recorded step; larger ones are prompts, whose kernels take longer than their launches. None of 1, for
which torch's compiler would make kernels of their own.
"""
_MOST_TAIL: Final = 64
"""Levels of a tree below the last committed token; deeper trees go without graphs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a pass reads, on the device: int64 [T] each, rows [R]."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    new_slots: torch.Tensor
    rows: torch.Tensor
    pages: StepPages


Pass = Callable[[StepInputs], torch.Tensor]
"""Runs the model: the logits of `rows`, [R, V] float32."""
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Runs something, then records it; gives what runs it again, and the tensor that this fills."""


def padded(step: RaggedStep, size: int, scratch_block: int) -> RaggedStep:
    """The step with one more sequence, of the tokens up to `size`: all are token 0 at position 0, which is the first of
    `scratch_block`.
    """
    count = size - len(step.input_ids)
    zeros = np.zeros(count, np.int64)
    mask, mask_begins = step.mask, step.mask_begins
    if mask.size:
        mask = np.concatenate([mask, np.tri(count, dtype=np.uint8).reshape(-1)])
        mask_begins = np.append(mask_begins, mask_begins[-1] + count * count)
    return replace(
        step,
        input_ids=np.concatenate([step.input_ids, zeros]),
        position_ids=np.concatenate([step.position_ids, zeros]),
        past_lens=np.append(step.past_lens, 0),
        subsequence_begins=np.append(step.subsequence_begins, size),
        block_indices=np.append(step.block_indices, scratch_block),
        block_indices_begins=np.append(step.block_indices_begins, len(step.block_indices) + 1),
        mask=mask,
        mask_begins=mask_begins,
    )


class CudaRecorder:
    """A `Recorder`, whose graphs share memory: they run one after the other."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Raises RuntimeError for what cannot be recorded."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles kernels, and lets libraries allocate what they keep
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                out = run()
        except BaseException:
            self._pool = None  # it may still be recorded into
            raise
        return graph.replay, out


@dataclass(slots=True)
class _Recorded:
    pages: StepPages
    host: torch.Tensor
    packed: torch.Tensor
    replay: Callable[[], None]
    logits: torch.Tensor


class KernelSteps:
    """A model's steps through the kernels in Triton, those of few tokens as recorded passes.

    These are kept by size, parts of the longest context (a power of 4, or all) and whether there are trees, and made
    when a step first needs one. fused: the same as `run` with fewer kernels, for recorded steps. block_size,
    num_blocks: of the cache, whose slot behind the last block is free to be written. max_blocks: of the longest
    sequence. heads: of queries and values, as layers have them.
    """

    def __init__(
        self,
        run: Pass,
        device: torch.device,
        *,
        block_size: int,
        num_blocks: int,
        max_blocks: int,
        heads: Iterable[tuple[int, int]],
        fused: Pass | None = None,
        record: Recorder | None = None,
    ) -> None:
        self._run = run
        self._fused = fused
        self._record = record or CudaRecorder()
        self._device = device
        self._block_size, self._num_blocks, self._max_blocks = block_size, num_blocks, max_blocks
        self._most_splits = -(-max_blocks * block_size // SPLIT)
        self._tile_tokens = tuple({tokens_of_a_tile(*each) for each in heads})
        self._recorded: dict[tuple[int, int, bool], _Recorded] = {}
        self._shared: torch.Tensor | None = None  # the logits of all recorded steps, of which one counts at a time
        self._has_graphs = True  # until one cannot be recorded

    @property
    def most_recorded(self) -> int:
        """New tokens of the largest step that is recorded; 0 where none is."""
        return SIZES[-1] if self._has_graphs else 0

    @property
    def is_fused(self) -> bool:
        """Whether torch's compiler made the recorded steps."""
        return self._has_graphs and self._fused is not None

    @torch.inference_mode()
    def logits(self, step: RaggedStep) -> torch.Tensor:
        """The step's logits, [R, V] float32, valid until the next step."""
        logits = self._logits(step)
        if not len(logits) and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # nobody waits for rows; the next step writes over what this one reads
        return logits

    def _logits(self, step: RaggedStep) -> torch.Tensor:
        slots = step.slots(self._block_size, step.past_lens, np.diff(step.subsequence_begins))
        if self._has_graphs and len(step.input_ids) <= SIZES[-1]:
            found = self._recorded_logits(step, slots)
            if found is not None:
                return found
        arrays = layout_of(step, slots, self._tile_tokens)
        ids = torch.from_numpy(np.stack([step.input_ids, step.position_ids, slots])).to(self._device)
        rows = torch.from_numpy(step.logit_rows).to(self._device)
        pages = StepPages(arrays, self._block_size, self._device)
        return self._run(StepInputs(ids[0], ids[1], ids[2], rows, pages))

    def _recorded_logits(self, step: RaggedStep, slots: NDArray[np.int64]) -> torch.Tensor | None:
        count = len(step.input_ids)
        size = next(each for each in SIZES if each >= count)
        whole = padded(step, size, self._num_blocks)
        slots = np.concatenate([slots, np.full(size - count, self._num_blocks * self._block_size)])
        arrays = layout_of(whole, slots, self._tile_tokens)
        if arrays.tail_slots.shape[1] > _MOST_TAIL:
            return None
        splits = min(4 ** (((arrays.num_splits - 1).bit_length() + 1) // 2), self._most_splits)
        rows = np.zeros(size, np.int64)
        rows[: len(step.logit_rows)] = step.logit_rows
        packed = np.stack([whole.input_ids, whole.position_ids, slots, rows])
        key = size, splits, arrays.has_tree
        if key not in self._recorded:
            try:
                self._recorded[key] = self._made(arrays, splits, packed)
            except Exception as error:  # Triton's own are no RuntimeError
                self._has_graphs = False
                self._recorded, self._shared = {}, None  # hundreds of megabytes
                _log.warning("steps run without CUDA graphs: %s", str(error).splitlines()[0])
                return None
        recorded = self._recorded[key]
        recorded.host.numpy()[:] = packed
        recorded.packed.copy_(recorded.host, non_blocking=True)
        recorded.pages.fill(arrays)
        recorded.replay()
        return recorded.logits[: len(step.logit_rows)]

    def _made(self, arrays: PageArrays, splits: int, packed: NDArray[np.int64]) -> _Recorded:
        size = packed.shape[1]
        largest = replace(
            arrays,
            # Siblings of a tree have a slot each: near the context's end slots go further than positions.
            tables=np.zeros((size + 1, self._max_blocks + size // self._block_size + 1), np.int32),
            tail_begins=np.resize(arrays.tail_begins, size + 1),
            tail_slots=np.full((size, _MOST_TAIL if arrays.has_tree else 1), -1, np.int32),
            tiles={tokens: np.zeros((2, size + 1), np.int32) for tokens in arrays.tiles},
            num_splits=splits,
        )
        pages = StepPages(largest, self._block_size, self._device)
        pages.fill(arrays)
        host = torch.zeros(packed.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        host.numpy()[:] = packed
        on_device = host.to(self._device)
        inputs = StepInputs(on_device[0], on_device[1], on_device[2], on_device[3], pages)
        replay, logits = self._recorded_pass(inputs)
        return _Recorded(pages, host, on_device, replay, logits)

    def _recorded_pass(self, inputs: StepInputs) -> tuple[Callable[[], None], torch.Tensor]:
        if (fused := self._fused) is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # advice to compute FP32 in fewer bits
                    return self._record(lambda: self._into_shared(fused(inputs)))
            except Exception as error:  # a compiler may raise anything for code that it does not know
                self._fused = None
                _log.warning("recorded steps run without fused kernels: %s", str(error).splitlines()[0])
        return self._record(lambda: self._into_shared(self._run(inputs)))

    def _into_shared(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy where every recorded pass has its own: a graph would keep its result's memory from all others."""
        if self._shared is None:  # in the first run, which is not recorded yet
            self._shared = logits.new_empty((SIZES[-1], logits.shape[1]))
        return self._shared[: len(logits)].copy_(logits)
