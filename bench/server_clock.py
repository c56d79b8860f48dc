"""Reads where the server's time goes, from its own counters: differences of /metrics around a generation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from bench.processes import metrics_of

_SAMPLES: Final = {
    "model_seconds": "engine_model_seconds_total",
    "overhead_seconds": "engine_overhead_seconds_total",
    "steps": "engine_steps_total",
    "proposed": "spec_decode_num_draft_tokens_total",
    "preempted": "num_preemptions_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
    "tree_steps": "engine_tree_steps_total",
    "hits": "recent_hits_total",
}


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Counters of the engine: seconds in the model, in the rest of its steps; steps, drafted tokens verified."""

    model_seconds: float = 0.0
    overhead_seconds: float = 0.0
    steps: float = 0.0
    proposed: float = 0.0

    def __add__(self, other: ServerTimes) -> ServerTimes:
        return ServerTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: ServerTimes) -> ServerTimes:
        return ServerTimes(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def read_times(url: str) -> ServerTimes:
    """The counters of a server now, read directly, not through an emulated network."""
    return ServerTimes(**engine_counts(url, *(f.name for f in fields(ServerTimes))))


def engine_counts(url: str, *names: str) -> dict[str, float]:
    """Counters of the engine by their names in `seam.Totals`; `hits` is that of recent texts."""
    found = metrics_of(url)
    return {name: found[f"outrider_{_SAMPLES[name]}"] for name in names}
