"""Writes the table of docs/metrics.md from the metrics of a running server.

python -m tests.metrics_table
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.core import Metric
from tests.serving import FakeServer, run_session, serve_fake

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
    "server": "1",
}


def families(server: FakeServer) -> list[Metric]:
    """All families of ours, once each has its samples."""
    with httpx.Client(base_url=server.url) as client:
        run_session(client, {"prompt": [5, 17, 99, 3], "max_tokens": 12, "ignore_eos": True})
        client.get("/nowhere")
    return [family for family in server.core.metrics.families() if family.name.startswith("outrider_")]


def table(found: list[Metric]) -> str:
    """The table, by name."""
    return "| name | type | labels | unit | meaning |\n|---|---|---|---|---|\n" + "".join(sorted(map(_row, found)))


def _row(family: Metric) -> str:
    short = family.name.removeprefix("outrider_")
    labels = ", ".join(f"`{name}`" for name in sorted(_labels(family)))
    unit = _TOLD.get(short) or next((unit for end, unit in _UNITS if short.endswith(end)), "count")
    theirs = IN_VLLM.get(short)
    same = "" if theirs is None else f" [vLLM{f': `{theirs}`' if theirs else ''}]"
    name = family.name + _SUFFIX.get(family.type, "")
    return f"| `{name}` | {family.type} | {labels} | {unit} | {family.documentation}{same} |\n"


def _labels(family: Metric) -> Iterator[str]:
    return iter({name for sample in family.samples for name in sample.labels} - {"le"})


def main() -> None:
    """Replaces the table in the document."""
    with serve_fake() as server:
        new = table(families(server))
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + new + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
