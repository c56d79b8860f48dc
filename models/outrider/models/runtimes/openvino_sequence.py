"""Runs a `SequenceRuntime` on OpenVINO paged attention: the device's draft on CPU or Intel GPU.

Rollback is a smaller past length. A draft is so small that the call costs as much as the model: the tensors are bound
once, over numpy memory that changes in place, and are bound again only when the number of new tokens changes.

Sequences of one model share its cache and take turns, or run their branches in one call. The cache grows with what they
hold: on the CPU it is copied, on a GPU each text runs again when its sequence is used next.

Branches are sequences of their own in one call. They share blocks as `branch_blocks` decides; a block that two branches
would write is copied first. A GPU's blocks are not in our memory, so its branches compute that part again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import (
    OneSequence,
    OpenSequences,
    RuntimeOptions,
    SequenceRuntime,
    SequenceSlice,
    cache_positions,
    padded_branches,
    telling_of_memory,
)
from outrider.models.runtimes.branch_blocks import BranchBlocks, BranchRun, FreeBlocks
from outrider.models.runtimes.openvino_graph import (
    PagedModel,
    bind_step,
    load_paged_model,
    run_request,
    shared_tensor,
    step_logits,
)
from outrider.models.runtimes.ragged import RaggedStep, lay_out

MAX_BRANCHES: Final = 8
# Blocks for branches. A tree of some hundred nodes that fork inside their blocks needs about as many.
_NUM_SPARE: Final = 256
_MIN_SPARE: Final = 16
_SPARE_BYTES: Final = 128 << 20


class _Shared:
    """What the sequences of one model share: request, cache, and the memory of bound tensors."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        model = load_paged_model(path, options, tree_masks=False)
        self.model: PagedModel | None = model
        self.limits = model.limits
        self.block_size = model.block_size
        self.gathers_rows = model.gathers_rows
        self.request: Any = model.request
        self.longest = longest = model.limits.max_positions
        self.open = OpenSequences(options.num_sequences)
        self.pool = FreeBlocks(0)
        self.num_promised = 0  # blocks that the open sequences may use
        self.num_lost = 0  # times that the cache was replaced by an empty one
        with telling_of_memory(longest):
            self.ids, self.positions, self.rows = (np.zeros(longest, np.int64) for _ in range(3))
        # Kept alive here: the request uses the memory of a bound array but does not own it.
        self.past = np.zeros(1, np.int32)
        self.begins = np.zeros(2, np.int32)
        self.context = np.zeros((), np.int32)
        self.branches: RaggedStep | None = None
        self.num_bound = (0, 0)  # new tokens and rows of the bound tensors; (0, 0): those of branches
        self.bound_for: OpenVinoSequenceRuntime | None = None  # the sequence whose blocks are bound
        self.caches: list[Any] = []
        # A GPU's caches have no memory here that could be copied.
        self.is_on_host = options.device == "CPU"
        self.host_caches: list[NDArray[Any]] = []

    def blocks_for(self, num_positions: int) -> int:
        """Blocks of a sequence of so many positions, and its branches."""
        assert self.model is not None, "the runtime is closed"
        num_spare = min(_NUM_SPARE, _SPARE_BYTES // self.open.most // self.model.block_bytes)
        return -(-num_positions // self.block_size) + max(_MIN_SPARE, num_spare)

    def promise(self, num_more: int) -> None:
        """Lets a sequence use more blocks; makes a larger cache where they are not there.

        Raises ConfigError where memory does not suffice, and nothing has changed then.
        """
        num_blocks = self.num_promised + num_more
        if num_blocks > self.pool.num_blocks:
            assert self.model is not None, "the runtime is closed"
            with telling_of_memory(num_blocks * self.block_size):
                self.caches = self.model.bind_cache(num_blocks)
            num_held = self.pool.grow(num_blocks)
            if self.is_on_host:
                old, self.host_caches = self.host_caches, [tensor.data for tensor in self.caches]
                for source, target in zip(old, self.host_caches, strict=bool(old)):
                    target[:num_held] = source[:num_held]
            elif num_held:
                self.num_lost += 1
        self.num_promised = num_blocks

    def close(self) -> None:
        self.model = None
        self.request = None
        self.caches = []
        self.host_caches = []
        self.bound_for = None


class OpenVinoSequenceRuntime(OneSequence):
    """One sequence of at most `limits.max_positions` tokens, and its branches."""

    max_branches: int = MAX_BRANCHES

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the IR at `path` (directory or .xml); raises as `load_paged_model` does, ConfigError without memory."""
        self._join(_Shared(path, options))
        self._is_first = True
        self._reserve(1)

    def _join(self, shared: _Shared) -> None:
        shared.open.add()
        super().__init__(shared.limits)
        self._shared = shared
        self._is_first = self._is_closed = False
        self._num_positions = 0  # that its blocks have room for
        self._num_lost = 0
        self._blocks = BranchBlocks(0, shared.block_size, shared.longest, copies=shared.is_on_host, pool=shared.pool)
        self._table_begins = np.array([0, len(self._blocks.table)], np.int32)

    def open_sequence(self) -> OpenVinoSequenceRuntime:
        """Another, empty sequence of the same model, whose blocks come from the same cache; close it before this one.

        Touches no tensor, so a call of another sequence may run meanwhile.
        Raises ConfigError beyond `num_sequences` of the options.
        """
        another = OpenVinoSequenceRuntime.__new__(OpenVinoSequenceRuntime)
        another._join(self._shared)
        return another

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
        self._restore()
        start, end = self._length, self._length + len(tokens)
        num_kept = self._blocks.extend(tokens, num_rows)
        past, num_new = start + num_kept, len(tokens) - num_kept
        if self._shared.num_bound != (num_new, num_rows) or self._shared.bound_for is not self:
            self._bind(num_new, num_rows)
        shared = self._shared
        if num_new == 1:  # as for every token that is drafted: assigning sequences takes 10 us more
            shared.ids[0], shared.positions[0], shared.rows[0] = tokens[-1], past, 0
        else:
            shared.ids[:num_new] = tokens[num_kept:] if num_kept else tokens
            shared.positions[:num_new] = range(past, end)
            shared.rows[:num_rows] = range(num_new - num_rows, num_new)
        shared.past[0] = past
        shared.begins[1] = num_new
        shared.context[...] = end
        try:
            run_request(shared.request)
        except BaseException:
            self._blocks.truncate(start)
            raise
        self._length = end
        logits: NDArray[np.float32] = self._shared.request.get_output_tensor(0).data
        return logits.reshape(-1, self.limits.vocab_size)[-num_rows:]

    def _reserve(self, num_positions: int) -> None:
        """Makes room for so many positions. Raises ConfigError where memory does not suffice."""
        if num_positions <= self._num_positions:
            return
        shared = self._shared
        size = cache_positions(num_positions, self._num_positions, self.limits.max_positions)
        num_blocks = shared.blocks_for(size)
        shared.promise(num_blocks - self._blocks.num_blocks)
        self._num_positions, self._blocks.num_blocks = size, num_blocks

    def _restore(self) -> None:
        """Runs the text again where it was lost with a cache that could not be copied."""
        if self._num_lost == self._shared.num_lost:
            return
        self._num_lost = self._shared.num_lost
        text = self._blocks.text.copy()
        self._blocks.forget_branches()
        self._blocks.truncate(0)
        self._length = 0
        try:
            if text:
                self._run(text, 1)
        except BaseException:
            self._blocks.truncate(0)
            self._blocks.extend(text)
            self._length, self._num_lost = len(text), -1  # still lost: the next call tries again
            raise

    def _bind(self, num_new: int, num_rows: int) -> None:
        self._shared.request.set_tensor("input_ids", shared_tensor(self._shared.ids[:num_new]))
        self._shared.request.set_tensor("position_ids", shared_tensor(self._shared.positions[:num_new]))
        if self._shared.gathers_rows:
            self._shared.request.set_tensor("logit_rows", shared_tensor(self._shared.rows[:num_rows]))
        if self._shared.num_bound == (0, 0) or self._shared.bound_for is not self:  # also after branches
            for name, array in (
                ("past_lens", self._shared.past),
                ("subsequence_begins", self._shared.begins),
                ("max_context_len", self._shared.context),
                ("block_indices", self._blocks.table),
                ("block_indices_begins", self._table_begins),
            ):
                self._shared.request.set_tensor(name, shared_tensor(array))
        self._shared.num_bound, self._shared.bound_for = (num_new, num_rows), self

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits after each branch of the sequence, which stays as it is: [B, vocab_size] float32.

        The array is reused by the next call. Raises ConfigError when a branch would be longer than
        `limits.max_positions`.
        """
        return self.extend_branches_of([(self, branches)])

    def extend_branches_of(
        self, groups: Sequence[tuple[SequenceRuntime, Sequence[Sequence[int]]]]
    ) -> NDArray[np.float32]:
        """As `extend_branches` for each of these sequences of the model, in one call where no branch has to wait.

        Rows come in the groups' order; at most MAX_BRANCHES branches in all.
        """
        shared = self._shared
        asked = [(_own(sequence, shared), branch) for sequence, branches in groups for branch in branches]
        assert 0 < len(asked) <= MAX_BRANCHES, f"{len(asked)} branches"
        for sequence, branch in asked:
            sequence._check_new(branch)
        for sequence, branch in asked:
            sequence._reserve(sequence._length + len(branch))
        for sequence, _ in asked:  # when the cache has its size
            sequence._restore()
        shared.num_bound = (0, 0)
        logits: NDArray[np.float32] | None = None
        waiting = dict(enumerate(asked))  # by the answer's rows
        try:
            while waiting:
                planned = _plan(waiting)
                found = self._infer_branches(list(planned.values()))
                if len(planned) == len(asked):
                    return found
                if logits is None:
                    logits = np.empty((len(asked), self.limits.vocab_size), np.float32)
                logits[list(planned)] = found
                waiting = {row: each for row, each in waiting.items() if row not in planned}
        except BaseException:
            for sequence, _ in asked:
                sequence._blocks.forget_branches()
            raise
        assert logits is not None
        return logits

    def _plan_branch(self, branch: Sequence[int]) -> BranchRun | None:
        """The run of a branch, if it can run now; copies what it must not overwrite."""
        run = self._blocks.plan(branch)
        if run is not None and run.copy is not None:
            source, target = run.copy
            for cache in self._shared.host_caches:
                cache[target] = cache[source]
        return run

    def _infer_branches(self, runs: list[BranchRun]) -> NDArray[np.float32]:
        num_branches = len(runs)
        # Another number of tokens than in the last call costs more than the padding: it runs a branch once more, into
        # the same slots.
        shortest = min(runs, key=lambda run: len(run.tokens))
        runs += [shortest] * (padded_branches(num_branches) - num_branches)
        shared = self._shared
        shared.branches = lay_out(
            [SequenceSlice(run.tokens, run.past, run.blocks, 1) for run in runs],
            vocab_size=self.limits.vocab_size,
            max_positions=self.limits.max_positions,
            block_size=shared.block_size,
            num_blocks=shared.pool.num_blocks,
        )
        assert shared.model is not None, "the runtime is closed"
        bind_step(shared.request, shared.model, shared.branches)
        run_request(shared.request)
        return step_logits(shared.request, shared.model, shared.branches)[:num_branches]

    def close(self) -> None:
        """Frees the sequence's blocks; the first sequence of a model releases model and cache. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._shared.open.number -= 1
            self._shared.num_promised -= self._blocks.num_blocks
            self.truncate(0)
            self._blocks.forget_branches()
        if self._is_first:
            self._shared.close()


def _plan(waiting: Mapping[int, tuple[OpenVinoSequenceRuntime, Sequence[int]]]) -> dict[int, BranchRun]:
    """The runs of those branches that can run now, by their rows."""
    for sequence in {id(sequence): sequence for sequence, _ in waiting.values()}.values():
        sequence._blocks.next_round()
    runs = {row: sequence._plan_branch(branch) for row, (sequence, branch) in waiting.items()}
    return {row: run for row, run in runs.items() if run is not None}


def _own(sequence: SequenceRuntime, shared: _Shared) -> OpenVinoSequenceRuntime:
    assert isinstance(sequence, OpenVinoSequenceRuntime) and sequence._shared is shared, "a sequence of another model"
    return sequence
