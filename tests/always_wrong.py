"""Provides drafters that change what another one does, and the worst possible draft, for tests and benches."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.drafter import Drafter
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.processor_plan import NO_PLAN, ProcessorPlan


class WrappedDrafter(Drafter):
    """Does what another drafter does."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """As the inner drafter's."""
        self._inner.begin(prompt, params, plan)

    @property
    def length(self) -> int:
        """As the inner drafter's."""
        return self._inner.length

    @property
    def max_branches(self) -> int:
        """As the inner drafter's."""
        return self._inner.max_branches

    def extend(self, tokens: Sequence[int]) -> None:
        """As the inner drafter's."""
        self._inner.extend(tokens)

    @property
    def is_behind(self) -> bool:
        """As the inner drafter's."""
        return self._inner.is_behind

    def read_on(self) -> None:
        """As the inner drafter's."""
        self._inner.read_on()

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """As the inner drafter's."""
        return self._inner.guess(branches, width)

    def continuation(self, max_tokens: int) -> list[Guess]:
        """As the inner drafter's."""
        return self._inner.continuation(max_tokens)

    def close(self) -> None:
        """As the inner drafter's."""
        self._inner.close()


class AlwaysWrongDrafter(WrappedDrafter):
    """Replaces every guess of another drafter by an id that it did not guess: the worst case, for tests and benches.

    The inner drafter sees the wrong tokens, as it would had it drafted them.
    """

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        super().__init__(inner)
        self._vocab_size = vocab_size

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The inner drafter's guesses, each moved to the next id that is none of them."""
        # The draft's eight best: the target's pick is seldom another.
        return [self._all_wrong(guesses, width) for guesses in self._inner.guess(branches, max(width, _BEST))]

    def continuation(self, max_tokens: int) -> list[Guess]:
        """Nothing."""
        return []

    def _all_wrong(self, guesses: Sequence[Guess], width: int) -> list[Guess]:
        taken = {guess.token for guess in guesses}
        wrong: list[Guess] = []
        for guess in guesses[:width]:
            token = guess.token
            while token in taken:
                token = (token + 1) % self._vocab_size
            taken.add(token)
            wrong.append(guess._replace(token=token))
        return wrong


_BEST = 8
