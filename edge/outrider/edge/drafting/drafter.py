"""Guesses the next token on the device: drafters with one interface.

A drafter holds one sequence. One worker thread at a time drives it, and it knows no network. Its guesses are hints:
whatever it proposes, the text is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import SequenceRuntime
from outrider.models.runtimes.ngram import NgramLookup
from outrider.models.sampling import SamplingParams, pick


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token and the drafter's own probability for it, 0 to 1 (uncalibrated)."""

    token: int
    confidence: float


class Drafter(Protocol):
    """One sequence and guesses of what follows it."""

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Starts a new sequence; forgets the one before."""
        ...

    @property
    def length(self) -> int:
        """Tokens in the sequence, prompt and proposals included."""
        ...

    def rewind(self, length: int) -> None:
        """Cuts the sequence back to `length` tokens, from 1 to the present number; never copies a cache."""
        ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the target committed (or that were drafted before)."""
        ...

    def propose(self) -> Proposal | None:
        """Guesses the next token and appends it; None, and nothing appended, when there is no guess. Blocking."""
        ...

    def close(self) -> None:
        """Releases the model; safe to call twice."""
        ...


class ModelDrafter:
    """Drafts with a model that shares the target's noise: the same pick, on its own logits, at the same position.

    Tokens are fed to the runtime only when a proposal needs them, so rewinding and extending cost nothing by
    themselves.
    """

    def __init__(self, runtime: SequenceRuntime, num_ids: int | None = None) -> None:
        """num_ids: ids that the tokenizer knows; logits beyond are padding, which the target may not have, and are
        never proposed. None: all.
        """
        self._runtime = runtime
        self._num_ids = num_ids
        self._tokens: list[int] = []
        self._params = SamplingParams()
        self._probability = Probability()

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Starts a new sequence; keeps the cache of the beginning that both share."""
        held = self._runtime.length
        shared = 0
        for old, new in zip(self._tokens[:held], prompt, strict=False):
            if old != new:
                break
            shared += 1
        self._runtime.truncate(shared)
        self._tokens = list(prompt)
        self._params = params

    @property
    def length(self) -> int:
        """Tokens in the sequence, whether or not the runtime has seen them yet."""
        return len(self._tokens)

    def rewind(self, length: int) -> None:
        """Cuts the sequence back, and the runtime's cache if it is longer."""
        del self._tokens[length:]
        if self._runtime.length > length:
            self._runtime.truncate(length)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self._tokens.extend(tokens)

    def propose(self) -> Proposal | None:
        """One model call; None at the model's longest sequence, and after a token that its embedding does not have.

        A target that is padded further than the draft may pick an id of its padding.
        """
        position, limits = len(self._tokens), self._runtime.limits
        if position >= limits.max_positions:
            return None
        if self._runtime.length == position:
            # The logits after the last token are gone; run that token again.
            self._runtime.truncate(position - 1)
        new = self._tokens[self._runtime.length :]
        if max(new) >= limits.vocab_size:
            return None
        logits = self._runtime.extend(new)[: self._num_ids]
        token = pick(logits, self._params, position)
        self._tokens.append(token)
        return Proposal(token, self._probability(logits, token, self._params.temperature))

    def close(self) -> None:
        """Releases the runtime."""
        self._runtime.close()


class Probability:
    """Softmax of one token, in memory that is reused: after a step has emptied the CPU's caches, temporaries cost more
    than the arithmetic.
    """

    def __init__(self) -> None:
        self._weights = np.empty(0, np.float32)

    def __call__(self, logits: NDArray[np.float32], token: int, temperature: float) -> float:
        """Probability of `token` at `temperature` (greedy: at 1), before truncation; `logits` [V] is not changed."""
        if self._weights.size != logits.size:
            self._weights = np.empty_like(logits)
        weights = np.subtract(logits, logits[token], out=self._weights)
        if temperature > 0.0:
            weights *= np.float32(1.0 / temperature)
        np.exp(weights, out=weights)
        return float(1.0 / weights.sum())  # float32, summed pairwise: precise enough for a hint


class NgramDrafter:
    """Drafts by prompt lookup, without a model: repeats what followed the same few tokens before."""

    # Without a model there is no probability; the estimates calibrate this constant.
    _CONFIDENCE = 0.5

    def __init__(self) -> None:
        self._lookup = NgramLookup()

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Starts a new sequence; ignores the sampling parameters."""
        self._lookup.truncate(0)
        self._lookup.extend(prompt)

    @property
    def length(self) -> int:
        """Tokens in the sequence."""
        return self._lookup.length

    def rewind(self, length: int) -> None:
        """Cuts the sequence back."""
        self._lookup.truncate(length)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self._lookup.extend(tokens)

    def propose(self) -> Proposal | None:
        """The token that followed the longest repeated suffix; None when nothing repeats."""
        if not (found := self._lookup.propose(1)):
            return None
        self._lookup.extend(found)
        return Proposal(found[0], self._CONFIDENCE)

    def close(self) -> None:
        """Nothing to release."""
