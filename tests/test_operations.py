"""What docs/operations.md names exists: options, metrics, alerts."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import typer.main
import yaml
from tests.serving import serve_fake

from outrider.cloud.server.main import app as cloud_app
from outrider.edge.cli.main import app as edge_app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
OF_OTHERS = {"--unit", "--now", "--follow", "--stop-timeout", "--sessions"}
"""Options of systemctl, journalctl, docker and the benchmarks."""
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"


def test_options_exist() -> None:
    """Each belongs to `outrider-cloud serve`, `outrider run` or `outrider serve`."""
    known = set(OF_OTHERS)
    for app, names in ((cloud_app, ("serve",)), (edge_app, ("run", "serve"))):
        group = typer.main.get_command(app)
        for name in names:
            known |= {option for each in group.commands[name].params for option in each.opts}  # type: ignore[attr-defined]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named - known <= {"--ray"} and named >= OF_OTHERS


def test_metrics_and_alerts_exist() -> None:
    """By their names at /metrics, and in the alert rules."""
    with serve_fake() as server:
        exposed = set(re.findall(r"^(\w+?)(?:_bucket|_count|_sum)?[ {]", httpx.get(server.url + "/metrics").text, re.M))
    assert set(re.findall(r"`((?:outrider|process)_[a-z_]+)`", TEXT)) - exposed == {"outrider_request_errors_total"}
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    assert set(re.findall(r"`(Outrider[A-Z]\w+)`", TEXT)) <= alerts
