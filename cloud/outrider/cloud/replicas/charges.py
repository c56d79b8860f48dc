"""Shares what owners use of their tokens per minute between replicas, so that a limit holds for all together.

A replica charges its own requests at once, and those of the others when it reports, once a second.
"""

from __future__ import annotations

import threading

from outrider.models.http.limits import TokenBudget

Charges = dict[bytes, tuple[int, int]]
"""Tokens that owners took since the last report, negative where they were given back, and their tokens per minute."""


def add_charges(total: Charges, charges: Charges) -> None:
    """Adds `charges` to `total`."""
    for owner, (num_tokens, per_minute) in charges.items():
        total[owner] = total.get(owner, (0, 0))[0] + num_tokens, per_minute


class SharedBudget(TokenBudget):
    """A budget that notes what it charges, for the other replicas."""

    def __init__(self) -> None:
        super().__init__()
        self._noting = threading.Lock()
        self._charges: Charges = {}

    def admit(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """As TokenBudget's."""
        super().admit(owner, num_tokens, per_minute)
        self._note(owner, num_tokens, per_minute)

    def take(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """As TokenBudget's."""
        super().take(owner, num_tokens, per_minute)
        self._note(owner, num_tokens, per_minute)

    def collect(self) -> Charges:
        """What was charged here since the last call."""
        with self._noting:
            charges, self._charges = self._charges, {}
        return charges

    def apply(self, charges: Charges) -> None:
        """Charges what the other replicas did."""
        for owner, (num_tokens, per_minute) in charges.items():
            super().take(owner, num_tokens, per_minute)

    def _note(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        with self._noting:
            add_charges(self._charges, {owner: (num_tokens, per_minute)})
