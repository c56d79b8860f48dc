"""Computes what a draft beside its target gains: no network, but draft and target take turns.

The yardstick of drafts over a network (`report.simulation`): with `k` drafted tokens a round takes
step_ms + (extra_ms + draft_ms) * k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.world import Times

MOST_DRAFTED: Final = 24
FLOORS: Final = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
"""How likely a path must be for the draft to go on: the best of these is taken."""

_REPEATS: Final = 20  # how often the texts are played, so that rounds begin at every place of them


@dataclass(frozen=True, slots=True)
class Beside:
    """Speed-ups over plain steps. fixed: at the best fixed depth, `depth`, for independent tokens. by_gap: a round
    drafts while its path is likely to be accepted.
    """

    fixed: float
    depth: int
    by_gap: float


def beside(ranks: Ranks, times: Times) -> Beside:
    """What the draft of these ranks gains beside a target of these times; one node per draft call."""
    alpha = ranks.hits(1)

    def fixed(depth: int) -> float:
        tokens = sum(alpha**accepted for accepted in range(depth + 1))
        return tokens * times.step_ms / (times.step_ms + (times.extra_ms + times.draft_ms) * depth)

    depth = max(range(1, MOST_DRAFTED + 1), key=fixed)
    return Beside(fixed(depth), depth, max(_by_gap(ranks, times, floor) for floor in FLOORS))


def _by_gap(ranks: Ranks, times: Times, floor: float) -> float:
    """Speed-up where a round drafts at least once, and verifies what is likelier than `floor` to be reached.

    The gap of a guess is known after its draft call, so the call that ends a round is paid for too.
    """
    now_ms, place, num_tokens = 0.0, 0, _REPEATS * len(ranks.picked)
    while place < num_tokens:
        reached, num_drafted, num_kept = 1.0, 0, 0
        while num_drafted < MOST_DRAFTED and (not num_kept or reached >= floor):
            reached *= ranks.chances[(place + num_drafted) % len(ranks.picked)][0]
            num_drafted += 1
            if num_drafted == 1 or reached >= floor:
                num_kept = num_drafted
        accepted = 0
        while accepted < num_kept and ranks.picked[(place + accepted) % len(ranks.picked)].rank == 0:
            accepted += 1
        now_ms += times.step_ms + times.extra_ms * num_kept + times.draft_ms * num_drafted
        place += accepted + 1
    return place * times.step_ms / now_ms
