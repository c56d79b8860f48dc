"""Guesses by draft heads: from the hidden state that picked the last committed token, the tokens after it.

A head's logits are picked from with the request's own parameters and noise, so that it agrees with the target as often
as a coupled draft does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.pending.sources import DraftSource, Verified
from outrider.cloud.pending.trie import HEAD_KINDS
from outrider.models.bundle.draft_heads import DraftHeads
from outrider.models.picks.sampling import SamplingParams, pick

_LEVELS: Final = (0.1, 0.25, 0.5, 0.8)
"""A probability above each of these is one kind further."""
assert len(HEAD_KINDS) == len(_LEVELS) + 1


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
