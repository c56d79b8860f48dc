"""Says how many replicas the load needs: Ray's autoscaler asks.

Requests do not pass through Ray, so it cannot count them. Each replica reports its running and its queued sequences.
Ray loads this module in a process of its own: it imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

RUNNING: Final = "running_sequences"
QUEUED: Final = "queued_sequences"
"""Names of what a replica reports."""


def replicas_for(loads: Mapping[str, Mapping[Any, float]], sequences_each: float) -> int:
    """Replicas for which none has more than `sequences_each`, of those that run and those that wait."""
    total = sum(sum(of_replica.values()) for name, of_replica in loads.items() if name in (RUNNING, QUEUED))
    return max(1, math.ceil(total / sequences_each))


def by_sequences(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy, as Ray calls it with its AutoscalingContext; Ray applies bounds and delays.

    As long as no replica has reported, the number stays as it is.
    """
    loads = context.aggregated_metrics or {}
    if not any(loads.values()):
        return context.target_num_replicas, {}
    return replicas_for(loads, context.config.target_ongoing_requests), {}
