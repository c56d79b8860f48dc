"""The examples of the agent: two machines as processes, a small processor. test_clients.py runs the chat programs."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import typer.main
from tests.commands import lines_of

from outrider.cloud.server.main import app as cloud_app
from outrider.edge.cli import main as edge_cli
from outrider.edge.lab.cores import running_on
from outrider.export.cli.main import app as export_app
from outrider.export.make.pair import PairPaths
from outrider.models.ingress.sockets import READY_PREFIX

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
APPS = {"outrider": edge_cli.app, "outrider-cloud": cloud_app, "outrider-export": export_app}
MODULES = {"outrider": "outrider.edge.cli", "outrider-cloud": "outrider.cloud.server"}
KEY = "a-key-of-your-own"


def ours(line: str) -> list[str] | None:
    """The command of ours in a line, without variables before it; None for others."""
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    if words[:2] == ["sh", "-c"]:
        words = shlex.split(words[2].rpartition("exec ")[2])
    return words if words[0] in APPS else None


COMMANDS = [
    (document.parent.name, found)
    for document in sorted(EXAMPLES.glob("*/README.md"))
    for line in lines_of(document)
    if (found := ours(line)) is not None
]


@pytest.mark.parametrize(("example", "words"), COMMANDS, ids=lambda each: str(each))
def test_commands_parse(example: str, words: list[str]) -> None:
    """The command, its subcommand and its options are those of the console scripts."""
    name, subcommand, *arguments = words
    group = typer.main.get_command(APPS[name])
    assert isinstance(group, click.Group)
    group.commands[subcommand].make_context(subcommand, arguments)


@contextmanager
def started(words: list[str], environment: dict[str, str] | None = None) -> Iterator[str]:
    """The URL of a server that one of our commands starts, as a process."""
    command = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | (environment or {})) as process:
        assert process.stdout is not None
        try:
            ready = next((line for line in process.stdout if line.startswith(READY_PREFIX)), "")
            assert ready, f"{words[0]} ended"
            yield ready.removeprefix(READY_PREFIX).strip()
        finally:
            process.terminate()


yaml: Any = importlib.import_module("yaml")  # ships no types
COMPOSED: dict[str, Any] = yaml.safe_load((EXAMPLES / "two_machines" / "compose.yaml").read_text(encoding="utf-8"))


def composed_command(service: str, **places: str) -> list[str]:
    """A service's command with this machine's places, on a free loopback port."""
    here = {"0.0.0.0": "127.0.0.1", "8000": "0", "8077": "0"} | places
    return [*(here.get(word, word) for word in COMPOSED["services"][service]["command"]), "--threads", "1"]


@pytest.fixture(scope="module")
def reference_cloud(reference_pair: PairPaths) -> Iterator[str]:
    """The compose file's cloud, as a process."""
    with started(composed_command("cloud", **{"/bundles/target": str(reference_pair.target)})) as url:
        yield url


def text_of(url: str, headers: dict[str, str] | None = None) -> str:
    """A completion's text."""
    asked = {"prompt": "def walk(path):", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_both_machines_of_the_compose_file(reference_cloud: str, reference_pair: PairPaths) -> None:
    """Its commands as processes: the device asks for a key, and its text is the cloud's."""
    cloud, device = COMPOSED["services"]["cloud"], COMPOSED["services"]["device"]
    assert "ports" not in cloud and cloud["networks"] == ["link"] and COMPOSED["networks"]["link"]["internal"] is True
    assert device["ports"] == ["127.0.0.1:8077:8077"]
    places = {"/bundles/draft": str(reference_pair.draft), "http://cloud:8000": reference_cloud}
    with started(composed_command("device", **places), {"OUTRIDER_API_KEYS": KEY}) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert text_of(url, {"Authorization": f"Bearer {KEY}"}) == text_of(reference_cloud) != ""


def test_the_images_have_extras_that_exist() -> None:
    """And the Dockerfile installs from the repository."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for service in COMPOSED["services"].values():
        assert re.search(rf"^{service['build']['args']['EXTRA']} = \[", text, re.MULTILINE)
        assert (EXAMPLES / "two_machines" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="`ulimit -d` bounds memory on Linux only")
def test_a_small_processor_with_a_gigabyte(reference_cloud: str, reference_pair: PairPaths) -> None:
    """The line of the example: on one core, with its limit; the peak of the process stays below 1 GB."""
    (line,) = (each for each in lines_of(EXAMPLES / "small_arm" / "README.md") if each.startswith("sh -c"))
    shell, flag, script = shlex.split(line)
    limit, _, rest = script.partition("exec outrider ")
    assert limit == "ulimit -d 1048576; " and rest
    rest = rest.replace("http://127.0.0.1:8000", reference_cloud)
    rest = rest.replace("bundles/cpu", shlex.quote(str(reference_pair.draft)))
    script = f"{limit}exec {shlex.quote(sys.executable)} -m outrider.edge.cli {rest} --port 0"
    with running_on(frozenset({min(os.sched_getaffinity(0))})):
        process = subprocess.Popen([shell, flag, script], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().removeprefix(READY_PREFIX).strip()
            assert text_of(url) == text_of(reference_cloud)
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            limits = Path(f"/proc/{process.pid}/limits").read_text(encoding="ascii")
        finally:
            process.terminate()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None and int(peak[1]) < 1_000_000
    assert re.search(r"Max data size\s+1073741824", limits) and re.search(r"Cpus_allowed_list:\s+\d+\n", status)
