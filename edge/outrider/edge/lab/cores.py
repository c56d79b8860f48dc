"""Which cores the cloud and the agent take when both run on one machine.

Two machines would not share cores, so where the system lets a process choose, each side gets one of its own; otherwise
what is measured is how they get in each other's way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Cores = frozenset[int] | None
"""Numbers of cores; None leaves the choice to the system."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The cores of each side, and what to tell the user about it."""

    cloud: Cores
    agent: Cores
    note: str


def plan_cores() -> CorePlan:
    """One core for each side where there are two and the system allows it; changes nothing."""
    if not hasattr(os, "sched_getaffinity"):
        return CorePlan(None, None, "cloud and agent are not pinned to cores: this system does not offer it")
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        return CorePlan(None, None, "cloud and agent share the one core that there is, so drafting slows the target")
    cloud, agent = allowed[:2]
    note = f"the cloud runs on core {cloud} and the agent on core {agent}, one thread each, as two machines would"
    return CorePlan(frozenset({cloud}), frozenset({agent}), note)


@contextmanager
def running_on(cores: Cores) -> Iterator[None]:
    """Keeps the calling thread, and the threads and processes that it starts meanwhile, on `cores`."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
