"""Tests the form of trees without an engine: depths, masks, and the acceptance of a branch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cloud.engine.runner import depths, tree_mask
from outrider.models.errors import ModelFault
from outrider.models.picks.acceptance import AcceptedBranch, accept_tree, accept_tree_picks
from outrider.models.picks.sampling import SamplingParams, pick

VOCAB = 4
HOT = SamplingParams(temperature=0.8, seed=5)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree in which siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    for index in range(draw(st.integers(0, 8))):
        parent, token = draw(st.integers(-1, index - 1)), draw(st.integers(0, VOCAB - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(min(parent, len(tokens) - 2))
    pairs = list(zip(parents, tokens, strict=True))
    return (tokens, parents) if len(set(pairs)) == len(pairs) else ([], [])


def path_of(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to `node`."""
    return [*path_of(parents[node], parents), node] if node >= 0 else []


@given(trees(), st.integers(1, 4))
def test_mask_and_depths_are_those_of_the_paths(tree: tuple[list[int], list[int]], num_before: int) -> None:
    """A drafted token attends the tokens before the tree and its own path, nothing else."""
    _, parents = tree
    mask = tree_mask(parents, num_before)
    size = num_before + len(parents)
    assert mask.shape == (size, size) and mask.dtype == np.uint8
    for i in range(num_before):
        assert np.flatnonzero(mask[i]).tolist() == list(range(i + 1))
    for node, depth in enumerate(depths(parents)):
        path = path_of(node, parents)
        assert depth == len(path)
        expected = [*range(num_before), *(num_before + each for each in path)]
        assert np.flatnonzero(mask[num_before + node]).tolist() == expected


@given(
    tree=trees(),
    seed=st.integers(0, 1000),
    params=st.sampled_from([SamplingParams(), HOT]),
    stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
    most=st.one_of(st.none(), st.integers(1, 4)),
)
def test_a_tree_is_accepted_as_the_longest_of_its_paths(
    tree: tuple[list[int], list[int]],
    seed: int,
    params: SamplingParams,
    stops: frozenset[int],
    most: int | None,
) -> None:
    """Brute force: each path alone, as a line; the longest result is the tree's, from logits and from picks."""
    tokens, parents = tree
    logits = np.random.default_rng(seed).normal(size=(1 + len(tokens), VOCAB)).astype(np.float32)
    best = accept_tree(logits[:1], [], [], params, 9, stop_ids=stops, max_tokens=most)
    for node in range(len(tokens)):
        path = path_of(node, parents)
        rows, line = logits[[0, *(each + 1 for each in path)]], range(-1, len(path) - 1)
        drafted = [tokens[each] for each in path]
        found = accept_tree(rows, drafted, line, params, 9, stop_ids=stops, max_tokens=most).tokens
        if len(found) > len(best.tokens):
            best = AcceptedBranch(found, path[: len(found) - 1])
    assert accept_tree(logits, tokens, parents, params, 9, stop_ids=stops, max_tokens=most) == best
    positions = [9, *(9 + depth for depth in depths(parents))]
    picks = [pick(row, params, at) for row, at in zip(logits, positions, strict=True)]
    assert accept_tree_picks(picks, tokens, parents, stop_ids=stops, max_tokens=most) == best


def test_only_reached_rows_matter() -> None:
    """A row that is not finite is a fault where the walk reaches it, and nothing elsewhere."""
    logits = np.eye(VOCAB, dtype=np.float32)[[2, 1, 3]]  # picks 2; after node 0: 1; after node 1: 3
    logits[1] = np.nan
    tokens, parents = [0, 2], [-1, -1]
    assert accept_tree(logits, tokens, parents, SamplingParams(), 5) == AcceptedBranch([2, 3], [1])
    assert accept_tree_picks([2, None, 3], tokens, parents) == AcceptedBranch([2, 3], [1])
    logits[2] = np.nan
    with pytest.raises(ModelFault, match="not finite"):
        accept_tree(logits, tokens, parents, SamplingParams(), 5)
    with pytest.raises(ModelFault, match="not finite"):
        accept_tree_picks([2, 1, None], tokens, parents)
