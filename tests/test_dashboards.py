"""Checks deploy/grafana, deploy/prometheus, docs/metrics.md and docs/operations.md against a running server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.metrics_table import BEGIN, DOCUMENT, END, IN_VLLM, Scraped, families, serve_all, table

from outrider.cloud.api.draft_posts import DRAFTS_PATH
from outrider.cloud.server.main import app as cloud_app
from outrider.edge.cli.main import app as edge_app

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "outrider.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
ALERTS = [rule for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
NAME = re.compile(r"\b((?:outrider|process)_[a-z0-9_]+)(?:\{([^}]*(?:\{[^}]*\}[^}]*)*)\})?")
MATCHER = re.compile(r"([a-z_]+)(?:=~|!~|!=|=)\"")
GROUPING = re.compile(r"\b(?:by|on|without) \(([a-z_, ]*)\)")
OF_THE_SCRAPE = {"job", "instance", "replica"}  # the front of replicas adds the last


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    with serve_all() as running:
        yield running


@pytest.fixture(scope="module")
def found(scraped: Scraped) -> list[Metric]:
    """The families of a server and of a front that have served a text."""
    return families(scraped)


@pytest.fixture(scope="module")
def labels(scraped: Scraped, found: list[Metric]) -> dict[str, set[str]]:
    """The labels of each sample's name, as /metrics shows them."""
    by_name = defaultdict[str, set[str]](set)
    for family in (family for text in scraped.texts() for family in text_string_to_metric_families(text)):
        for sample in family.samples:
            by_name[sample.name].update(sample.labels)
    return dict(by_name)


def promtool(*arguments: str | Path, stdin: str | None = None) -> None:
    """Fails the test with promtool's words if it finds anything wrong; skips it where there is no promtool."""
    if (found := shutil.which("promtool")) is None:
        pytest.skip("there is no promtool here: apt-get install prometheus")
    done = subprocess.run([found, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr


def check_query(query: str, labels: dict[str, set[str]]) -> set[str]:
    """Every metric exists, and every label is one of its, or of the scrape. Gives the labels that it groups by."""
    names = NAME.findall(query)
    assert names and {name for name, _ in names} <= labels.keys()
    for name, matchers in names:
        assert set(MATCHER.findall(matchers)) <= labels[name] | OF_THE_SCRAPE, (name, matchers)
    grouped = {label.strip() for group in GROUPING.findall(query) for label in group.split(",")}
    assert grouped <= OF_THE_SCRAPE.union(*(labels[name] for name, _ in names)), query
    return grouped


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=[f"{title} {target['refId']}" for title, target in QUERIES])
def test_a_panel_asks_for_what_is_there(title: str, target: dict[str, Any], labels: dict[str, set[str]]) -> None:
    """Metrics and labels, also those of its legend."""
    grouped = check_query(target["expr"], labels)
    assert set(re.findall(r"\{\{([a-z_]+)\}\}", target["legendFormat"])) <= (grouped or OF_THE_SCRAPE)


def test_the_panels_show_every_metric(found: list[Metric]) -> None:
    """A new metric gets a place on the dashboard."""
    asked = " ".join(target["expr"] for _, target in QUERIES)
    assert not [family.name for family in found if not re.search(rf"\b{family.name}(_total|_bucket|_info|\b)", asked)]


def test_the_dashboard_is_whole() -> None:
    """Ids are unique, panels do not overlap, queries name the variables that there are."""
    assert DASHBOARD["schemaVersion"] == 42 and DASHBOARD["uid"] and DASHBOARD["id"] is None
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        cell
        for at in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for cell in product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps(DASHBOARD["panels"])))
    assert variables == {"datasource", "job", "instance"} and used - {"__rate_interval", "__range"} == variables


