"""Runs branches of a sequence on ONNX Runtime's CPU provider: one row of a batch each, a token a row.

Rows hold copies of the sequence's keys and values; only what was added since the last call is copied. Branches are
remembered as a tree of tokens. Each of its nodes has its token's keys and values, which are put into whichever row goes
on from it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.runtimes.base import telling_of_memory
from outrider.models.runtimes.onnxruntime_session import OnnxModel

MAX_BRANCHES: Final = 8
_MAX_KEPT: Final = 512
_FIRST_POSITIONS: Final = 512


def lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array whose pages the operating system zeroes on first touch: an unused part costs no memory.

    Uses small pages: every head has its own part of the cache, and with huge pages the first token would take two
    megabytes for each head of each layer.
    """
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


@dataclass(slots=True, eq=False)
class BranchNode:
    """A token of a branch. used: the last call that went through it.

    kept: its keys and values, for each group of caches [caches, heads, head_size]; empty until it has run.
    """

    token: int
    parent: BranchNode | None
    used: int
    kept: list[NDArray[Any]] = field(default_factory=list)
    children: dict[int, BranchNode] = field(default_factory=dict)


class BranchNodes:
    """The branches that go on from a sequence's end, as a tree."""

    def __init__(self, max_kept: int) -> None:
        """max_kept: nodes that are kept from one call to the next; the ones used longest ago are forgotten."""
        self._max_kept = max_kept
        self._roots: dict[int, BranchNode] = {}
        self._most = 0  # nodes, if none was forgotten since they were last counted
        self._call = 0

    def __bool__(self) -> bool:
        return bool(self._roots)

    def __iter__(self) -> Iterator[BranchNode]:
        """All nodes, parents before their children."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def next_call(self) -> None:
        """Begins a call: forgets the nodes used longest ago, if there are more than `max_kept`."""
        self._call += 1
        if self._most > self._max_kept:
            # The newest first; a node, used no longer ago than its children, before these.
            nodes = sorted(self, key=lambda node: node.used, reverse=True)
            for node in nodes[self._max_kept :]:
                del (node.parent.children if node.parent else self._roots)[node.token]
            self._most = min(len(nodes), self._max_kept)

    def path(self, branch: Sequence[int]) -> list[BranchNode]:
        """The kept nodes of a branch, from its first token on."""
        found: list[BranchNode] = []
        children = self._roots
        for token in branch:
            node = children.get(token)
            if node is None:
                break
            node.used = self._call
            found.append(node)
            children = node.children
        return found

    def add(self, parent: BranchNode | None, token: int) -> BranchNode:
        """A new node behind `parent` (None: the sequence)."""
        self._most += 1
        node = BranchNode(token, parent, self._call)
        (parent.children if parent else self._roots)[token] = node
        return node

    def follow(self, tokens: Sequence[int]) -> list[BranchNode]:
        """The sequence grows by `tokens`: returns the nodes of those that are kept, which leave the tree.

        Branches that do not go on from the new end are forgotten.
        """
        nodes = self.path(tokens)
        self._roots = nodes[-1].children if len(nodes) == len(tokens) else {}
        for root in self._roots.values():
            root.parent = None
        return nodes

    def forget(self) -> None:
        """Forgets all branches."""
        self._roots = {}
        self._most = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Caches of one size. indices: which of the model's. rows: [caches, branches, heads, positions, head_size]."""

    indices: list[int]
    rows: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Batch:
    """A binding for a number of rows, and the memory that it reads and writes."""

    binding: Any
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    logits: NDArray[Any]


