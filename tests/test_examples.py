"""The examples' commands: parsed, and run as far as they can be without the hardware that they are about.

test_clients.py runs the chat programs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
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
from tests.commands import Outrider, lines_of

from outrider.cloud.server.main import app as cloud_app
from outrider.edge.cli import main as edge_cli
from outrider.edge.lab.cores import running_on
from outrider.edge.lab.laboratory import cloud_process
from outrider.export.cli.main import app as export_app
from outrider.export.make.pair import PairPaths
from outrider.models.bundle.bundle import Bundle
from outrider.models.ingress.sockets import READY_PREFIX

ROOT = Path(__file__).parent.parent
LAPTOP = ROOT / "examples" / "laptop_npu" / "README.md"


def commands(*names: str) -> list[str]:
    """The laptop example's lines that begin with one of `names`."""
    found = [line for line in lines_of(LAPTOP) if line.split()[0] in names]
    assert found, f"no line begins with {names}"
    return found


def test_no_line_is_left_out() -> None:
    """What no test runs or parses is what sets up a machine."""
    ours = commands("outrider", "outrider-cloud", "outrider-export", "python")
    others = [line for line in lines_of(LAPTOP) if line not in ours]
    assert {line.split()[0] for line in others} == {"sudo", "ls", "pip"}
    assert set(re.findall(r"\"\.\[(\w+)\]\"", "\n".join(others))) == {"edge", "export"}


@pytest.fixture(scope="module")
def url(reference_pair: PairPaths) -> Iterator[str]:
    """The example's cloud, on a free port."""
    with cloud_process(reference_pair.target, None) as url:
        yield url