def test_prometheus_can_read_the_panels_queries(tmp_path: Path) -> None:
    """promtool parses each as the expression of a recording rule."""
    rules = [
        {"record": f"panel:query{index}", "expr": re.sub(r"\$__[a-z_]+", "5m", target["expr"])}
        for index, (_, target) in enumerate(QUERIES)
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", path)


@pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])
def test_an_alert_asks_for_what_is_there(alert: dict[str, Any], labels: dict[str, set[str]]) -> None:
    """Metrics and labels; each has a severity, a summary and advice."""
    if "up{" not in alert["expr"]:
        check_query(alert["expr"], labels)
    assert set(re.findall(r'route!?="([^"]*)"', alert["expr"])) <= {DRAFTS_PATH}
    assert alert["labels"]["severity"] in ("warning", "critical") and "for" in alert
    assert set(alert["annotations"]) == {"summary", "description"}


def test_every_alert_fires_in_its_unit_test_and_is_silent_in_another() -> None:
    """By promtool's own tests."""
    cases = [
        (each["alertname"], bool(each["exp_alerts"]))
        for test in yaml.safe_load((RULES / "alerts_test.yml").read_text())["tests"]
        for each in test["alert_rule_test"]
    ]
    names = {alert["alert"] for alert in ALERTS}
    firing, silent = ({name for name, fires in cases if fires is which} for which in (True, False))
    assert firing == names and silent >= names - {"OutriderEngineFailed"}
    promtool("check", "rules", RULES / "alerts.yml")
    promtool("test", "rules", RULES / "alerts_test.yml")


def test_the_scrape_configuration_is_one(tmp_path: Path) -> None:
    """With the key's file and the rules beside it."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(RULES / name, tmp_path)
    (tmp_path / "outrider.key").write_text("a-key\n")
    promtool("check", "config", tmp_path / "prometheus.yml")


def test_prometheus_finds_nothing_to_say_about_the_names(scraped: Scraped) -> None:
    """promtool's lint: suffixes, units, help."""
    for text in scraped.texts():
        promtool("check", "metrics", stdin=text)


def test_the_document_lists_every_metric(found: list[Metric]) -> None:
    """docs/metrics.md has what `python -m tests.metrics_table` writes."""
    assert DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0] == table(found)
    assert {family.name.removeprefix("outrider_") for family in found} >= set(IN_VLLM)


TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
OF_OTHERS = {"--unit", "--now", "--follow", "--stop-timeout", "--sessions"}
"""Options of systemctl, journalctl, docker and the benchmarks."""


def test_options_exist() -> None:
    """Each belongs to a command of `outrider-cloud` or `outrider`."""
    known = set[str]().union(*(options_of(typer.main.get_command(app)) for app in (cloud_app, edge_app)))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named - known - {"--help", "--help-all"} <= OF_OTHERS <= named


def test_metrics_that_documents_name_exist() -> None:
    """By the table of docs/metrics.md, which another test compares with a running server. serve.md is the device's."""
    table = set(re.findall(r"^\| `(outrider_\w+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8"), re.MULTILINE))
    for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"):
        if path.name != "serve.md":
            named = set(re.findall(r"`(outrider_\w+?)(?:_bucket|_sum|_count)?[`{ ]", path.read_text("utf-8")))
            assert named - {"outrider_reference"} <= table, path.name  # a package


def options_of(command: click.Command) -> set[str]:
    """The options of a command and of those below it."""
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return {option for parameter in command.params for option in parameter.opts}.union(*map(options_of, below))


def test_metrics_and_alerts_exist(scraped: Scraped) -> None:
    """By their names at /metrics, and in the alert rules."""
    exposed = set(re.findall(r"^# TYPE (\w+) ", "\n".join(scraped.texts()), re.MULTILINE))
    named = set(re.findall(r"`((?:outrider|process)_[a-z_]+)`", TEXT))
    assert len(named) > 3 and named <= exposed
    assert set(re.findall(r"`(Outrider[A-Z]\w+)`", TEXT)) <= {alert["alert"] for alert in ALERTS}
