"""The long request of drafts: its bytes, how a server reads and acknowledges it, and when a device does without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.errors import RequestError
from outrider.models.wire.draft_stream import MAX_TREE_BYTES, MessageReader, framed


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=30)
)
def test_messages_survive_however_their_bytes_are_cut(bodies: list[bytes], sizes: list[int]) -> None:
    """Each comes out once, whole and in order; between messages nothing is held."""
    data, reader, found = b"".join(map(framed, bodies)), MessageReader(), list[bytes]()
    at, turn = 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert found == bodies and not reader.is_within


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\x00", "invalid_request"), (b"\x81\x30", "body_too_large"), (b"\xff\xff\xff", "body_too_large")],
)
def test_wrong_lengths_are_refused_at_their_first_bytes(data: bytes, code: str) -> None:
    """None, one more than the most, and a number of more than 14 bits; the most itself is waited for."""
    with pytest.raises(RequestError) as raised:
        MessageReader().feed(data)
    assert raised.value.code == code
    reader = MessageReader()
    assert reader.feed(framed(bytes(MAX_TREE_BYTES))[:-1]) == [] and reader.is_within
