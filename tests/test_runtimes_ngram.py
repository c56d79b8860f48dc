"""Compares prompt lookup with a version that searches the whole sequence each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.errors import ConfigError
from outrider.models.runtimes.ngram import NgramLookup


def searched(tokens: list[int], max_n: int, min_n: int, max_tokens: int) -> list[int]:
    """Longest suffix first, latest earlier occurrence first; copies token by token, through its own output."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                text = list(tokens)
                while len(text) < len(tokens) + max_tokens:
                    text.append(text[len(text) - len(tokens) + end])
                return text[len(tokens) :]
    return []


# Grow by these tokens, or (an int) cut to this share of the length in percent.
steps = st.lists(st.one_of(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 100)), max_size=12)


@given(steps=steps, sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), max_tokens=st.integers(0, 9))
def test_equals_a_search_whatever_was_appended_and_cut(
    steps: list[list[int] | int], sizes: tuple[int, int], max_tokens: int
) -> None:
    """After any series of extensions and truncations the index gives the same as a search of the text."""
    min_n, max_n = sorted(sizes)
    lookup = NgramLookup(max_n=max_n, min_n=min_n)
    tokens: list[int] = []
    for step in steps:
        if isinstance(step, int):
            tokens = tokens[: len(tokens) * step // 100]
            lookup.truncate(len(tokens))
        else:
            tokens = tokens + step
            lookup.extend(step)
        assert lookup.length == len(tokens)
        assert lookup.match(max_tokens)[1] == searched(tokens, max_n, min_n, max_tokens)


def test_the_longest_suffix_wins_and_then_the_latest() -> None:
    """[1, 2, 3] occurred once, [2, 3] twice: the longer match is copied; with equal lengths, the later one."""
    lookup = NgramLookup(max_n=3, min_n=2)
    lookup.extend([1, 2, 3, 10, 11, 9, 2, 3, 20, 1, 2, 3])
    assert lookup.match(2)[1] == [10, 11]
    lookup.extend([20, 1])
    assert lookup.match(3)[1] == [2, 3, 20]
    lookup.extend([7, 8])
    assert lookup.match(3)[1] == []


def test_a_loop_is_proposed_as_a_loop() -> None:
    """The copy reads its own output when it reaches the end."""
    lookup = NgramLookup(max_n=2, min_n=2)
    lookup.extend([4, 5, 4, 5])
    assert lookup.match(5)[1] == [4, 5, 4, 5, 4]


@pytest.mark.parametrize(("max_n", "min_n"), [(2, 3), (2, 0), (0, 0)])
def test_sizes_are_checked(max_n: int, min_n: int) -> None:
    """Impossible suffix lengths are refused."""
    with pytest.raises(ConfigError, match=f"min_n is {min_n} and max_n {max_n}"):
        NgramLookup(max_n=max_n, min_n=min_n)