class BranchRows:
    """The branches of one sequence, whose own caches are `own`: [1, heads, positions, head_size] each."""

    def __init__(self, model: OnnxModel, own: Sequence[NDArray[Any]]) -> None:
        """Allocates nothing that takes memory before the first call."""
        assert model.takes_batches
        self.nodes = BranchNodes(_MAX_KEPT)
        self._model = model
        self._own = own
        self._valid = [0] * MAX_BRANCHES  # positions in which a row holds the sequence
        self._held: list[list[BranchNode]] = [[] for _ in range(MAX_BRANCHES)]  # what a row holds behind them
        self._batches: dict[int, _Batch] = {}
        self._num_positions = 0
        self._groups: list[_Group] = []

    def run(self, branches: Sequence[Sequence[int]], length: int) -> NDArray[np.float32]:
        """Logits after each branch of a sequence of `length` tokens, [B, vocab_size] float32, reused by the next call.

        Raises ModelFault when the model fails, and forgets all branches.
        """
        self._reserve(length + max(len(branch) for branch in branches))
        self.nodes.next_call()
        try:
            return self._run(branches, length)
        except BaseException:
            self._forget()
            raise

    def _run(self, branches: Sequence[Sequence[int]], length: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] | None = None
        waiting = dict(enumerate(branches))
        while waiting:
            paths: dict[BranchNode, list[BranchNode]] = {}  # by their last nodes, which run in this step
            ends: dict[int, BranchNode] = {}  # of the branches that this step finishes
            for index, branch in waiting.items():
                path = self.nodes.path(branch)
                if len(path) < len(branch) and not (path and path[-1] in paths):
                    path.append(self.nodes.add(path[-1] if path else None, branch[len(path)]))
                paths.setdefault(path[-1], path)
                if len(path) == len(branch):
                    ends[index] = path[-1]
            found = self._step(list(paths.values()), length)
            if len(ends) == len(branches) == len(paths):
                return found
            if logits is None:
                logits = np.empty((len(branches), self._model.limits.vocab_size), np.float32)
            rows = {node: row for row, node in enumerate(paths)}
            for index, node in ends.items():
                logits[index] = found[rows[node]]
                del waiting[index]
        assert logits is not None
        return logits

    def _step(self, paths: Sequence[list[BranchNode]], length: int) -> NDArray[np.float32]:
        """Runs the last node of each path, whose others have run: [rows, vocab_size] float32."""
        num_rows = len(paths)
        self._fill(paths, length)
        batch = self._batches.get(num_rows) or self._bind(num_rows)
        ends = np.array([length + len(path) for path in paths])
        batch.ids[:, 0] = [path[-1].token for path in paths]
        batch.positions[:, 0] = ends - 1
        mask = (np.arange(ends.max()) < ends[:, None]).astype(np.int64)  # the length of each row's cache
        batch.binding.bind_ortvalue_input("attention_mask", ort.OrtValue.ortvalue_from_numpy(mask))
        try:
            self._model.session.run_with_iobinding(batch.binding)
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise ModelFault(f"ONNX Runtime failed in a step of {num_rows} branches after {length}: {error}") from error
        for row, path in enumerate(paths):
            position = length + len(path) - 1
            path[-1].kept = [group.rows[:, row, :, position].copy() for group in self._groups]
            self._held[row] = path
        return batch.logits[:, 0].astype(np.float32, copy=False)

    def _fill(self, paths: Sequence[list[BranchNode]], length: int) -> None:
        """Puts the sequence, and all nodes of a path but the last, into the path's row."""
        num_rows = len(paths)
        valid = min(self._valid[:num_rows])
        if valid < length:
            for group in self._groups:
                for place, index in enumerate(group.indices):
                    group.rows[place, :num_rows, :, valid:length] = self._own[index][:, :, valid:length]
        self._valid[:num_rows] = [length] * num_rows
        for row, path in enumerate(paths):
            held, depth = self._held[row], len(path) - 1
            same = 0
            while same < min(len(held), depth) and held[same] is path[same]:
                same += 1
            for position, node in enumerate(path[same:depth], length + same):
                for group, kept in zip(self._groups, node.kept, strict=True):
                    group.rows[:, row, :, position] = kept

    def extend(self, tokens: Sequence[int], length: int) -> int:
        """The sequence of `length` tokens grows: puts what branches kept of `tokens`, all but the last at most, into
        its own caches; returns how many. Branches that do not go on from the new end are forgotten.
        """
        nodes = self.nodes.follow(tokens)[: len(tokens) - 1]
        self._held = [[] for _ in self._held]
        for place, group in enumerate(self._groups if nodes else ()):
            kept = np.stack([node.kept[place] for node in nodes], axis=2)  # [caches, heads, tokens, head_size]
            for index, rows in zip(group.indices, kept, strict=True):
                self._own[index][0, :, length : length + len(nodes)] = rows
        return len(nodes)

    def truncate(self, length: int) -> None:
        """The sequence is cut back; forgets all branches."""
        self._forget()
        self._valid = [min(valid, length) for valid in self._valid]

    def _forget(self) -> None:
        self.nodes.forget()
        self._held = [[] for _ in self._held]

    def _reserve(self, num_positions: int) -> None:
        """Makes rows for sequences of `num_positions`; larger ones take the place of smaller ones."""
        if num_positions <= self._num_positions:
            return
        size = max(self._num_positions, _FIRST_POSITIONS)
        while size < num_positions:
            size *= 2
        self._batches = {}
        self._valid = [0] * MAX_BRANCHES
        self._held = [[] for _ in self._held]
        sizes: dict[tuple[int, int], list[int]] = {}
        for index, cache in enumerate(self._model.caches):
            sizes.setdefault((cache.heads, cache.head_size), []).append(index)
        self._groups = []
        with telling_of_memory(size):
            for (heads, head_size), indices in sizes.items():
                rows = lazy_zeros((len(indices), MAX_BRANCHES, heads, size, head_size), self._model.dtype)
                self._groups.append(_Group(indices, rows))
        self._num_positions = size

    def _bind(self, num_rows: int) -> _Batch:
        model = self._model
        binding = model.session.io_binding()
        batch = _Batch(
            binding,
            np.zeros((num_rows, 1), np.int64),
            np.zeros((num_rows, 1), np.int64),
            np.empty((num_rows, 1, model.limits.vocab_size), model.logits_dtype),
        )
        binding.bind_ortvalue_input("input_ids", ort.OrtValue.ortvalue_from_numpy(batch.ids))
        if "position_ids" in model.inputs:
            binding.bind_ortvalue_input("position_ids", ort.OrtValue.ortvalue_from_numpy(batch.positions))
        for group in self._groups:
            for place, index in enumerate(group.indices):
                cache = model.caches[index]
                value = ort.OrtValue.ortvalue_from_numpy(group.rows[place, :num_rows])
                binding.bind_ortvalue_input(cache.past, value)
                binding.bind_ortvalue_output(cache.present, value)
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(batch.logits))
        self._batches[num_rows] = batch
        return batch
