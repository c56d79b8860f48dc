"""Tries, when a model is loaded, whether its rows are the same bits in any company: what `--exact bitwise` promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import SequenceSlice

_BEFORE: Final = 8
_TESTED: Final = 8
"""Tokens of the text whose rows are compared, and those before them."""

Forward = Callable[[Sequence[SequenceSlice]], NDArray[np.float32]]


def other_rows(forward: Forward, vocab_size: int, *, has_trees: bool) -> str | None:
    """In which company a text's rows have other bits than token by token, in words; None: in none.

    forward: as of `BatchRuntime`; writes to its first two blocks, of 32 tokens each at least.
    """
    text = [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, _BEFORE + _TESTED)]
    blocks, other = [0], SequenceSlice(text[::-1][:5], 0, [1], 5)
    singly = [forward([SequenceSlice([token], at, blocks, 1)])[0].copy() for at, token in enumerate(text)][_BEFORE:]
    rest = SequenceSlice(text[_BEFORE:], _BEFORE, blocks, _TESTED)
    companies: dict[str, Callable[[], NDArray[np.float32]]] = {
        "in one step with the tokens before": lambda: forward([SequenceSlice(text, 0, blocks, _TESTED)]),
        "beside another text": lambda: forward([other, rest])[5:],
    }
    if has_trees:
        companies["in a tree"] = lambda: forward([_in_tree(text, blocks, vocab_size), other])[: 2 * _TESTED : 2]
    return next((name for name, rows in companies.items() if not np.array_equal(rows(), singly)), None)


def _in_tree(text: Sequence[int], blocks: Sequence[int], vocab_size: int) -> SequenceSlice:
    """The tested tokens, with a wrong guess before each but the first: the right ones are at 0, 2, 4 and so on."""
    first, *others = text[_BEFORE:]
    tokens = [first, *(token for right in others for token in ((right + 1) % vocab_size, right))]
    place = np.arange(len(tokens))
    mask = (place[None, :] < place[:, None]) & (place % 2 == 0)[None, :] | (place[None, :] == place[:, None])
    positions = [_BEFORE + (index + 1) // 2 for index in range(len(tokens))]
    return SequenceSlice(tokens, _BEFORE, blocks, len(tokens), positions, mask.astype(np.uint8))
