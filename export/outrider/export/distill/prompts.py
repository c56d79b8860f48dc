"""Splits prompts into those to train on, to choose the checkpoint by and to measure with, without overlap.

Prompts stay private: only counts and a hash are recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.export.source.prompts import Ids
from outrider.models.errors import ExportError

LEAST: Final = 4
"""The fewest prompts that any part may have."""

MAX_TEST: Final = 128
MAX_VALIDATION: Final = 64


@dataclass(frozen=True, slots=True)
class Split:
    """Tokenized prompts without duplicates: to train on, to choose the checkpoint by, and to measure with.

    num_cut: prompts of which only the end was kept. num_dropped: duplicates, empty ones, and prompts to train on that
    are held out.
    """

    train: tuple[Ids, ...]
    validation: tuple[Ids, ...]
    test: tuple[Ids, ...]
    num_cut: int
    num_dropped: int

    @property
    def fingerprint(self) -> str:
        """A hash of all three parts."""
        return hashlib.sha256(json.dumps([self.train, self.validation, self.test]).encode()).hexdigest()


def split_prompts(prompts: Sequence[Ids], heldout: float | Sequence[Ids], *, seed: int, max_tokens: int) -> Split:
    """Cuts, removes duplicates and splits; deterministic by `seed`, whatever the order of the prompts.

    heldout: the share to measure with (at least LEAST, at most MAX_TEST prompts), or separate prompts for it. Half as
    many of the others are for validation. Of prompts longer than `max_tokens` the end is kept, which has a chat's last
    turn. Raises ExportError if a part would have fewer than LEAST prompts.
    """
    own, num_cut = _unique(prompts, max_tokens)
    order = sorted(own, key=_rank(seed))
    if isinstance(heldout, float):
        size = min(MAX_TEST, max(LEAST, round(heldout * len(order))))
        share, test, rest = heldout, order[:size], order[size:]
        num_given = len(prompts)
    else:
        unique, more = _unique(heldout, max_tokens)
        test = sorted(unique, key=_rank(seed))[:MAX_TEST]
        # Held-out prompts are never trained on, measured or not.
        rest = [prompt for prompt in order if prompt not in unique]
        share, num_cut, num_given = 0.1, num_cut + more, len(prompts) + len(heldout)
    size = min(MAX_VALIDATION, max(LEAST, round(share / 2 * len(rest))))
    validation, train = rest[:size], rest[size:]
    if len(test) < LEAST or len(train) < LEAST:
        raise ExportError(
            f"of {num_given} prompts, {len(train)} are left to train on, {len(validation)} to choose the checkpoint by "
            f"and {len(test)} to measure with, without duplicates; expected at least {LEAST} of each: give more prompts"
        )
    used = len(train) + len(validation) + len(test)
    return Split(tuple(train), tuple(validation), tuple(test), num_cut, num_given - used)


def _unique(prompts: Sequence[Ids], max_tokens: int) -> tuple[dict[Ids, None], int]:
    """The ends of the prompts, each once, in their order, and how many were cut."""
    num_cut = sum(len(prompt) > max_tokens for prompt in prompts)
    return dict.fromkeys(prompt[-max_tokens:] for prompt in prompts if prompt), num_cut


def _rank(seed: int) -> Callable[[Ids], bytes]:
    return lambda prompt: hashlib.sha256(f"{seed} {prompt}".encode()).digest()
