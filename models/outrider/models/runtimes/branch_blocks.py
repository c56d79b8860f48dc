"""Decides which cache blocks a sequence uses, and those of the branches that go on from its end.

Branches are kept as a tree. Each of its nodes is a token, whose keys and values are in one block, its home: behind
those of all its ancestors of that block, so a home is enough to go on from a node. The first child of a node is written
behind it, into the same block. Any other child needs a block of its own, with the ancestors' keys and values: copied,
or computed again. A block is free when no node has its home there and the sequence does not use it.

When blocks run out, what was used longest ago is forgotten. Several sequences may take their blocks from one
pool, each within its own number of them. Knows block numbers only: no model, no cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class _Node:
    """A token of a branch. born, used: the rounds that ran it, and that last went through it."""

    token: int
    position: int
    home: int
    parent: _Node | None
    born: int
    used: int
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BranchRun:
    """What to run for a branch: `tokens` from position `past` on, in `blocks`, which cover all positions from 0 on.

    copy: a block to copy and the block to copy it to, before the run; None when there is nothing to copy.
    """

    tokens: Sequence[int]
    past: int
    blocks: list[int]
    copy: tuple[int, int] | None


class FreeBlocks:
    """Numbers of free blocks, 0 to `num_blocks` - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = []  # used before, the last one first: its memory is there already
        self._num_touched = 0  # blocks beyond were never used

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free) + self.num_blocks - self._num_touched

    def grow(self, num_blocks: int) -> int:
        """Adds blocks behind the others; returns how many of the first were ever used: the rest hold nothing."""
        assert num_blocks >= self.num_blocks, f"{num_blocks} blocks are fewer than {self.num_blocks}"
        self.num_blocks = num_blocks
        return self._num_touched

    def take(self) -> int:
        """A free block."""
        assert self.num_free, f"none of {self.num_blocks} blocks is free"
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1

    def give(self, block: int) -> None:
        """Takes a block back."""
        self._free.append(block)


