"""What docs/operations.md names exists: options, metrics, alerts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer.main
import yaml
from tests.metrics_table import serve_all

from outrider.cloud.server.main import app as cloud_app
from outrider.edge.cli.main import app as edge_app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
OF_OTHERS = {"--unit", "--now", "--follow", "--stop-timeout", "--sessions"}
"""Options of systemctl, journalctl, docker and the benchmarks."""
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"


def test_options_exist() -> None:
    """Each belongs to a command of `outrider-cloud` or `outrider`."""
    known = {option for app in (cloud_app, edge_app) for option in options_of(typer.main.get_command(app))}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named - known - {"--help", "--help-all"} <= OF_OTHERS <= named


def test_metrics_that_documents_name_exist() -> None:
    """By the table of docs/metrics.md, which another test compares with a running server. serve.md is the device's."""
    table = set(re.findall(r"^\| `(outrider_\w+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8"), re.MULTILINE))
    for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"):
        if path.name != "serve.md":
            named = set(re.findall(r"`(outrider_\w+?)(?:_bucket|_sum|_count)?[`{ ]", path.read_text("utf-8")))
            assert named - {"outrider_reference"} <= table, path.name  # a package


def options_of(command: click.Command) -> Iterator[str]:
    """The options of a command and of those below it."""
    for parameter in command.params:
        yield from parameter.opts
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from options_of(each)


def test_metrics_and_alerts_exist() -> None:
    """By their names at /metrics, and in the alert rules."""
    with serve_all() as scraped:
        exposed = set(re.findall(r"^# TYPE (\w+) ", "\n".join(scraped.texts()), re.MULTILINE))
    named = set(re.findall(r"`((?:outrider|process)_[a-z_]+)`", TEXT))
    assert len(named) > 3 and named <= exposed
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    assert set(re.findall(r"`(Outrider[A-Z]\w+)`", TEXT)) <= alerts
