"""Times the calls of an open drafter by the number of nodes that they draft, and reads what they take in energy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from outrider.edge.devices.energy import EnergyMeter, EnergySpan, energy_meter
from outrider.edge.devices.profiles import CALL_SIZES
from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.drafter import Drafter
from outrider.models.errors import BundleError
from outrider.models.picks.sampling import SamplingParams

PROMPT_TOKENS: Final = 16
NUM_WARM: Final = 3
NUM_TIMED: Final = 9
ENERGY_S: Final = 0.5
"""Calls are run for so long to read their energy: counters move once a millisecond, or more seldom."""


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """calls_ms: the median by the number of nodes. worst_ms: the longest time of one node. nodes_per_joule: as in
    `Profile`.
    """

    calls_ms: dict[int, float]
    worst_ms: float
    nodes_per_joule: float | None


def time_nodes(drafter: Drafter, meter: EnergyMeter | str | None = None) -> NodeTimes:
    """Drafts after short texts of any tokens; the drafter's own text is lost. meter: by default this system's.

    Raises BundleError where a timed call guessed nothing: the draft's longest text is too short.
    """
    sizes = [size for size in CALL_SIZES if size <= drafter.max_branches]
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        # A text of its own for each size: one for all would be long for a draft of few positions, and a call on a text
        # of before would find its nodes.
        drafter.begin(range(size, size + PROMPT_TOKENS), SamplingParams())
        guesses = drafter.guess([()], 1)[0]
        for index in range(NUM_WARM + NUM_TIMED):
            drafter.extend([guesses[0].token if guesses else 1])
            began = time.perf_counter()
            guesses = drafter.guess([()], 1)[0]
            ended = time.perf_counter()
            found = [guesses]
            if size > 1:
                found += drafter.guess(_siblings(size), 2)
            all_ended = time.perf_counter()
            if index >= NUM_WARM:
                _check(found, drafter.length)
                times[1].append(1e3 * (ended - began))
                if size > 1:
                    times[size].append(1e3 * (all_ended - ended))
    per_joule = _nodes_per_joule(drafter, sizes[-1], energy_meter() if meter is None else meter)
    return NodeTimes({size: median(each) for size, each in times.items()}, max(times[1]), per_joule)


def _check(found: Sequence[Sequence[Guess]], length: int) -> None:
    if not all(found):
        raise BundleError(
            f"the draft guesses nothing after a text of {length} tokens, so it cannot be timed; expected a draft for "
            f"texts of {PROMPT_TOKENS + NUM_WARM + NUM_TIMED + 2} tokens or more (--prompt-len and --response-len of "
            "its export)"
        )


def _siblings(number: int, first: int = 1) -> list[tuple[int]]:
    return [(token,) for token in range(first, first + number)]


def _nodes_per_joule(drafter: Drafter, size: int, meter: EnergyMeter | str) -> float | None:
    if isinstance(meter, str):
        return None
    num_nodes, began, span = 0, time.perf_counter(), EnergySpan(meter)
    while not num_nodes or time.perf_counter() - began < ENERGY_S:
        for first in (1, 1 + size):  # other nodes than in the call before
            drafter.guess(_siblings(size, first), 2)
            num_nodes += size
    joules = span.joules
    return None if joules is None else num_nodes / joules