@pytest.fixture
def laptop(npu_pair: PairPaths, reference_pair: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The laptop's directory: the example's bundles have been copied to it, and the repository's examples are there."""
    shutil.copytree(npu_pair.draft, tmp_path / "bundles" / "npu")
    shutil.copytree(reference_pair.draft, tmp_path / "bundles" / "cpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    return tmp_path


def emulated(line: str, url: str) -> list[str]:
    """A line's arguments, its NPU emulated and its cloud where ours is."""
    arguments = [url if part == "http://127.0.0.1:8000" else part for part in shlex.split(line)[1:]]
    if "npu" in arguments and "--emulate-npu" not in arguments:
        arguments.append("--emulate-npu")
    return arguments


@pytest.mark.parametrize("line", [line for line in commands("outrider") if line.startswith("outrider run")])
def test_runs_of_the_example_give_the_targets_text(laptop: Path, url: str, outrider: Outrider, line: str) -> None:
    """On the emulated NPU, with the prompt and options of the document."""
    # Some drawn seeds end the text within 24 tokens; the same seed also gives the text without a draft.
    seed = [] if "--seed" in line else ["--seed", "7"]
    arguments = [*emulated(line, url), *seed, "--ignore-eos", "--max-tokens", "24", "--json"]
    document = json.loads(outrider(*arguments).out)
    draft = {"device": "npu", "is_emulated": True, "provider": "NPU path emulated on the CPU"}
    assert document["draft"].items() >= draft.items()
    assert len(document["tokens"]) == 24 and document["draft_error"] is None
    if "--compare" in line:
        assert document["identical"] is True and (document["speed_up"] is None) == bool(document["speed_up_unknown"])
    else:
        alone = [part for part in arguments if part != "--emulate-npu"]
        assert json.loads(outrider(*alone, "--mode", "cloud-only").out)["tokens"] == document["tokens"]


@pytest.mark.parametrize("line", commands("python"))
def test_placements_are_timed(
    laptop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """Every bundle has its row, and the fastest is named; which it is, is for the machine to say."""
    script, *bundles = emulated(line, "")
    arguments = [*bundles, *([] if "--emulate-npu" in bundles else ["--emulate-npu"]), "--runs", "3", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    shown = " ".join(capsys.readouterr().out.split())
    expected = ("bundles/npu", "bundles/cpu", "fastest: bundles/", "say nothing of an NPU")
    assert not ended.value.code and [words in shown for words in expected] == [True] * 4


def test_a_text_longer_than_the_exported_lengths_goes_on_without_drafts(
    laptop: Path, url: str, outrider: Outrider
) -> None:
    """From the NPU's last position on the cloud writes alone, and the summary says it once."""
    common = ["--cloud", url, "--draft", "bundles/npu", "--emulate-npu", "--max-tokens", "28", "--seed", "1"]
    common += ["--ignore-eos", "--mode", "stop-and-wait"]  # which drafts, whatever the draft's pace
    longest = json.loads(outrider("run", "def", *common, "--json").out)["draft"]["max_positions"]
    tokenizer = Bundle.open(laptop / "bundles" / "npu").tokenizer()
    tokens = tokenizer.encode("def median(values):\n    return sorted(values)[len(values) // 2]\n\n" * 40)
    assert len(tokens) > longest
    for num_prompt in (longest + 10, longest - 20):
        prompt = tokenizer.decode(tokens[:num_prompt])
        shown = outrider("run", prompt, *common).err
        assert shown.count("undrafted") == 1 and "drafting ended early" not in shown
        document = json.loads(outrider("run", prompt, *common, "--json").out)
        assert len(document["tokens"]) == 28 and (document["num_drafted"] > 0) == (num_prompt < longest)


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
def started(command: list[str], **environment: str) -> Iterator[tuple[str, int]]:
    """The URL and the process' id of a server that a command starts."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        assert process.stdout is not None
        try:
            ready = next((line for line in process.stdout if line.startswith(READY_PREFIX)), "")
            assert ready, f"{command} ended"
            yield ready.removeprefix(READY_PREFIX).strip(), process.pid
        finally:
            process.terminate()


yaml: Any = importlib.import_module("yaml")  # ships no types
COMPOSED: dict[str, Any] = yaml.safe_load((EXAMPLES / "two_machines" / "compose.yaml").read_text(encoding="utf-8"))


def composed_command(service: str, **places: str) -> list[str]:
    """A service's command with this machine's places, on a free loopback port."""
    here = {"0.0.0.0": "127.0.0.1", "8000": "0", "8077": "0"} | places
    name, *words = COMPOSED["services"][service]["command"]
    return [sys.executable, "-m", MODULES[name], *(here.get(word, word) for word in words), "--threads", "1"]


@pytest.fixture(scope="module")
def reference_cloud(reference_pair: PairPaths) -> Iterator[str]:
    """The compose file's cloud, as a process."""
    with started(composed_command("cloud", **{"/bundles/target": str(reference_pair.target)})) as (url, _):
        yield url


def text_of(url: str, headers: dict[str, str] | None = None) -> str:
    """A completion's text."""
    asked = {"prompt": "def walk(path):", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=60.0)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def test_both_machines_of_the_compose_file(reference_cloud: str, reference_pair: PairPaths) -> None:
    """Its commands as processes: the device asks for a key, and its text is the cloud's."""
    cloud, device = COMPOSED["services"]["cloud"], COMPOSED["services"]["device"]
    assert "ports" not in cloud and cloud["networks"] == ["link"] and COMPOSED["networks"]["link"]["internal"] is True
    assert device["ports"] == ["127.0.0.1:8077:8077"]
    places = {"/bundles/draft": str(reference_pair.draft), "http://cloud:8000": reference_cloud}
    with started(composed_command("device", **places), OUTRIDER_API_KEYS=KEY) as (url, _):
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
    rest = rest.replace("http://127.0.0.1:8000", reference_cloud).replace(
        "bundles/cpu", shlex.quote(str(reference_pair.draft))
    )
    script = f"{limit}exec {shlex.quote(sys.executable)} -m outrider.edge.cli {rest} --port 0"
    with running_on(frozenset({min(os.sched_getaffinity(0))})), started([shell, flag, script]) as (url, pid):
        assert text_of(url) == text_of(reference_cloud)
        status, limits = (Path(f"/proc/{pid}/{name}").read_text(encoding="ascii") for name in ("status", "limits"))
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None and int(peak[1]) < 1_000_000
    assert re.search(r"Max data size\s+1073741824", limits) and re.search(r"Cpus_allowed_list:\s+\d+\n", status)
