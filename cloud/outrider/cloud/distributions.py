"""Counts how an engine's steps and drafts are distributed: histograms, and counts by position, end and adapter.

The engine's thread writes, a scrape reads without a lock: it may see a step half counted, and never a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, get_args

from outrider.models.process.tally import Tally
from outrider.models.wire.protocol import EndReason

MAX_POSITIONS: Final = 64
"""Drafted positions of a pass that are told apart: no engine verifies more."""
END_REASONS: Final = (*get_args(EndReason), "once")
"""How a sequence may end."""
_COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_STEP_S: Final = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 8.192, 32.768)
_WAIT_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_QUEUE_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(slots=True)
class AdapterCounts:
    """Of one adapter's sequences: tokens committed, commits that had drafted tokens verified, and these tokens."""

    committed: int = 0
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0


class Distributions:
    """The distributions of one engine since its start. For one writing thread.

    batch_size: sequences of a step. step_tokens: tokens of a step. step_s: its seconds. wait_s: waits for drafts that
    ended. lag_s: from a commit to the first draft that knows of it. queue_s: waits for admission. adapters: counts by
    name, of an engine that has some.
    """

    __slots__ = (
        *("_accepted", "_tested", "adapters", "batch_size", "ends"),
        *("lag_s", "queue_s", "step_s", "step_tokens", "wait_s"),
    )

    def __init__(self) -> None:
        self.batch_size = Tally(_COUNTS)
        self.step_tokens = Tally(_TOKENS)
        self.step_s = Tally(_STEP_S)
        self.wait_s = Tally(_WAIT_S)
        self.lag_s = Tally(_WAIT_S)
        self.queue_s = Tally(_QUEUE_S)
        self.ends = dict.fromkeys(END_REASONS, 0)
        self.adapters: dict[str, AdapterCounts] = {}
        # Passes by the number of drafted tokens that they accepted, and by the number of positions tested: two
        # additions a pass, whatever its length.
        self._accepted = [0] * (MAX_POSITIONS + 1)
        self._tested = [0] * (MAX_POSITIONS + 1)

    def stepped(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Counts a step."""
        self.batch_size.observe(num_sequences)
        self.step_tokens.observe(num_tokens)
        self.step_s.observe(seconds)

    def ended(self, reason: str) -> None:
        """Counts a sequence's end."""
        self.ends[reason] = self.ends.get(reason, 0) + 1

    def committed_with(self, adapter: str, num_tokens: int, *, proposed: int, accepted: int) -> None:
        """Counts a commit of a sequence with an adapter."""
        counts = self.adapters[adapter]
        counts.committed += num_tokens
        counts.drafts += proposed > 0
        counts.proposed += proposed
        counts.accepted += accepted

    def verified(self, accepted: int, tested: int) -> None:
        """Counts a pass that verified drafted tokens."""
        self._accepted[accepted if accepted < MAX_POSITIONS else MAX_POSITIONS] += 1
        self._tested[tested if tested < MAX_POSITIONS else MAX_POSITIONS] += 1

    @property
    def accepted_by_position(self) -> list[int]:
        """Passes that accepted a drafted token at each position, the first being 0."""
        return _from_lengths(self._accepted)

    @property
    def tested_by_position(self) -> list[int]:
        """Passes that tested a drafted token at each position: those before it had been accepted."""
        return _from_lengths(self._tested)

    def numbers(self) -> list[list[float]]:
        """All counts but those by end and adapter, for another process; see `load`."""
        return [*(tally.numbers() for tally in self._tallies()), list(self._accepted), list(self._tested)]

    def load(self, numbers: Sequence[Sequence[float]]) -> None:
        """Takes over what `numbers` gave in a process of the same version."""
        *tallies, accepted, tested = numbers
        for tally, values in zip(self._tallies(), tallies, strict=True):
            tally.load(values)
        self._accepted, self._tested = [int(n) for n in accepted], [int(n) for n in tested]

    def _tallies(self) -> tuple[Tally, ...]:
        return self.batch_size, self.step_tokens, self.step_s, self.wait_s, self.lag_s, self.queue_s


def num_tested(accepted: int, tokens: Sequence[int], drafted_next: Sequence[int]) -> int:
    """Drafted positions that a pass tested: accepted ones, and the next if its guesses were all wrong.

    tokens: what the pass committed. drafted_next: the verified tokens that follow the last accepted one. A pass that
    ends its sequence may commit a token that was guessed without accepting it: that rejects nothing.
    """
    return accepted + 1 if drafted_next and tokens[-1] not in drafted_next else accepted


def _from_lengths(lengths: Sequence[int]) -> list[int]:
    """Counts by position from counts by length: a pass of length n counts at positions 0 to n - 1."""
    return list(accumulate(reversed(lengths[1:])))[::-1]
