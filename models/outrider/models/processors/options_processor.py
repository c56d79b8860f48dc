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
    """A request's `LogitProcessor`. `advance` is O(1), `truncate` O(tokens dropped).

    `rows_torch` reads what is public, and applies it to rows in torch. biased, biases: ids and addends. allowed: ids;
    None: all. bad_ids: those of bad words of one token. stop_ids: those that `is_short` forbids. num_prompt: of the
    `slots`, those of the prompt; they count wherever the text has them.
    """

    def __init__(
        self, processors: ProcessorOptions, prompt: Sequence[int], vocab_size: int, stop_ids: Collection[int] = ()
    ) -> None:
        """vocab_size: of the rows. Ids beyond it change nothing: a draft's rows may be shorter."""
        self._vocab_size = vocab_size
        self._is_counted = processors.penalizes
        self.repetition = np.float32(processors.repetition_penalty)
        self.frequency = np.float32(processors.frequency_penalty)
        self.presence = np.float32(processors.presence_penalty)
        biases = [(token, addend) for token, addend in processors.logit_bias if token < vocab_size]
        self.biased = self._known([token for token, _ in biases])
        self.biases = np.array([addend for _, addend in biases], dtype=np.float32)
        allowed = self._known(frozenset(processors.allowed_ids or ()))
        self.allowed = allowed if allowed.size else None
        # Words of several tokens, by the last one before the forbidden one.
        self._words: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in processors.bad_words:
            if len(word) > 1 and word[-1] < vocab_size:
                self._words[word[-2]].append(word)
        self.bad_ids = self._known({word[0] for word in processors.bad_words if len(word) == 1})
        self.min_tokens = processors.min_tokens
        self.stop_ids = self._known(stop_ids if processors.min_tokens else ())
        self._text: list[int] = []
        # Distinct ids, in the order of their first occurrence, and how often each occurs in the text: the prompt's,
        # where they count, and behind them those that only the text has.
        repeated = self._known(dict.fromkeys(prompt if self.repetition != 1.0 else ()))
        self.slots: dict[int, int] = {token: slot for slot, token in enumerate(repeated.tolist())}
        self.num_prompt = repeated.size
        self._ids: _Ids = np.concatenate([repeated, np.zeros(_ROOM, dtype=np.intp)])
        self._counts = np.zeros(self._ids.size, dtype=np.float32)  # exact up to 2^24

    def _known(self, tokens: Collection[int]) -> _Ids:
        ids = np.fromiter(tokens, dtype=np.intp, count=len(tokens))
        return ids[ids < self._vocab_size]

    @property
    def length(self) -> int:
        """Tokens of the text that it has seen."""
        return len(self._text)

    @property
    def ids(self) -> _Ids:
        """The id of each slot: those in prompt or text, each once. A view, until it changes."""
        return self._ids[: len(self.slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often the text has each of `ids`. A view, until it changes."""
        return self._counts[: len(self.slots)]

    @property
    def is_short(self) -> bool:
        """Whether stop ids are forbidden."""
        return len(self._text) < self.min_tokens

    def word_ends(self) -> list[int]:
        """The last ids of bad words of several tokens, where the text ends with those before."""
        text = self._text
        if not self._words or not text:
            return []
        return [word[-1] for word in self._words.get(text[-1], ()) if tuple(text[1 - len(word) :]) == word[:-1]]

    def advance(self, token: int) -> None:
        """Goes on by a token of the text."""
        self._text.append(token)
        if not self._is_counted or token >= self._vocab_size:
            return
        slot = self.slots.setdefault(token, len(self.slots))
        if slot == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1.0

    def truncate(self, length: int) -> None:
        """Goes back to its first `length` tokens."""
        while len(self._text) > length:
            token = self._text.pop()
            slot = self.slots.get(token)
            if slot is None:
                continue
            self._counts[slot] -= 1.0
            if self._counts[slot] == 0.0 and slot >= self.num_prompt:
                # Its first occurrence goes, so every id that came later is gone: it has the last slot.
                del self.slots[token]

    def apply(self, row: NDArray[np.float32]) -> None:
        """Changes the row of the token after those seen, [vocab_size] float32, in place."""
        if self.biased.size:
            row[self.biased] += self.biases
        if self.slots:
            ids, counts = self.ids, self.counts
            found = row[ids]
            if self.repetition != 1.0:
                found = np.where(found < 0.0, found * self.repetition, found / self.repetition)
            if self.frequency != 0.0 or self.presence != 0.0:
                found -= self.frequency * counts
                found -= self.presence * (counts > 0.0)
            row[ids] = found
        if self.allowed is not None:
            kept = row[self.allowed]
            if not np.isfinite(kept.max()):
                kept = np.zeros_like(kept)
            row.fill(-np.inf)
            row[self.allowed] = kept
        self._forbid(row)

    def _forbid(self, row: NDArray[np.float32]) -> None:
        """Steps 5 and 6."""
        undo: list[tuple[_Ids, NDArray[np.float32]]] = []
        bad = np.concatenate([self.bad_ids, np.array(self.word_ends(), dtype=np.intp)])
        for ids in (bad, self.stop_ids if self.is_short else self.stop_ids[:0]):
            if ids.size:
                undo.append((ids, row[ids]))
                row[ids] = -np.inf
        while undo and not np.isfinite(row.max()):
            ids, values = undo.pop()
            row[ids] = values
