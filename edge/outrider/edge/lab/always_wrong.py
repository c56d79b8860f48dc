"""Provides the worst possible draft, for tests and benches."""

from __future__ import annotations

from outrider.edge.drafting.drafter import Drafter, Proposal


class AlwaysWrongDrafter:
    """Shifts every proposal of another drafter by one id: the worst case, for tests and benches.

    The inner drafter sees its own proposals replaced by the wrong ones, as it would had it drafted them.
    """

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self.begin, self.rewind, self.extend, self.close = inner.begin, inner.rewind, inner.extend, inner.close

    @property
    def length(self) -> int:
        """As the inner drafter's."""
        return self._inner.length

    def propose(self) -> Proposal | None:
        """The inner drafter's token plus 1, modulo the vocabulary, with its confidence."""
        proposal = self._inner.propose()
        if proposal is None:
            return None
        wrong = (proposal.token + 1) % self._vocab_size
        self._inner.rewind(self._inner.length - 1)
        self._inner.extend([wrong])
        return Proposal(wrong, proposal.confidence)
