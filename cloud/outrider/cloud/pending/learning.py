"""Guesses that learn from each pass: by a pool of n-grams, and by draft heads.

The pool is lookahead decoding (Fu et al. 2024, arXiv 2402.02057) without any model: n-grams of Jacobi iterations. A
verification step picks a token after each drafted one, rejected ones included. A Jacobi iteration is just that: the
picks after a wrong guess are the next guess of the same places. So no window of extra tokens is run: the pool takes the
pairs and triples (token, token, pick) of every row that a step computes anyway, and a guess chains them. Where the pool
has nothing, the picks after the rejected guess are the guess.

Draft heads guess from the hidden state that picked the last committed token the tokens after it. A head's logits are
picked from with the request's own parameters and noise, so that it agrees with the target as often as a coupled draft
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.pending.sources import DraftSource, Verified
from outrider.cloud.pending.trie import HEAD_KINDS, POOL_KINDS
from outrider.models.bundle.draft_heads import DraftHeads
from outrider.models.picks.sampling import SamplingParams, pick

MAX_NGRAMS: Final = 8192
"""Pairs and triples of a sequence: the newest. They take about 1 MB."""
MAX_PATH: Final = 8
"""Tokens of a guess."""
_LEVELS: Final = (0.1, 0.25, 0.5, 0.8)
"""A probability above each of these is one kind further."""
assert len(HEAD_KINDS) == len(_LEVELS) + 1


class NgramPool(DraftSource):
    """The n-grams of one sequence. text: its tokens; read, never changed, only grows."""

    kinds = POOL_KINDS

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._after: dict[tuple[int, ...], int] = {}  # what followed one token, and two
        self._guess: tuple[int, list[int]] = (0, [])  # tokens of the text that it follows, and the guess

    def learn(self, verified: Verified) -> None:
        """Takes an n-gram of each row, and what the target picked after the rejected guess."""
        text, drafted, picks = verified.text, verified.drafted, verified.picks
        for row, picked in enumerate(picks):
            if picked is not None:
                last_two = _last_two(text, drafted.tokens, drafted.parents, row)
                self._remember(last_two[-1:], picked)
                self._remember(last_two, picked)
        guess: list[int] = []
        node = _first_child(drafted.parents, verified.last_row - 1)
        while node is not None and len(guess) < MAX_PATH and (picked := picks[node + 1]) is not None:
            guess.append(picked)
            node = _first_child(drafted.parents, node)
        self._guess = (len(text) + len(verified.committed), guess)

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """A chain of n-grams after the last tokens of the text, the longer ones first; else the last picks."""
        path, kinds = list[int](), list[int]()
        last_two = tuple(self._text[-2:])
        while len(path) < min(most, MAX_PATH):
            known = [ngram for ngram in (last_two, last_two[-1:]) if ngram in self._after]
            if not known:
                break
            path.append(self._after[known[0]])
            kinds.append(POOL_KINDS[len(known[0]) - 1])
            last_two = last_two[-1], path[-1]
        if not path and self._guess[0] == len(self._text):
            path = self._guess[1][:most]
            kinds = [POOL_KINDS[2]] * len(path)
        return path, kinds

    def _remember(self, ngram: tuple[int, ...], token: int) -> None:
        self._after.pop(ngram, None)  # so that it is the newest
        self._after[ngram] = token
        if len(self._after) > MAX_NGRAMS:
            del self._after[next(iter(self._after))]


def _last_two(text: Sequence[int], tokens: Sequence[int], parents: Sequence[int], row: int) -> tuple[int, ...]:
    """The token that a row is after, behind the one before it."""
    if row == 0:
        return tuple(text[-2:])
    parent = parents[row - 1]
    return tokens[parent] if parent >= 0 else text[-1], tokens[row - 1]


def _first_child(parents: Sequence[int], node: int) -> int | None:
    return next((child for child in range(node + 1, len(parents)) if parents[child] == node), None)


class HeadGuesses(DraftSource):
    """The heads' guesses for one sequence. text: its tokens; read, never changed, only grows."""

    kinds = HEAD_KINDS

    def __init__(self, heads: DraftHeads, params: SamplingParams, text: Sequence[int]) -> None:
        self._heads = heads
        self._params = params
        self._text = text
        self._hidden: NDArray[np.float32] | None = None
        self._length = -1  # of the text that the hidden state belongs to

    def learn(self, verified: Verified) -> None:
        """Keeps the hidden state that picked the last committed token."""
        if verified.hidden is None:
            return
        self._hidden = verified.hidden[verified.last_row].astype(np.float32)  # a copy
        self._length = len(verified.text) + len(verified.committed)

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """One token of each head, in order, as far as the hidden state is the present one and finite."""
        length = len(self._text)
        if self._hidden is None or self._length != length or most <= 0:
            return [], []
        rows = self._heads.logits(self._hidden)[:most]
        if not np.isfinite(rows).all():
            return [], []
        temperature = self._params.temperature or 1.0
        shifted = (rows - rows.max(axis=1, keepdims=True)) / temperature
        norms = np.exp(shifted).sum(axis=1)
        tokens = [pick(row, self._params, length + index) for index, row in enumerate(rows)]
        chances = [float(np.exp(shifted[index, token]) / norms[index]) for index, token in enumerate(tokens)]
        return tokens, [HEAD_KINDS[sum(chance > level for level in _LEVELS)] for chance in chances]