class BranchBlocks:
    """The blocks of one sequence, whose tokens are `text`, and of its branches.

    Call `next_round` before a step's runs are planned.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        *,
        copies: bool,
        pool: FreeBlocks | None = None,
        joins: bool = False,
    ) -> None:
        """num_blocks: at least three more than the longest sequence and branch need, so that one branch always finds
        room; may be raised before these grow, up to `max_positions`, and the pool then too.

        copies: whether blocks can be copied; else a branch computes the tokens of its first block again. pool: where
        the blocks come from; it must have as many free as all that take from it may use. None: one of its own. joins:
        whether a run may go on from a token of the same round, which comes before it.
        """
        self.table: NDArray[np.int32] = np.zeros(-(-max_positions // block_size), np.int32)
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._copies = copies
        self._joins = joins
        self._pool = pool or FreeBlocks(num_blocks)
        self._num_users: dict[int, int] = {}  # nodes with their home in a block, and the sequence
        self.text: list[int] = []
        self._num_own = 0  # blocks of the sequence
        self._roots: dict[int, _Node] = {}  # the first tokens of all branches
        self._round = 0
        self._is_first = True  # of the round's runs

    @property
    def num_free(self) -> int:
        """Blocks that neither the sequence nor a branch uses."""
        return self.num_blocks - len(self._num_users)

    @property
    def num_nodes(self) -> int:
        """Tokens of branches whose keys and values are kept."""
        return sum(1 for _ in self._nodes())

    def extend(self, tokens: Sequence[int], num_rows: int = 1) -> int:
        """Appends tokens to the sequence; returns how many of the first need not run, all but `num_rows` at most.

        Branches that do not go on from the new end are forgotten.
        """
        num_kept = min(self._follow(tokens), len(tokens) - num_rows) if self._roots else 0
        self.text += tokens
        needed = -(-len(self.text) // self._block_size)
        while self._num_own < needed:
            block = self.table[self._num_own] = self._take()
            self._num_users[block] = 1
            self._num_own += 1
        return num_kept

    def truncate(self, length: int) -> None:
        """Cuts the sequence back to its first `length` tokens; forgets all branches if it is shorter or empty then."""
        if length and length == len(self.text):
            return
        self.forget_branches()
        del self.text[length:]
        needed = -(-length // self._block_size)
        while self._num_own > needed:
            self._num_own -= 1
            self._release(int(self.table[self._num_own]))

    def forget_branches(self) -> None:
        """Frees the blocks of all branches."""
        self._drop(self._roots.values())
        self._roots = {}

    def next_round(self) -> None:
        """Ends a round: what was planned in it has run, and may be gone on from, or forgotten."""
        self._round += 1
        self._is_first = True

    def plan(self, branch: Sequence[int]) -> BranchRun | None:
        """The run of a branch in this round, whose keys and values are kept from then on.

        None when it has to wait for the next round, because it goes on from a token of this one or finds no block. The
        first of a round never waits.
        """
        run = self._plan(branch)
        if run is None and self._is_first:  # each token of the branch may have its home in a block of its own
            self.forget_branches()
            run = self._plan(branch)
        self._is_first = self._is_first and run is None
        return run

    def _plan(self, branch: Sequence[int]) -> BranchRun | None:
        node, tail = None, self._last_block()
        for token in branch:
            child = (node.children if node else self._roots).get(token)
            if child is None:
                break
            if child.born == self._round and not self._joins:
                return None
            child.used = self._round
            if child.position % self._block_size:
                tail[-1] = child.home
            else:
                tail.append(child.home)
            node = child
        num_kept = node.position + 1 - len(self.text) if node else 0
        if node and num_kept == len(branch):  # kept in full: its last token runs once more, for its logits
            return BranchRun(branch[-1:], node.position, self._blocks(tail), None)
        return self._grow(node, branch[num_kept:], tail)

    def _grow(self, node: _Node | None, new: Sequence[int], tail: list[int]) -> BranchRun | None:
        """Adds `new` behind `node` (None: the sequence), whose blocks from the sequence's last one on are `tail`."""
        start = node.position + 1 if node else len(self.text)
        siblings = node.children if node else self._roots
        offset = start % self._block_size
        forks = bool(offset) and any(sibling.home == tail[-1] for sibling in siblings.values())
        num_more = -(-(start + len(new)) // self._block_size) - -(-start // self._block_size) + forks
        if not self._make_room(num_more):
            return None
        copy, again = None, 0
        if forks:
            source, tail[-1] = tail[-1], self._take()
            copy, again = ((source, tail[-1]), 0) if self._copies else (None, offset)
        past = start - again
        tokens = [*self._before(node, again), *new] if again else new
        for position, token in enumerate(new, start):
            if position % self._block_size == 0:
                tail.append(self._take())
            self._num_users[tail[-1]] += 1
            child = _Node(token, position, tail[-1], node, self._round, self._round)
            (node.children if node else self._roots)[token] = child
            node = child
        return BranchRun(tokens, past, self._blocks(tail), copy)

    def _before(self, node: _Node | None, count: int) -> list[int]:
        """The last `count` tokens up to `node`, itself included, or of the sequence."""
        found: list[int] = []
        while node and len(found) < count:
            found.append(node.token)
            node = node.parent
        found.reverse()
        rest = count - len(found)
        return self.text[len(self.text) - rest :] + found if rest else found

    def _last_block(self) -> list[int]:
        """The block that the next token would share with the sequence, if any."""
        return [int(self.table[self._num_own - 1])] if len(self.text) % self._block_size else []

    def _blocks(self, tail: list[int]) -> list[int]:
        full: list[int] = self.table[: len(self.text) // self._block_size].tolist()
        return full + tail

    def _follow(self, tokens: Sequence[int]) -> int:
        """Makes the kept tokens of a branch the sequence's own; returns how many, and forgets the other branches."""
        self._round += 1
        num_kept = 0
        for token in tokens:
            node = self._roots.pop(token, None)
            self._drop(self._roots.values())
            self._roots = {}
            if node is None:
                break
            index = node.position // self._block_size
            if index == self._num_own:  # the node's claim to its home goes over to the sequence
                self._num_own += 1
            else:
                self._release(int(self.table[index]))
            self.table[index] = node.home
            self._roots = node.children
            num_kept += 1
        for root in self._roots.values():
            root.parent = None
        return num_kept

    def _make_room(self, needed: int) -> bool:
        """Forgets what was used longest ago, until `needed` blocks are free; False when it cannot."""
        if self.num_free >= needed:
            return True
        # A node was used no longer ago than its children, which come first.
        for node in sorted(self._nodes(), key=lambda node: (node.used, -node.position)):
            if self.num_free >= needed or node.used == self._round:
                break
            del (node.parent.children if node.parent else self._roots)[node.token]
            self._release(node.home)
        return self.num_free >= needed

    def _take(self) -> int:
        """A free block, whose users are to be counted: none yet."""
        has_room = self._make_room(1)
        assert has_room, f"none of {self.num_blocks} blocks is free"
        block = self._pool.take()
        self._num_users[block] = 0
        return block

    def _release(self, block: int) -> None:
        self._num_users[block] -= 1
        if not self._num_users[block]:
            del self._num_users[block]
            self._pool.give(block)

    def _drop(self, nodes: Iterable[_Node]) -> None:
        """Frees what these nodes and their descendants use."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            self._release(node.home)

    def _nodes(self) -> Iterator[_Node]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node
