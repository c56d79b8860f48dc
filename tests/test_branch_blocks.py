"""Tests which blocks and slots branches get, on a cache of token ids: what a run reads is its own text."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.runtimes.branch_blocks import BranchBlocks, BranchRun
from outrider.models.runtimes.onnxruntime_branches import BranchNodes

SIZE = 4
LONGEST = 48
VOCAB = 3  # so small that random branches share beginnings


class Cache:
    """A cache whose keys and values are the tokens themselves, driven as the runtime drives its model."""

    def __init__(self, num_spare: int, num_tokens: int = 0, *, copies: bool = True) -> None:
        self.blocks = BranchBlocks(LONGEST // SIZE + num_spare, SIZE, LONGEST, copies=copies)
        self.slots = np.full((self.blocks.num_blocks, SIZE), -1)
        self.text: list[int] = []
        self.num_run = self.num_rounds = self.num_copies = 0
        if num_tokens:
            self.extend([0] * num_tokens)

    def extend(self, tokens: list[int]) -> int:
        """The number of tokens that were run."""
        before, num_kept = self.num_run, self.blocks.extend(tokens)
        assert num_kept < len(tokens)
        past = len(self.text) + num_kept
        self.text += tokens
        self.step([(BranchRun(tokens[num_kept:], past, self.blocks.table.tolist(), None), self.text)])
        return self.num_run - before

    def truncate(self, length: int) -> None:
        self.blocks.truncate(length)
        del self.text[length:]

    def branches(self, *branches: list[int]) -> int:
        """The number of tokens that were run."""
        before, waiting = self.num_run, list(branches)
        while waiting:
            self.blocks.next_round()
            runs, later = [], []
            for branch in waiting:
                run = self.blocks.plan(branch)
                if run is None:
                    later.append(branch)
                    continue
                if run.copy:
                    self.num_copies += 1
                    self.slots[run.copy[1]] = self.slots[run.copy[0]]
                runs.append((run, self.text + branch))
            assert runs, "the first of a round never waits"
            self.step(runs)
            waiting = later
        return self.num_run - before

    def step(self, runs: list[tuple[BranchRun, list[int]]]) -> None:
        """Writes all new tokens, then checks what each run reads."""
        self.num_rounds += 1
        written: dict[tuple[int, int], int] = {}
        for run, text in runs:
            self.num_run += len(run.tokens)
            assert run.past + len(run.tokens) == len(text)
            for position, token in enumerate(run.tokens, run.past):
                slot = run.blocks[position // SIZE], position % SIZE
                assert written.setdefault(slot, token) == token, "two runs write different tokens to one slot"
                self.slots[slot] = token
        for run, text in runs:
            assert self.slots[run.blocks[: -(-len(text) // SIZE)]].reshape(-1)[: len(text)].tolist() == text

    def num_used(self) -> int:
        return self.blocks.num_blocks - self.blocks.num_free


@pytest.mark.parametrize("copies", [True, False])
@given(seed=st.integers(0, 100_000))
def test_every_run_reads_its_own_text(copies: bool, seed: int) -> None:
    """Random trees, commits along and across branches, rollbacks, few blocks: no run reads another's token, and at the
    end all blocks are free.
    """
    rng = random.Random(seed)
    cache = Cache(rng.choice([3, 5, 40]), copies=copies)
    known: list[list[int]] = []

    def tokens(most: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(1, most))]

    for _ in range(rng.randint(1, 25)):
        room = LONGEST - len(cache.text)
        action = rng.random()
        if action < 0.6 and room:
            new = []
            for _ in range(rng.randint(1, 5)):
                base = rng.choice(known)[: rng.randint(0, 60)] if known and rng.random() < 0.8 else []
                new.append((base + tokens(rng.choice([1, 1, 6, 60])))[: rng.randint(1, room)])
            cache.branches(*new)
            known += new
        elif action < 0.9 and room:
            added = ((rng.choice(known) if known and rng.random() < 0.7 else []) + tokens(3))[: rng.randint(1, room)]
            cache.extend(added)
            known = [b[len(added) :] for b in known if b[: len(added)] == added and len(b) > len(added)]
        elif action < 0.95:
            cache.branches(*[cache.text[:1]] * room) if room and cache.text and room < 6 else None
        else:
            length = rng.randint(0, len(cache.text))
            if length < len(cache.text):
                known = []
            cache.truncate(length)
        if not cache.blocks.num_nodes:
            assert cache.num_used() == -(-len(cache.text) // SIZE)
    cache.blocks.forget_branches()
    assert cache.blocks.num_nodes == 0 and cache.num_used() == -(-len(cache.text) // SIZE)
    cache.truncate(0)
    assert cache.num_used() == 0


def test_a_kept_branch_costs_only_its_new_tokens() -> None:
    """A branch that goes on from one of an earlier call runs one token; a fork in its block adds one copy, no token."""
    cache = Cache(40, 6)
    cache.branches([1, 2, 0, 1, 2])
    # [1, 2, 1] begins a block, [..., 2] forks one
    assert cache.branches([1, 2, 0, 1, 2, 0], [1, 2, 1], [1, 2, 0, 2]) == 3 and cache.num_copies == 1
    assert cache.branches([1, 2, 0, 1, 2, 0]) == 1  # its logits again


def test_without_copies_the_block_of_a_fork_runs_again() -> None:
    """The tokens of the block, the sequence's own included, are computed into the branch's own block."""
    cache = Cache(40, 6, copies=False)
    cache.branches([1])
    assert cache.branches([2]) == 3 and cache.num_copies == 0


def test_a_commit_along_a_branch_runs_one_token_and_keeps_what_follows() -> None:
    """Kept tokens become the sequence's; branches below the new end stay; the others' blocks are free again."""
    cache = Cache(40, 6)
    cache.branches([1, 2, 0], [2, 2, 0, 1, 1], [2, 2, 1], [0, 0, 0, 0, 0])
    assert cache.extend([2, 2]) == 1 and (cache.blocks.num_nodes, cache.num_used()) == (4, 2 + 2)
    assert cache.branches([0, 1, 1, 2]) == 1
    # Partly along, then away.
    assert cache.extend([0, 2]) == 1 and (cache.blocks.num_nodes, cache.num_used()) == (0, 3)


def test_branches_of_one_call_that_need_each_other_run_in_turn() -> None:
    """A branch that goes on from a token of the same call waits for a second step; others do not."""
    cache = Cache(40, 3)
    assert cache.branches([1], [1, 2], [2]) == 3 and cache.num_rounds == 1 + 2


def test_the_branch_used_longest_ago_is_forgotten_first() -> None:
    """With few blocks left a call takes those of old branches; the recently used one still costs one token."""
    cache = Cache(3, 34)  # 9 of 15 blocks
    # [1, 1] is used again: [2, 2] is then the oldest
    for branch in ([1, 1], [2, 2], [0, 0], [1, 2], [2, 1], [1, 1, 1], [0, 1], [0, 2]):
        cache.branches(branch)
    assert cache.branches([1, 1, 1, 0]) == 1 and cache.branches([2, 2, 0]) > 1


def test_no_room_for_a_branch_in_this_round_makes_it_wait() -> None:
    """Branches that do not fit together run one after the other, each as long as the sequence may be."""
    cache = Cache(3, 6)
    num_run = cache.branches(*([token] * (LONGEST - 6) for token in range(VOCAB)))
    assert (num_run, cache.num_rounds) == (3 * (LONGEST - 6), 1 + 3)


def test_the_nodes_used_longest_ago_are_forgotten_first() -> None:
    """Beyond the limit the oldest leaves go; following a branch leaves what goes on from its end."""
    nodes = BranchNodes(6)

    def grow(*branches: list[int]) -> None:
        for branch in branches:
            nodes.next_call()
            path = nodes.path(branch)
            for token in branch[len(path) :]:
                path.append(nodes.add(path[-1] if path else None, token))

    grow([1, 2, 3], [1, 2, 4], [5, 6])
    assert len(list(nodes)) == 6
    kept = nodes.path([1, 2, 4])
    grow([7], [8])  # 7 nodes before: the leaf of [1, 2, 3] was used longest ago
    assert [len(nodes.path(branch)) for branch in ([1, 2, 3], [5, 6])] == [2, 2]
    assert nodes.follow([1, 2]) == kept[:2] and list(nodes) == kept[2:] and nodes.path([4, 9]) == kept[2:]
    assert nodes.follow([3]) == [] and not nodes
