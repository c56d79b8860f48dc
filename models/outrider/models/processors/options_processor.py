"""Applies a request's options to its rows: penalties, bias, forbidden and allowed ids.

A row changes in this order, in float32, and every constant is rounded to float32 first:

| step | what | as in |
|---|---|---|
| 1 | x + bias, for ids with a bias | OpenAI; vLLM |
| 2 | x * repetition where x < 0, else x / repetition, for ids in prompt or text | transformers; CTRL |
| 3 | (x - frequency * count) - presence, for ids in the text | OpenAI; vLLM |
| 4 | -inf for ids that are not allowed | vLLM |
| 5 | -inf for the last token of a bad word where the text ends with those before it | vLLM |
| 6 | -inf for stop ids while the text is shorter than min_tokens | vLLM; transformers' MinNewTokensLength |

Bad words are matched in the text only, as in vLLM: the prompt's end is no part of a match. Where 5 and 6 forbid every
id that is left, 6 is dropped, and where that is not enough, 5: a text must go on. Where the model itself masks all
allowed ids, they are equally likely.

A row costs O(distinct tokens of prompt and text + ids in the options), and a few passes over the row where ids are
masked; at most 256 bad words are compared, 31 tokens each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.models.processors.options import ProcessorOptions

_FIRST_ROOM: Final = 64
_Ids = NDArray[np.intp]
_Entry = TypeVar("_Entry", np.intp, np.float32)


class _Fixed:
    """What does not change along a text. Ids that the row does not have are left out."""

    def __init__(
        self, processors: ProcessorOptions, prompt: Sequence[int], vocab_size: int, stop_ids: Collection[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.is_counted = processors.penalizes
        self.repetition = np.float32(processors.repetition_penalty)
        self.frequency = np.float32(processors.frequency_penalty)
        self.presence = np.float32(processors.presence_penalty)
        repeats = processors.repetition_penalty != 1.0
        self.prompt = frozenset(prompt) if repeats else frozenset()
        self.prompt_ids = self._known(self.prompt)
        biases = [(token, addend) for token, addend in processors.logit_bias if token < vocab_size]
        self.biased = self._known([token for token, _ in biases])
        self.biases = np.array([addend for _, addend in biases], dtype=np.float32)
        self.allowed = None if processors.allowed_ids is None else self._known(frozenset(processors.allowed_ids))
        # Words of several tokens, by the last one before the forbidden one.
        self.words: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in processors.bad_words:
            if len(word) > 1 and word[-1] < vocab_size:
                self.words[word[-2]].append((list(word[:-1]), word[-1]))
        self.bad_ids = sorted({word[0] for word in processors.bad_words if len(word) == 1 and word[0] < vocab_size})
        self.min_tokens = processors.min_tokens
        self.stop_ids = self._known(stop_ids if processors.min_tokens else ())

    def _known(self, tokens: Collection[int]) -> _Ids:
        ids = np.fromiter(tokens, dtype=np.intp, count=len(tokens))
        return ids[ids < self.vocab_size]


class OptionsProcessor:
    """A request's `LogitProcessor`. `advance` is O(1), `truncate` O(tokens dropped)."""

    def __init__(
        self, processors: ProcessorOptions, prompt: Sequence[int], vocab_size: int, stop_ids: Collection[int] = ()
    ) -> None:
        """vocab_size: of the rows. Ids beyond it change nothing: a draft's rows may be shorter."""
        self._fixed = _Fixed(processors, prompt, vocab_size, stop_ids)
        self._text: list[int] = []
        # Distinct ids of the text, in the order of their first occurrence, and how often each occurs.
        self._slots: dict[int, int] = {}
        self._ids: _Ids = np.empty(_FIRST_ROOM, dtype=np.intp)
        self._counts = np.zeros(_FIRST_ROOM, dtype=np.float32)  # exact up to 2^24
        # Those of them that the prompt does not have.
        self._new_ids: _Ids = np.empty(_FIRST_ROOM, dtype=np.intp)
        self._num_new = 0

    @property
    def length(self) -> int:
        """Tokens of the text that it has seen."""
        return len(self._text)

    def advance(self, token: int) -> None:
        """Goes on by a token of the text."""
        self._text.append(token)
        if not self._fixed.is_counted or token >= self._fixed.vocab_size:
            return
        slot = self._slots.get(token)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._ids):
                self._ids, self._new_ids = _doubled(self._ids), _doubled(self._new_ids)
                self._counts = _doubled(self._counts)
            self._slots[token], self._ids[slot], self._counts[slot] = slot, token, 0.0
            if token not in self._fixed.prompt:
                self._new_ids[self._num_new] = token
                self._num_new += 1
        self._counts[slot] += 1.0

    def truncate(self, length: int) -> None:
        """Goes back to its first `length` tokens."""
        while len(self._text) > length:
            token = self._text.pop()
            slot = self._slots.get(token)
            if slot is None:
                continue
            self._counts[slot] -= 1.0
            if self._counts[slot] == 0.0:
                # Its first occurrence goes, so every id that came later is gone: it has the last slot.
                del self._slots[token]
                if self._num_new and self._new_ids[self._num_new - 1] == token:
                    self._num_new -= 1

    def apply(self, row: NDArray[np.float32]) -> None:
        """Changes the row of the token after those seen, [vocab_size] float32, in place."""
        fixed = self._fixed
        if fixed.biased.size:
            row[fixed.biased] += fixed.biases
        if fixed.repetition != 1.0:
            for ids in (fixed.prompt_ids, self._new_ids[: self._num_new]):
                found = row[ids]
                row[ids] = np.where(found < 0.0, found * fixed.repetition, found / fixed.repetition)
        if fixed.frequency != 0.0 or fixed.presence != 0.0:
            ids = self._ids[: len(self._slots)]
            row[ids] -= fixed.frequency * self._counts[: ids.size]
            row[ids] -= fixed.presence
        if fixed.allowed is not None and fixed.allowed.size:
            kept = row[fixed.allowed]
            if not np.isfinite(kept.max()):
                kept = np.zeros_like(kept)
            row.fill(-np.inf)
            row[fixed.allowed] = kept
        self._forbid(row)

    def _forbid(self, row: NDArray[np.float32]) -> None:
        """Steps 5 and 6."""
        fixed = self._fixed
        bad = fixed.bad_ids
        if fixed.words and self._text:
            text = self._text
            bad = [
                *bad,
                *(last for before, last in fixed.words.get(text[-1], ()) if text[-len(before) :] == before),
            ]
        undo: list[tuple[_Ids, NDArray[np.float32]]] = []
        stops = fixed.stop_ids if len(self._text) < fixed.min_tokens else fixed.stop_ids[:0]
        for ids in (np.array(bad, dtype=np.intp), stops):
            if ids.size:
                undo.append((ids, row[ids]))
                row[ids] = -np.inf
        while undo and not np.isfinite(row.max()):
            ids, values = undo.pop()
            row[ids] = values


def _doubled(entries: NDArray[_Entry]) -> NDArray[_Entry]:
    return np.concatenate([entries, np.empty_like(entries)])
