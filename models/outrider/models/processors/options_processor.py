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
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.processors.options import ProcessorOptions

_ROOM: Final = 64
_Ids = NDArray[np.intp]


class OptionsProcessor:
    """A request's `LogitProcessor`. `advance` is O(1), `truncate` O(tokens dropped)."""

    def __init__(
        self, processors: ProcessorOptions, prompt: Sequence[int], vocab_size: int, stop_ids: Collection[int] = ()
    ) -> None:
        """vocab_size: of the rows. Ids beyond it change nothing: a draft's rows may be shorter."""
        self._vocab_size = vocab_size
        self._is_counted = processors.penalizes
        self._repetition = np.float32(processors.repetition_penalty)
        self._frequency = np.float32(processors.frequency_penalty)
        self._presence = np.float32(processors.presence_penalty)
        biases = [(token, addend) for token, addend in processors.logit_bias if token < vocab_size]
        self._biased = self._known([token for token, _ in biases])
        self._biases = np.array([addend for _, addend in biases], dtype=np.float32)
        self._allowed = None if processors.allowed_ids is None else self._known(frozenset(processors.allowed_ids))
        # Words of several tokens, by the last one before the forbidden one.
        self._words: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in processors.bad_words:
            if len(word) > 1 and word[-1] < vocab_size:
                self._words[word[-2]].append((list(word[:-1]), word[-1]))
        self._bad_ids = sorted({word[0] for word in processors.bad_words if len(word) == 1 and word[0] < vocab_size})
        self._min_tokens = processors.min_tokens
        self._stop_ids = self._known(stop_ids if processors.min_tokens else ())
        self._text: list[int] = []
        # Distinct ids, in the order of their first occurrence, and how often each occurs in the text: the prompt's,
        # where they count, and behind them those that only the text has.
        repeated = self._known(dict.fromkeys(prompt if self._repetition != 1.0 else ()))
        self._slots: dict[int, int] = {token: slot for slot, token in enumerate(repeated.tolist())}
        self._num_prompt = repeated.size
        self._ids: _Ids = np.concatenate([repeated, np.zeros(_ROOM, dtype=np.intp)])
        self._counts = np.zeros(self._ids.size, dtype=np.float32)  # exact up to 2^24

    def _known(self, tokens: Collection[int]) -> _Ids:
        ids = np.fromiter(tokens, dtype=np.intp, count=len(tokens))
        return ids[ids < self._vocab_size]

    @property
    def length(self) -> int:
        """Tokens of the text that it has seen."""
        return len(self._text)

    def advance(self, token: int) -> None:
        """Goes on by a token of the text."""
        self._text.append(token)
        if not self._is_counted or token >= self._vocab_size:
            return
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1.0

    def truncate(self, length: int) -> None:
        """Goes back to its first `length` tokens."""
        while len(self._text) > length:
            token = self._text.pop()
            slot = self._slots.get(token)
            if slot is None:
                continue
            self._counts[slot] -= 1.0
            if self._counts[slot] == 0.0 and slot >= self._num_prompt:
                # Its first occurrence goes, so every id that came later is gone: it has the last slot.
                del self._slots[token]

    def apply(self, row: NDArray[np.float32]) -> None:
        """Changes the row of the token after those seen, [vocab_size] float32, in place."""
        if self._biased.size:
            row[self._biased] += self._biases
        if self._slots:
            ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
            found = row[ids]
            if self._repetition != 1.0:
                found = np.where(found < 0.0, found * self._repetition, found / self._repetition)
            if self._frequency != 0.0 or self._presence != 0.0:
                found -= self._frequency * counts
                found -= self._presence * (counts > 0.0)
            row[ids] = found
        if self._allowed is not None and self._allowed.size:
            kept = row[self._allowed]
            if not np.isfinite(kept.max()):
                kept = np.zeros_like(kept)
            row.fill(-np.inf)
            row[self._allowed] = kept
        self._forbid(row)

    def _forbid(self, row: NDArray[np.float32]) -> None:
        """Steps 5 and 6."""
        text, bad = self._text, self._bad_ids
        if self._words and text:
            ends = self._words.get(text[-1], ())
            bad = [*bad, *(last for before, last in ends if text[-len(before) :] == before)]
        undo: list[tuple[_Ids, NDArray[np.float32]]] = []
        stops = self._stop_ids if len(text) < self._min_tokens else self._stop_ids[:0]
        for ids in (np.array(bad, dtype=np.intp), stops):
            if ids.size:
                undo.append((ids, row[ids]))
                row[ids] = -np.inf
        while undo and not np.isfinite(row.max()):
            ids, values = undo.pop()
            row[ids] = values
