"""Runs a `SequenceRuntime` on OpenVINO paged attention: the device's draft on CPU or Intel GPU.

Rollback is a smaller past length. A draft is so small that the call costs as much as the model: the tensors are bound
once, over numpy memory that changes in place, and are bound again only when the number of new tokens changes.

Branches are sequences of their own in one call. They share blocks as `branch_blocks` decides; a block that two branches
would write is copied first. A GPU's blocks are not in our memory, so its branches compute that part again.

The cache grows with the sequence: on the CPU it is copied, on a GPU the text runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import RuntimeOptions, padded_branches, telling_of_memory
from outrider.models.runtimes.branch_blocks import BranchBlocks, BranchRun
from outrider.models.runtimes.one_sequence import OneSequence, cache_positions
from outrider.models.runtimes.openvino_graph import PagedModel, load_paged_model, shared_tensor
from outrider.models.runtimes.ragged import begins

MAX_BRANCHES: Final = 8
# Blocks for branches. A tree of some hundred nodes that fork inside their blocks needs about as many.
_NUM_SPARE: Final = 256
_MIN_SPARE: Final = 16
_SPARE_BYTES: Final = 128 << 20


class OpenVinoSequenceRuntime(OneSequence):
    """One sequence of at most `limits.max_positions` tokens, and its branches."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the IR at `path` (directory or .xml); raises as `load_paged_model` does."""
        model = load_paged_model(path, options, tree_masks=False)
        super().__init__(model.limits)
        self._gathers_rows = model.gathers_rows
        self._request: Any = model.request
        self._model: PagedModel | None = model
        longest = model.limits.max_positions
        self._num_positions = cache_positions(0, 0, longest)  # that the cache has room for
        num_blocks = _num_blocks(model, self._num_positions)
        self._num_bound = (0, 0)  # new tokens and rows of the bound tensors
        with telling_of_memory(longest):
            self._ids, self._positions, self._rows = (np.zeros(longest, np.int64) for _ in range(3))
            self._caches: list[Any] = model.bind_cache(num_blocks)
        # Kept alive here: the request uses the memory of a bound array but does not own it.
        self._past = np.zeros(1, np.int32)
        self._begins = np.zeros(2, np.int32)
        self._context = np.zeros((), np.int32)
        self._bound_branches: dict[str, NDArray[Any]] = {}
        # A GPU's caches have no memory here that could be copied.
        self._host_caches = [tensor.data for tensor in self._caches] if options.device == "CPU" else []
        self._blocks = BranchBlocks(num_blocks, model.block_size, longest, copies=bool(self._host_caches))
        self._table_begins = np.array([0, len(self._blocks.table)], np.int32)

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the next call.

        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than `limits.max_positions`.
        """
        row: NDArray[np.float32] = self._run(tokens, 1)[0]
        return row

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32."""
        return self._run(tokens, len(tokens))

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on, and all branches if that shortens the sequence."""
        super().truncate(length)
        self._blocks.truncate(length)

    def _run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        self._check_new(tokens)
        self._reserve(self._length + len(tokens))
        start, end = self._length, self._length + len(tokens)
        num_kept = self._blocks.extend(tokens, num_rows)
        past, num_new = start + num_kept, len(tokens) - num_kept
        if self._num_bound != (num_new, num_rows):
            self._bind(num_new, num_rows)
        self._ids[:num_new] = tokens[num_kept:] if num_kept else tokens
        self._positions[:num_new] = range(past, end)
        self._rows[:num_rows] = range(num_new - num_rows, num_new)
        self._past[0] = past
        self._begins[1] = num_new
        self._context[...] = end
        try:
            self._request.infer(share_outputs=True)
        except BaseException:
            self._blocks.truncate(start)
            raise
        self._length = end
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        return logits.reshape(-1, self._limits.vocab_size)[-num_rows:]

    def _reserve(self, num_positions: int) -> None:
        """Makes room in the cache for so many positions. Raises ConfigError where memory does not suffice."""
        if num_positions <= self._num_positions:
            return
        assert self._model is not None, "the runtime is closed"
        size = cache_positions(num_positions, self._num_positions, self._limits.max_positions)
        num_blocks, old = _num_blocks(self._model, size), self._host_caches
        with telling_of_memory(size):
            self._caches = self._model.bind_cache(num_blocks)
        self._num_positions, self._blocks.num_blocks = size, num_blocks
        if old:
            self._host_caches = [tensor.data for tensor in self._caches]
            num_touched = self._blocks.num_touched
            for source, target in zip(old, self._host_caches, strict=True):
                target[:num_touched] = source[:num_touched]
            return
        text = self._blocks.text
        self._blocks.truncate(0)
        self._length = 0
        if text:
            self._run(text, 1)

    def _bind(self, num_new: int, num_rows: int) -> None:
        self._request.set_tensor("input_ids", shared_tensor(self._ids[:num_new]))
        self._request.set_tensor("position_ids", shared_tensor(self._positions[:num_new]))
        if self._gathers_rows:
            self._request.set_tensor("logit_rows", shared_tensor(self._rows[:num_rows]))
        if self._num_bound == (0, 0):  # at first, and after branches
            for name, array in (
                ("past_lens", self._past),
                ("subsequence_begins", self._begins),
                ("max_context_len", self._context),
                ("block_indices", self._blocks.table),
                ("block_indices_begins", self._table_begins),
            ):
                self._request.set_tensor(name, shared_tensor(array))
        self._num_bound = (num_new, num_rows)

    @property
    def max_branches(self) -> int:
        """Branches that one call takes at most."""
        return MAX_BRANCHES

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits after each branch of the sequence, which stays as it is: [B, vocab_size] float32.

        The array is reused by the next call. Raises ConfigError when a branch would be longer than
        `limits.max_positions`.
        """
        assert 0 < len(branches) <= MAX_BRANCHES, f"{len(branches)} branches"
        for branch in branches:
            self._check_new(branch)
        self._reserve(self._length + max(map(len, branches)))
        self._num_bound = (0, 0)
        try:
            planned = self._plan(range(len(branches)), branches)
            if len(planned) == len(branches):
                return self._infer_branches(list(planned.values()))
            logits = np.empty((len(branches), self._limits.vocab_size), np.float32)
            waiting = list(range(len(branches)))
            while planned:
                logits[list(planned)] = self._infer_branches(list(planned.values()))
                waiting = [index for index in waiting if index not in planned]
                planned = self._plan(waiting, branches) if waiting else {}
        except BaseException:
            self._blocks.forget_branches()
            raise
        return logits

    def _plan(self, waiting: Sequence[int], branches: Sequence[Sequence[int]]) -> dict[int, BranchRun]:
        """The runs of those branches that can run now, by their index in the call."""
        self._blocks.next_round()
        planned = {}
        for index in waiting:
            run = self._blocks.plan(branches[index])
            if run is None:
                continue
            if run.copy is not None:
                source, target = run.copy
                for cache in self._host_caches:
                    cache[target] = cache[source]
            planned[index] = run
        return planned

    def _infer_branches(self, runs: list[BranchRun]) -> NDArray[np.float32]:
        num_branches = len(runs)
        # Another number of tokens than in the last call costs more than the padding: it runs a branch once more, into
        # the same slots.
        shortest = min(runs, key=lambda run: len(run.tokens))
        runs += [shortest] * (padded_branches(num_branches) - num_branches)
        past = np.array([run.past for run in runs], np.int32)
        num_new = np.array([len(run.tokens) for run in runs])
        token_begins = begins(num_new)
        last_rows = token_begins[1:] - 1
        bound = {
            "input_ids": np.array([token for run in runs for token in run.tokens], np.int64),
            "position_ids": np.arange(token_begins[-1]) + np.repeat(past - token_begins[:-1], num_new),
            "past_lens": past,
            "subsequence_begins": token_begins.astype(np.int32),
            "max_context_len": np.array((past + num_new).max(), np.int32),
            "block_indices": np.array([block for run in runs for block in run.blocks], np.int32),
            "block_indices_begins": begins(np.array([len(run.blocks) for run in runs])).astype(np.int32),
        }
        if self._gathers_rows:
            bound["logit_rows"] = last_rows
        self._bound_branches = bound
        for name, array in bound.items():
            self._request.set_tensor(name, shared_tensor(array))
        self._request.infer(share_outputs=True)
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        logits = logits.reshape(-1, self._limits.vocab_size)
        return (logits if self._gathers_rows else logits[last_rows])[:num_branches]

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        self._request = None
        self._model = None
        self._caches = []
        self._host_caches = []


def _num_blocks(model: PagedModel, num_positions: int) -> int:
    """Blocks of a cache for a sequence of so many positions, and its branches."""
    return -(-num_positions // model.block_size) + max(_MIN_SPARE, min(_NUM_SPARE, _SPARE_BYTES // model.block_bytes))
