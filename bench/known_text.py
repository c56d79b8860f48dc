"""A text in which each token has one successor, and trees of drafts for it: for models whose picks are looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from outrider.models.wire.tree_draft import ROOT, level_of

VOCAB_SIZE: Final = 4096
SUCCESSOR: Final = [(token * 1597 + 51749) % VOCAB_SIZE for token in range(VOCAB_SIZE)]
"""By an LCG of full period."""
LIKELY: Final = level_of(0.78)
_UNLIKELY: Final = level_of(0.07)
_LEVELS: Final = 8


def nodes_after(
    token: int, alternatives: int, right_rank: Callable[[int], int] = lambda token: 0
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and levels of a tree behind a last token: 8 positions, at each a likeliest guess and so many
    alternatives. parents: places in the tree. right_rank: of the right guess after a token; the tree goes on below it.
    """
    tokens, parents, levels = list[int](), list[int](), list[int]()
    parent = ROOT
    for _ in range(_LEVELS):
        right, above = SUCCESSOR[token], parent
        for rank in range(1 + alternatives):
            is_right = rank == right_rank(token)
            parent = len(tokens) if is_right else parent
            tokens.append(right if is_right else (right + 1 + rank) % VOCAB_SIZE)
            parents.append(above)
            levels.append(_UNLIKELY if rank else LIKELY)
        token = right
    return tokens, parents, levels
