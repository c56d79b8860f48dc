"""Runs a `SequenceRuntime` on OpenVINO paged attention: the device's draft on CPU or Intel GPU.

Rollback is a smaller past length. A draft is so small that the call costs as much as the model: the tensors are bound
once, over numpy memory that changes in place, and are bound again only when the number of new tokens changes.

Sequences of one model share its cache and take turns, or run their branches in one call.

Branches are sequences of their own in one call. They share blocks as `branch_blocks` decides; a block that two branches
would write is copied first. A GPU's blocks are not in our memory, so its branches compute that part again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import RuntimeOptions, SequenceRuntime, padded_branches, telling_of_memory
from outrider.models.runtimes.branch_blocks import BlockPool, BranchBlocks, BranchRun
from outrider.models.runtimes.one_sequence import OneSequence
from outrider.models.runtimes.openvino_graph import PagedModel, load_paged_model, shared_tensor
from outrider.models.runtimes.ragged import begins

MAX_BRANCHES: Final = 8
# Blocks for branches. A tree of some hundred nodes that fork inside their blocks needs about as many.
_NUM_SPARE: Final = 256
_MIN_SPARE: Final = 16
_SPARE_BYTES: Final = 128 << 20


class _Shared:
    """What the sequences of one model share: request, cache, and the memory of bound tensors."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        model = load_paged_model(path, options, tree_masks=False)
        self.limits = model.limits
        self.block_size = model.block_size
        self.gathers_rows = model.gathers_rows
        self.request: Any = model.request
        self.longest = longest = model.limits.max_positions
        self.num_blocks = -(-longest // model.block_size) + _num_spare(model, options.num_sequences)  # of a sequence
        self.max_sequences = options.num_sequences
        self.num_sequences = 0
        self.pool = BlockPool(self.num_blocks * options.num_sequences)
        with telling_of_memory(longest * options.num_sequences):
            self.caches: list[Any] = model.bind_cache(self.pool.num_blocks)
            self.ids, self.positions, self.rows = (np.zeros(longest, np.int64) for _ in range(3))
        # Kept alive here: the request uses the memory of a bound array but does not own it.
        self.past = np.zeros(1, np.int32)
        self.begins = np.zeros(2, np.int32)
        self.context = np.zeros((), np.int32)
        self.branches: dict[str, NDArray[Any]] = {}
        self.num_bound = (0, 0)  # new tokens and rows of the bound tensors; (0, 0): those of branches
        self.bound_for: OpenVinoSequenceRuntime | None = None  # the sequence whose blocks are bound
        # A GPU's caches have no memory here that could be copied.
        is_on_host = options.device == "CPU"
        self.host_caches: list[NDArray[Any]] = [tensor.data for tensor in self.caches] if is_on_host else []

    def close(self) -> None:
        self.request = None
        self.caches = []
        self.host_caches = []
        self.bound_for = None


class OpenVinoSequenceRuntime(OneSequence):
    """One sequence of at most `limits.max_positions` tokens, and its branches."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the IR at `path` (directory or .xml); raises as `load_paged_model` does.

        The cache is sized for `num_sequences` of the longest sequence; pages that no token has reached take no memory
        on CPU.
        """
        self._join(_Shared(path, options))
        self._is_first = True

    def _join(self, shared: _Shared) -> None:
        super().__init__(shared.limits)
        self._shared = shared
        self._is_first = self._is_closed = False
        self._blocks = BranchBlocks(
            shared.num_blocks, shared.block_size, shared.longest, copies=bool(shared.host_caches), pool=shared.pool
        )
        self._table_begins = np.array([0, len(self._blocks.table)], np.int32)
        shared.num_sequences += 1

    def open_sequence(self) -> OpenVinoSequenceRuntime:
        """Another, empty sequence of the same model, whose blocks come from the same cache; close it before this one.

        Raises ConfigError beyond `num_sequences` of the options.
        """
        shared = self._shared
        if shared.num_sequences >= shared.max_sequences:
            raise ConfigError(f"the model holds {shared.max_sequences} sequences; load it with more num_sequences")
        another = OpenVinoSequenceRuntime.__new__(OpenVinoSequenceRuntime)
        another._join(shared)
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
        start, end = self._length, self._length + len(tokens)
        num_kept = self._blocks.extend(tokens, num_rows)
        past, num_new = start + num_kept, len(tokens) - num_kept
        if self._shared.num_bound != (num_new, num_rows) or self._shared.bound_for is not self:
            self._bind(num_new, num_rows)
        self._shared.ids[:num_new] = tokens[num_kept:] if num_kept else tokens
        self._shared.positions[:num_new] = range(past, end)
        self._shared.rows[:num_rows] = range(num_new - num_rows, num_new)
        self._shared.past[0] = past
        self._shared.begins[1] = num_new
        self._shared.context[...] = end
        try:
            self._shared.request.infer(share_outputs=True)
        except BaseException:
            self._blocks.truncate(start)
            raise
        self._length = end
        logits: NDArray[np.float32] = self._shared.request.get_output_tensor(0).data
        return logits.reshape(-1, self._limits.vocab_size)[-num_rows:]

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

    @property
    def max_branches(self) -> int:
        """Branches that one call takes at most."""
        return MAX_BRANCHES

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
        sequences = [_own(sequence, self._shared) for sequence, _ in groups]
        num_branches = sum(len(branches) for _, branches in groups)
        assert 0 < num_branches <= MAX_BRANCHES, f"{num_branches} branches"
        for sequence, (_, branches) in zip(sequences, groups, strict=True):
            for branch in branches:
                sequence._check_new(branch)
        self._shared.num_bound = (0, 0)
        waiting = [
            _Waiting(row, sequence, branch)
            for row, (sequence, branch) in enumerate(
                (sequence, branch)
                for sequence, (_, branches) in zip(sequences, groups, strict=True)
                for branch in branches
            )
        ]
        try:
            planned = _plan(waiting)
            if len(planned) == num_branches:
                return self._infer_branches(list(planned.values()))
            logits = np.empty((num_branches, self._limits.vocab_size), np.float32)
            while planned:
                logits[list(planned)] = self._infer_branches(list(planned.values()))
                waiting = [each for each in waiting if each.row not in planned]
                planned = _plan(waiting) if waiting else {}
        except BaseException:
            for sequence in sequences:
                sequence._blocks.forget_branches()
            raise
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
        if self._shared.gathers_rows:
            bound["logit_rows"] = last_rows
        self._shared.branches = bound
        for name, array in bound.items():
            self._shared.request.set_tensor(name, shared_tensor(array))
        self._shared.request.infer(share_outputs=True)
        logits: NDArray[np.float32] = self._shared.request.get_output_tensor(0).data
        logits = logits.reshape(-1, self._limits.vocab_size)
        return (logits if self._shared.gathers_rows else logits[last_rows])[:num_branches]

    def close(self) -> None:
        """Frees the sequence's blocks; the first sequence of a model releases model and cache. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._shared.num_sequences -= 1
            self.truncate(0)
            self._blocks.forget_branches()
        if self._is_first:
            self._shared.close()


class _Waiting(NamedTuple):
    """A branch that has not run. row: of the answer."""

    row: int
    sequence: OpenVinoSequenceRuntime
    branch: Sequence[int]


def _plan(waiting: Sequence[_Waiting]) -> dict[int, BranchRun]:
    """The runs of those branches that can run now, by their rows."""
    for sequence in {id(each.sequence): each.sequence for each in waiting}.values():
        sequence._blocks.next_round()
    planned = {}
    for row, sequence, branch in waiting:
        run = sequence._plan_branch(branch)
        if run is not None:
            planned[row] = run
    return planned


def _own(sequence: SequenceRuntime, shared: _Shared) -> OpenVinoSequenceRuntime:
    assert isinstance(sequence, OpenVinoSequenceRuntime) and sequence._shared is shared, "a sequence of another model"
    return sequence


def _num_spare(model: PagedModel, num_sequences: int) -> int:
    """Blocks for the branches of each sequence."""
    return max(_MIN_SPARE, min(_NUM_SPARE, _SPARE_BYTES // num_sequences // model.block_bytes))
