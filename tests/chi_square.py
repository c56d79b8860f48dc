"""Compares counts of whole sequences with their exact probabilities: two made-up languages over a few ids."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from tests.fake_runtime import FakeSequenceRuntime

from outrider.models.picks.rejection import SparseDistribution, draw, probabilities, sparse
from outrider.models.picks.sampling import SamplingParams

Row = NDArray[np.float32]
PROMPT = (1, 2)


class Languages:
    """A target over `size` ids, and a draft that is another language, mixed with the target's."""

    def __init__(self, size: int = 4, length: int = 3, temperature: float = 3.0, top_p: float = 1.0) -> None:
        self.size, self.length = size, length
        self.params = SamplingParams(temperature=temperature, top_p=top_p)
        self.target_row = cache(self._target_row)
        self.draft_row = cache(self._draft_row)

    def with_seed(self, seed: int) -> SamplingParams:
        """The sampling parameters of one run."""
        return SamplingParams(temperature=self.params.temperature, top_p=self.params.top_p, seed=seed)

    def _target_row(self, text: tuple[int, ...]) -> Row:
        return FakeSequenceRuntime(vocab_size=self.size).extend([*PROMPT, *text])

    def _draft_row(self, text: tuple[int, ...]) -> Row:
        own = FakeSequenceRuntime(vocab_size=self.size, seed=5).extend([*PROMPT, *text])
        return 0.5 * self.target_row(text) + 0.7 * own

    def q(self, text: Sequence[int]) -> SparseDistribution:
        """The draft's distribution after a text: without the id that it finds least likely."""
        return sparse(self.draft_row(tuple(text)), self.params, self.size - 1)

    def block(self, text: Sequence[int], count: int, seed: int) -> tuple[list[int], list[SparseDistribution]]:
        """Tokens drawn by the draft after a text, and what they were drawn from."""
        tokens: list[int] = []
        qs: list[SparseDistribution] = []
        for _ in range(count):
            qs.append(self.q([*text, *tokens]))
            tokens.append(draw(qs[-1], seed, len(PROMPT) + len(text) + len(tokens)))
        return tokens, qs

    def expected(self) -> dict[tuple[int, ...], float]:
        """The probability of every text that the target can write."""
        found = {}
        for text in itertools.product(range(self.size), repeat=self.length):
            chance = 1.0
            for index, token in enumerate(text):
                chance *= float(probabilities(self.target_row(text[:index]), self.params)[token])
            if chance > 0.0:
                found[text] = chance
        return found

    def excess(self, texts: Sequence[Sequence[int]]) -> float:
        """How many standard deviations Pearson's statistic is above its mean; rare texts are one class."""
        counts = Counter(map(tuple, texts))
        expected, total = self.expected(), len(texts)
        assert set(counts) <= set(expected), "a text that the target cannot write"
        rare = [text for text, chance in expected.items() if chance * total < 5.0]
        classes = [(counts[text], chance * total) for text, chance in expected.items() if text not in set(rare)]
        if rare:
            classes.append((sum(counts[text] for text in rare), sum(expected[text] for text in rare) * total))
        statistic = sum((count - mean) ** 2 / mean for count, mean in classes)
        df = len(classes) - 1
        # Wilson and Hilferty 1931: the cube root of a chi-square variate is nearly normal.
        return float(((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5)


CHANCE = NormalDist().inv_cdf(0.999)
"""An excess that one right sampler in a thousand reaches."""
