"""Reads where the server's time goes, from its own counters: differences of /metrics around a generation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SAMPLES: Final = {
    "model_seconds": "engine_model_seconds_total",
    "overhead_seconds": "engine_overhead_seconds_total",
    "waited_seconds": "draft_wait_seconds_sum",
    "steps": "engine_steps_total",
    "passes": "target_passes_total",
    "committed": "generation_tokens_total",
    "proposed": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "preempted": "num_preemptions_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
    "tree_steps": "engine_tree_steps_total",
}


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Counters of the engine: seconds in the model, in the rest of its steps, waited for drafts; steps, passes that
    committed, tokens committed, drafted tokens verified and accepted.
    """

    model_seconds: float = 0.0
    overhead_seconds: float = 0.0
    waited_seconds: float = 0.0
    steps: float = 0.0
    passes: float = 0.0
    committed: float = 0.0
    proposed: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: ServerTimes) -> ServerTimes:
        return ServerTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: ServerTimes) -> ServerTimes:
        return ServerTimes(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class ServerClock:
    """Reads the counters of one server, directly, not through an emulated network."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, trust_env=False)

    def read(self) -> ServerTimes:
        """The counters now."""
        return ServerTimes(**self.counters(*(f.name for f in fields(ServerTimes))))

    def counters(self, *names: str, of: str = "") -> dict[str, float]:
        """Counters of the engine by their names in `seam.Totals`, or of another part, by those of /metrics."""
        text = self._http.get("/metrics", headers={"accept": "text/plain"}).text
        found = {
            sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
        }
        return {name: found[f"outrider_{of}_{name}_total" if of else f"outrider_{_SAMPLES[name]}"] for name in names}

    def __enter__(self) -> ServerClock:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
