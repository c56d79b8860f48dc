"""The draft message that carries a tree: its bytes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile_bodies import BROKEN_TREES

from outrider.cloud.api.draft_posts import MAX_TREE_BYTES
from outrider.models.errors import RequestError
from outrider.models.wire.fields import MAX_COUNT
from outrider.models.wire.tree_draft import CHANCES, MAX_MESSAGE_NODES, ROOT, TreeDraft, decode_tree, level_of


@st.composite
def messages(draw: st.DrawFn) -> TreeDraft:
    """Messages with parents in the same and in earlier messages."""
    first = draw(st.integers(0, 1000))
    size = draw(st.integers(0, 20))
    parents = [
        draw(st.one_of(st.just(ROOT), st.integers(0, first + i - 1))) if first + i else ROOT for i in range(size)
    ]
    tokens = draw(st.lists(st.integers(0, MAX_COUNT), min_size=size, max_size=size))
    levels = draw(st.lists(st.integers(0, 15), min_size=size, max_size=size))
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
        assert decode_tree(message.encode()) == message
        assert len(message.encode()) <= len(body)


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


def test_what_no_device_sends_is_refused() -> None:
    """With the reason."""
    for body, reason in BROKEN_TREES:
        with pytest.raises(RequestError, match=reason):
            decode_tree(body)


def test_chances_are_rounded_to_the_nearest_level() -> None:
    """Every chance of the table is its own level; 0 and 1 are its ends."""
    assert [level_of(chance) for chance in CHANCES] == list(range(16))
    assert (level_of(0.0), level_of(1.0), level_of(0.6)) == (0, 15, 10)
