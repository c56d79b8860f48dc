"""Notices that other processes kept the machine busy while times were measured.

Reads the system's CPU counters before and after, and subtracts what this process and its descendants used. On a virtual
machine the host may run another machine while a process here waits for a processor. The counters call that time
`steal`; it is in neither `user` nor `system` (proc_stat(5)). It delays a measurement as another process does, so it
counts too.

Does not see a container's CPU quota, nor the load of others on memory and caches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

BUSY_SHARE: Final = 0.15
"""Others may take this share of the processors without a warning."""

SHORTEST_S: Final = 0.1
"""Shorter measurements are not judged."""

_TICK_S: Final = 0.016
"""The counters advance in ticks, of 10 ms on Linux and 15.6 ms on Windows: a measurement may be off by one."""

# Windows counts interrupts in `system`, and `guest` is part of `user` on Linux: neither is added again.
_BUSY_FIELDS: Final = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True, slots=True)
class Counters:
    """The system's counters at one moment, in seconds since some past moment.

    busy_s, stolen_s: per processor, all processors of the machine. own_s: CPU time of this process and its descendants,
    ended ones included. processors: those that these may run on.
    """

    clock_s: float
    busy_s: tuple[float, ...]
    stolen_s: tuple[float, ...]
    own_s: float
    processors: frozenset[int]


class MachineLoad:
    """The load of others on the processors during one or more measurements: a context manager.

    Entered more than once, it adds up. Counts only the processors that this process or a descendant may run on: what
    runs on the others is no disturbance. beside: other processes whose time is no load of others, by their ids.
    """

    def __init__(self, beside: Sequence[int] = ()) -> None:
        self.beside = tuple(beside)
        self._before: Counters | None = None
        self._measured_s = self._available_s = self._error_s = 0.0
        self._others_s = self._stolen_s = 0.0

    def __enter__(self) -> MachineLoad:
        self._before = read_counters(self.beside)
        return self

    def lengthen(self) -> None:
        """Waits, inside, until SHORTEST_S have passed: what others use now is what they used a moment ago."""
        assert self._before is not None, "lengthen() outside"
        time.sleep(max(0.0, self._before.clock_s + SHORTEST_S - time.monotonic()))

    def __exit__(self, *_: object) -> None:
        before, after = self._before, read_counters(self.beside)
        assert before is not None
        self._before = None
        # Processors of a child that was pinned elsewhere count too, if it was alive at the start or is at the end.
        used = [index for index in sorted(before.processors | after.processors) if index < len(after.busy_s)]
        elapsed_s = after.clock_s - before.clock_s
        stolen_s = sum(after.stolen_s[i] - before.stolen_s[i] for i in used)
        busy_s = sum(after.busy_s[i] - before.busy_s[i] for i in used)
        self._measured_s += elapsed_s
        self._available_s += elapsed_s * len(used)
        self._error_s += _TICK_S * len(used)
        self._stolen_s += max(0.0, stolen_s)
        self._others_s += max(0.0, busy_s - (after.own_s - before.own_s))

    @property
    def other_share(self) -> float:
        """Share of the processors' time that others took, 0 to 1: other processes here, and other virtual machines."""
        return min(1.0, (self._others_s + self._stolen_s) / self._available_s) if self._available_s else 0.0

    def warning(self) -> str | None:
        """Warning for readers of the times; None if others took little, or too little was measured."""
        allowed_s = BUSY_SHARE * self._available_s + self._error_s
        if self._measured_s < SHORTEST_S or self._others_s + self._stolen_s <= allowed_s:
            return None
        # What the host keeps for other virtual machines is `_stolen_s`; 0 where it does not say.
        who = "other processes" if self._stolen_s <= self._others_s else "other virtual machines on its host"
        return (
            f"This machine was busy: {who} used {100 * self.other_share:.0f} % of its processors while times were "
            "measured. Measure again when it is idle."
        )


def read_counters(beside: Sequence[int] = ()) -> Counters:
    """The counters now. beside: processes that count as ours, by their ids; one that has ended counts nothing."""
    times = psutil.cpu_times(percpu=True)
    own = psutil.Process()
    family = {own}
    with suppress(psutil.Error):
        family.update(own.children(recursive=True))
    for pid in beside:
        with suppress(psutil.Error):
            family.add(psutil.Process(pid))
    own_s, processors = 0.0, set[int]()
    for process in family:
        # The time of a child that ended is in its parent's `children_*` once that has waited for it; on Windows it is
        # lost.
        with suppress(psutil.Error):
            spent = process.cpu_times()
            own_s += spent.user + spent.system + spent.children_user + spent.children_system
            processors.update(_affinity(process, len(times)))
    return Counters(
        clock_s=time.monotonic(),
        busy_s=tuple(sum(getattr(each, field, 0.0) for field in _BUSY_FIELDS) for each in times),
        stolen_s=tuple(float(getattr(each, "steal", 0.0)) for each in times),
        own_s=own_s,
        processors=frozenset(processors),
    )


def _affinity(process: psutil.Process, num_processors: int) -> list[int]:
    """The processors that a process may run on; all, where the system does not say (macOS)."""
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(num_processors))
