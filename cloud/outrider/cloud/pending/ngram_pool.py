"""Guesses by lookahead decoding (Fu et al. 2024, arXiv 2402.02057), without any model: n-grams of Jacobi iterations.

A verification step picks a token after each drafted one, rejected ones included. A Jacobi iteration is just that: the
picks after a wrong guess are the next guess of the same places. So no window of extra tokens is run: the pool takes the
pairs and triples (token, token, pick) of every row that a step computes anyway, and a guess chains them. Where the pool
has nothing, the picks after the rejected guess are the guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from outrider.cloud.pending.sources import Verified
from outrider.cloud.pending.trie import POOL_KINDS

_Key = TypeVar("_Key")

MAX_NGRAMS: Final = 4096
"""Pairs, and as many triples, of a sequence: the newest. They take about 1 MB."""
MAX_PATH: Final = 8
"""Tokens of a guess."""


class NgramPool:
    """The n-grams of one sequence. text: its tokens; read, never changed, only grows."""

    kinds = POOL_KINDS
    goes_first = False
    rivals_device = False

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._after_one: dict[int, int] = {}
        self._after_two: dict[tuple[int, int], int] = {}
        self._guess: tuple[int, list[int]] = (0, [])  # tokens of the text that it follows, and the guess

    def learn(self, verified: Verified) -> None:
        """Takes an n-gram of each row, and what the target picked after the rejected guess."""
        text, drafted, picks = verified.text, verified.drafted, verified.picks
        for row, picked in enumerate(picks):
            if picked is None:
                continue
            last, before = _last_two(text, drafted.tokens, drafted.parents, row)
            _remember(self._after_one, last, picked)
            if before is not None:
                _remember(self._after_two, (before, last), picked)
        guess: list[int] = []
        node = _first_child(drafted.parents, verified.last_row - 1)
        while node is not None and len(guess) < MAX_PATH and (picked := picks[node + 1]) is not None:
            guess.append(picked)
            node = _first_child(drafted.parents, node)
        self._guess = (len(text) + len(verified.committed), guess)

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """A chain of n-grams after the last tokens of the text, the longer ones first; else the last picks."""
        text, path, kinds = self._text, list[int](), list[int]()
        if not text:
            return [], []
        before, last = (text[-2] if len(text) > 1 else None), text[-1]
        while len(path) < min(most, MAX_PATH):
            found = self._after_two.get((before, last)) if before is not None else None
            kinds.append(POOL_KINDS[1])
            if found is None:
                found = self._after_one.get(last)
                kinds[-1] = POOL_KINDS[0]
            if found is None:
                kinds.pop()
                break
            path.append(found)
            before, last = last, found
        if not path and self._guess[0] == len(text):
            path = self._guess[1][:most]
            kinds = [POOL_KINDS[2]] * len(path)
        return path, kinds


def _last_two(text: Sequence[int], tokens: Sequence[int], parents: Sequence[int], row: int) -> tuple[int, int | None]:
    """The token that a row is after, and the one before it."""
    if row == 0:
        return text[-1], text[-2] if len(text) > 1 else None
    parent = parents[row - 1]
    return tokens[row - 1], tokens[parent] if parent >= 0 else text[-1]


def _first_child(parents: Sequence[int], node: int) -> int | None:
    return next((child for child in range(node + 1, len(parents)) if parents[child] == node), None)


def _remember(table: dict[_Key, int], key: _Key, token: int) -> None:
    table.pop(key, None)  # so that it is the newest
    table[key] = token
    if len(table) > MAX_NGRAMS:
        del table[next(iter(table))]
