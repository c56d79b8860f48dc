"""Tries, when a model is loaded, whether its rows are the same bits in any company: what `--exact bitwise` promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import SequenceSlice

_TESTED: Final = 8
"""Tokens of the text whose rows are compared."""
_CHUNK: Final = 192
"""Tokens of a step before: few enough for a recorded one."""
_OTHER: Final = 5

Forward = Callable[[Sequence[SequenceSlice]], NDArray[np.float32]]


def blocks_needed(before: int, block_size: int) -> int:
    """Blocks that `other_rows` writes to."""
    return -(-(before + 2 * _TESTED) // block_size) + 1  # a tree has two tokens for each but one


def other_rows(forward: Forward, vocab_size: int, block_size: int, *, before: int, has_trees: bool) -> str | None:
    """In which company a text's rows have other bits than token by token, in words; None: in none.

    forward: as of `BatchRuntime`. before: tokens of the text before those whose rows are compared; one tile of keys is
    too few.
    """
    text = [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, before + _TESTED)]
    *blocks, last = range(blocks_needed(before, block_size))
    other = SequenceSlice(text[:_OTHER], 0, [last], _OTHER)
    for at in range(0, before, _CHUNK):
        forward([SequenceSlice(text[at : min(at + _CHUNK, before)], at, blocks, 0)])
    places = range(before, len(text))
    singly = [forward([SequenceSlice([text[at]], at, blocks, 1)])[0].copy() for at in places]
    rest = SequenceSlice(text[before:], before, blocks, _TESTED)
    companies: dict[str, Callable[[], NDArray[np.float32]]] = {
        "in one step with all before": lambda: forward([SequenceSlice(text, 0, blocks, _TESTED)]),
        "beside another text": lambda: forward([other, rest])[_OTHER:],
    }
    if has_trees:
        companies["in a tree"] = lambda: forward([_in_tree(text, before, blocks, vocab_size), other])[: 2 * _TESTED : 2]
    return next((name for name, rows in companies.items() if not np.array_equal(rows(), singly)), None)


def _in_tree(text: Sequence[int], before: int, blocks: Sequence[int], vocab_size: int) -> SequenceSlice:
    """The tested tokens, with a wrong guess before each but the first: the right ones are at 0, 2, 4 and so on."""
    first, *others = text[before:]
    tokens = [first, *(token for right in others for token in ((right + 1) % vocab_size, right))]
    place = np.arange(len(tokens))
    mask = (place[None, :] < place[:, None]) & (place % 2 == 0)[None, :] | (place[None, :] == place[:, None])
    positions = [before + (index + 1) // 2 for index in range(len(tokens))]
    return SequenceSlice(tokens, before, blocks, len(tokens), positions, mask.astype(np.uint8))
