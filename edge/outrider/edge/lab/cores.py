"""Gives the cloud and the agent a core each when both run on one machine.

Two machines would not share cores. Where the system pins no process, the measurement includes how the two disturb each
other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

Cores = frozenset[int] | None
"""Numbers of cores; None leaves the choice to the system."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The cores of each side, and a sentence about it for the user."""

    cloud: Cores
    agent: Cores
    note: str


def plan_cores(num_each: int = 1) -> CorePlan:
    """`num_each` cores for each side, or half of those there are; 0: both share all. Changes nothing where the system
    allows none.
    """
    if num_each == 0:
        return CorePlan(None, None, "cloud and agent share this machine's cores, as a laptop that runs both does")
    allowed = sorted(allowed_cores() or ())
    if not allowed:
        return CorePlan(None, None, "cloud and agent are not pinned to cores: this system does not offer it")
    if len(allowed) < 2:
        return CorePlan(None, None, "cloud and agent share the only core, so drafting slows the target")
    num_each = min(num_each, len(allowed) // 2)
    cloud, agent = allowed[:num_each], allowed[num_each : 2 * num_each]
    if num_each > 1:
        note = f"the cloud runs on cores {cloud[0]} to {cloud[-1]} and the agent on cores {agent[0]} to {agent[-1]}"
    else:
        note = (
            f"the cloud runs on core {cloud[0]} and the agent on core {agent[0]}, one thread each, as two machines "
            "would"
        )
    return CorePlan(frozenset(cloud), frozenset(agent), note)


@contextmanager
def running_on(cores: Cores) -> Iterator[None]:
    """Keeps the calling thread, and the threads and processes that it starts meanwhile, on `cores`.

    On Windows the whole process is kept there.
    """
    if cores is None:
        yield
        return
    before = allowed_cores()
    assert before is not None, "cores were given on a system that pins none"
    _set_affinity(cores)
    try:
        yield
    finally:
        _set_affinity(before)


def allowed_cores() -> Cores:
    """The cores that the caller may run on; None where the system does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))  # of the calling thread
    process = psutil.Process()
    return frozenset(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else None


def _set_affinity(cores: frozenset[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    else:
        psutil.Process().cpu_affinity(sorted(cores))
