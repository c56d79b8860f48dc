"""Tests trees without an engine: depths, masks, the acceptance of a branch, and the draft message that carries one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile_bodies import BROKEN_TREES

from outrider.cloud.api.draft_posts import MAX_TREE_BYTES
from outrider.cloud.engine.runner import depths, tree_mask
from outrider.models.errors import ModelFault, RequestError
from outrider.models.picks.acceptance import AcceptedBranch, accept_tree, accept_tree_picks
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.wire.fields import MAX_COUNT
from outrider.models.wire.tree_draft import CHANCES, MAX_MESSAGE_NODES, ROOT, TreeDraft, decode_tree, level_of

VOCAB = 4
HOT = SamplingParams(temperature=0.8, seed=5)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree in which siblings differ."""
    nodes: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 8))):
        node = draw(st.integers(-1, len(nodes) - 1)), draw(st.integers(0, VOCAB - 1))
        if node not in nodes:
            nodes.append(node)
    return [token for _, token in nodes], [parent for parent, _ in nodes]


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
        expected = [*range(num_before), *(num_before + each for each in path)]
        assert depth == len(path) and np.flatnonzero(mask[num_before + node]).tolist() == expected


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


@st.composite
def messages(draw: st.DrawFn) -> TreeDraft:
    """Messages with parents in the same and in earlier messages."""
    first, size = draw(st.integers(0, 1000)), draw(st.integers(0, 20))
    parents = [
        draw(st.one_of(st.just(ROOT), st.integers(0, first + i - 1))) if first + i else ROOT for i in range(size)
    ]
    tokens, levels = (draw(st.lists(st.integers(0, most), min_size=size, max_size=size)) for most in (MAX_COUNT, 15))
    return TreeDraft(draw(st.integers(0, MAX_COUNT)), first, tokens, parents, levels, draw(st.booleans()))


@given(messages())
def test_a_message_survives_its_encoding(message: TreeDraft) -> None:
    """decode(encode(x)) == x."""
    assert decode_tree(message.encode()) == message


@given(st.binary(max_size=40))
def test_any_bytes_are_a_message_or_refused(body: bytes) -> None:
    """No other error; what is accepted encodes to as few bytes or fewer."""
    try:
        message = decode_tree(body)
    except RequestError as error:
        assert error.code == "invalid_request"
    else:
        assert decode_tree(message.encode()) == message and len(message.encode()) <= len(body)


def test_the_bytes_of_a_small_tree() -> None:
    """The example of docs/protocol.md: three bytes a node."""
    tree = TreeDraft(17, 40, [812, 331, 90, 5], [ROOT, 40, 40, ROOT], [13, 10, 7, 5])
    assert tree.encode().hex(" ") == "11 28 d0 ac 06 a1 cb 02 72 5a 50 05"
    assert replace(tree, is_turn=True).encode().hex(" ") == "11 28 d0 ac 06 a1 cb 02 72 5a 50 05 0f 00"
    # A parent 15 numbers before, and the token 0, look the same at the end.
    assert decode_tree(TreeDraft(0, 20, [0], [5], [0]).encode()) == TreeDraft(0, 20, [0], [5], [0])


def test_the_longest_message_is_taken() -> None:
    """Under the route's limit."""
    size, last = MAX_MESSAGE_NODES, MAX_COUNT
    longest = TreeDraft(last, last, [last] * size, [0] * size, [15] * size)
    with pytest.raises(RequestError, match="expected at most"):  # a distance has 31 bits too
        decode_tree(longest.encode())
    longest = TreeDraft(last, last - size, [last] * size, [0] * size, [15] * size)
    assert decode_tree(longest.encode()) == longest and len(longest.encode()) <= MAX_TREE_BYTES


@pytest.mark.parametrize(("body", "reason"), BROKEN_TREES)
def test_what_no_device_sends_is_refused(body: bytes, reason: str) -> None:
    """With the reason."""
    with pytest.raises(RequestError, match=reason):
        decode_tree(body)


def test_chances_are_rounded_to_the_nearest_level() -> None:
    """Every chance of the table is its own level; 0 and 1 are its ends."""
    assert [level_of(chance) for chance in CHANCES] == list(range(16))
    assert (level_of(0.0), level_of(1.0), level_of(0.6)) == (0, 15, 10)
