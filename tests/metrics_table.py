"""Writes the table of docs/metrics.md from the metrics of a running server, and of a front over it.

python -m tests.metrics_table
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.fronts import RunningFront, replicas, serve_front
from tests.serving import FakeServer, run_session, serve_fake

from outrider.cloud.api.audit import AuditLog
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.recent.store import MemoryStore

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- /metrics -->\n"
IN_VLLM = {
    "num_requests_running": "",
    "num_requests_waiting": "",
    "kv_cache_usage_perc": "",
    "prefix_cache_queries": "",
    "prefix_cache_hits": "",
    "num_preemptions": "",
    "prompt_tokens": "",
    "generation_tokens": "",
    "request_success": "",
    "iteration_tokens": "iteration_tokens_total",
    "time_to_first_token_seconds": "",
    "inter_token_latency_seconds": "",
    "request_time_per_output_token_seconds": "",
    "e2e_request_latency_seconds": "",
    "request_queue_time_seconds": "",
    "spec_decode_num_drafts": "",
    "spec_decode_num_draft_tokens": "",
    "spec_decode_num_accepted_tokens": "",
    "spec_decode_num_accepted_tokens_per_pos": "",
}
"""Metrics of vLLM 0.32 (after "vllm:") with this meaning: our name, and theirs where it is another."""
_SUFFIX = {"counter": "_total", "info": "_info"}
_UNITS = (
    ("_seconds", "s"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_blocks", "blocks"),
    ("_perc", "0 to 1"),
    ("_requests", "requests"),
)
_TOLD = {
    "spec_decode_num_accepted_tokens_per_pos": "tokens",
    "spec_decode_num_tested_tokens_per_pos": "tokens",
    "prefix_cache_queries": "tokens",
    "prefix_cache_hits": "tokens",
    "engine_failed": "0 or 1",
    "engine_trees": "0 or 1",
    "recent_up": "0 or 1",
    "server": "1",
}


@dataclass(frozen=True)
class Scraped:
    """A server with all that adds metrics, and a front over another."""

    server: FakeServer
    front: RunningFront

    def texts(self) -> list[str]:
        """What both show at /metrics."""
        return [httpx.get(f"{url}/metrics").text for url in (self.server.url, self.front.url)]


@contextmanager
def serve_all() -> Iterator[Scraped]:
    """Both have answered a request."""
    with (
        tempfile.TemporaryDirectory() as place,
        closing(AuditLog(Path(place) / "audit.jsonl")) as audit,
        closing(MemoryStore()) as recent,
        serve_fake(ServerSettings(audit=audit, reloads=Counter({("keys", "ok"): 1})), recent=recent) as server,
        replicas(1) as group,
        serve_front(group) as front,
    ):
        for url in (server.url, front.url):
            with httpx.Client(base_url=url) as client:
                run_session(client, {"prompt": [5, 17, 99, 3], "max_tokens": 12, "ignore_eos": True})
                client.get("/nowhere")
        yield Scraped(server, front)


def samples(url: str) -> dict[str, float]:
    """A scrape: values by sample name and labels."""
    found = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {s.name + json.dumps(s.labels, sort_keys=True): s.value for family in found for s in family.samples}


def grown_by(before: dict[str, float], after: dict[str, float], name: str, **labels: str) -> float:
    """What was added to `outrider_NAME` between two scrapes; 0 is before and after where it is not there."""
    key = f"outrider_{name}" + json.dumps(labels, sort_keys=True)
    return after.get(key, 0.0) - before.get(key, 0.0)


def families(scraped: Scraped) -> list[Metric]:
    """All families of ours."""
    of_server = scraped.server.core.metrics.families()
    of_front = text_string_to_metric_families(scraped.texts()[1])
    return [family for family in of_server if family.name.startswith("outrider_")] + [
        family
        for family in of_front
        if family.name.startswith("outrider_front_") and not family.name.endswith("_created")  # of a counter
    ]


def table(found: list[Metric]) -> str:
    """The table, by name."""
    return "| name | type | labels | unit | meaning |\n|---|---|---|---|---|\n" + "".join(sorted(map(_row, found)))


def _row(family: Metric) -> str:
    short = family.name.removeprefix("outrider_")
    labels = ", ".join(f"`{name}`" for name in sorted({name for s in family.samples for name in s.labels} - {"le"}))
    unit = _TOLD.get(short) or next((unit for end, unit in _UNITS if short.endswith(end)), "count")
    theirs = IN_VLLM.get(short)
    same = "" if theirs is None else f" [vLLM{f': `{theirs}`' if theirs else ''}]"
    name = family.name + _SUFFIX.get(family.type, "")
    return f"| `{name}` | {family.type} | {labels} | {unit} | {family.documentation}{same} |\n"


def main() -> None:
    """Replaces the table in the document."""
    with serve_all() as scraped:
        new = table(families(scraped))
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + new + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
