"""Puts a grammar between a row of logits and the pick: the `LogitProcessor` of a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import RequestError
from outrider.models.grammar.state import GrammarState


class GrammarRows:
    """Masks rows with a `GrammarState`. Comes before logit processors, which forbid ids among those that are left."""

    __slots__ = ("state",)

    def __init__(self, state: GrammarState) -> None:
        self.state = state

    @property
    def length(self) -> int:
        """Tokens of the text that it has seen."""
        return self.state.length

    def apply(self, row: NDArray[np.float32]) -> None:
        """Masks the row in place; raises RequestError as `GrammarState.mask`."""
        self.state.mask(row)

    def advance(self, token: int) -> None:
        """Goes on by a token; raises RequestError `grammar_too_complex`, or `grammar_excluded` for one outside."""
        if not self.state.advance(token):
            raise RequestError(
                "grammar_excluded",
                f"token {token} after {self.length} tokens of text is outside the grammar; compare the "
                "text and the request's logit processors with it",
            )

    def truncate(self, length: int) -> None:
        """Goes back to its first `length` tokens."""
        self.state.truncate(length)

    def replay(self, tokens: Sequence[int]) -> None:
        """Goes on by the tokens of a text that is resumed; raises RequestError as `advance`."""
        with self.state.cost.replaying():
            for token in tokens:
                self.advance(token)

    def fork(self) -> GrammarRows:
        """A second state at the same place."""
        return GrammarRows(self.state.fork())
