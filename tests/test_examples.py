"""The examples' commands: parsed, and run as far as they can be without the hardware that they are about."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.commands import lines_of

from outrider.edge.cli import main as edge_cli
from outrider.edge.lab.laboratory import cloud_process
from outrider.export.make.pair import PairPaths
from outrider.models.bundle.bundle import Bundle

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
    extras = {extra for line in others for extra in re.findall(r"\"\.\[(\w+)\]\"", line)}
    assert extras == {"edge", "export"}


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


def run_edge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """What `outrider ARGUMENTS` prints, its text first."""
    monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
    with pytest.raises(SystemExit) as ended:
        edge_cli.main()
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err
    return shown.out if "--json" in arguments else shown.out + shown.err


def emulated(line: str, url: str) -> list[str]:
    """A line's arguments, its NPU emulated and its cloud where ours is."""
    arguments = [url if part == "http://127.0.0.1:8000" else part for part in shlex.split(line)[1:]]
    if "npu" in arguments and "--emulate-npu" not in arguments:
        arguments.append("--emulate-npu")
    return arguments


@pytest.mark.parametrize("line", [line for line in commands("outrider") if line.startswith("outrider run")])
def test_runs_of_the_example_give_the_targets_text(
    laptop: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """On the emulated NPU, with the prompt and options of the document."""
    # Some drawn seeds end the text within 24 tokens; the same seed also gives the text without a draft.
    seed = [] if "--seed" in line else ["--seed", "7"]
    arguments = [*emulated(line, url), *seed, "--ignore-eos", "--max-tokens", "24", "--json"]
    document = json.loads(run_edge(monkeypatch, capsys, arguments))
    assert document["draft"]["device"] == "npu" and document["draft"]["is_emulated"]
    assert document["draft"]["provider"] == "NPU path emulated on the CPU"
    assert len(document["tokens"]) == 24 and document["draft_error"] is None
    if "--compare" in line:
        assert document["identical"] is True and (document["speed_up"] is None) == bool(document["speed_up_unknown"])
    else:
        alone = [part for part in arguments if part != "--emulate-npu"]
        alone += ["--mode", "cloud-only"]
        assert json.loads(run_edge(monkeypatch, capsys, alone))["tokens"] == document["tokens"]


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second thing that the example tells to type."""
    assert "outrider devices" in commands("outrider")
    assert "CPU" in run_edge(monkeypatch, capsys, ["devices"])


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
    assert not ended.value.code and "bundles/npu" in shown and "bundles/cpu" in shown
    assert "fastest: bundles/" in shown and "say nothing of an NPU" in shown


def test_a_text_longer_than_the_exported_lengths_goes_on_without_drafts(
    laptop: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the NPU's last position on the cloud writes alone, and the summary says it once."""
    common = ["--cloud", url, "--draft", "bundles/npu", "--emulate-npu", "--max-tokens", "28", "--seed", "1"]
    common += ["--ignore-eos", "--mode", "stop-and-wait"]  # which drafts, whatever the draft's pace
    longest = json.loads(run_edge(monkeypatch, capsys, ["run", "def", *common, "--json"]))["draft"]["max_positions"]
    tokenizer = Bundle.open(laptop / "bundles" / "npu").tokenizer()
    tokens = tokenizer.encode("def median(values):\n    return sorted(values)[len(values) // 2]\n\n" * 40)
    assert len(tokens) > longest
    for num_prompt in (longest + 10, longest - 20):
        prompt = tokenizer.decode(tokens[:num_prompt])
        shown = run_edge(monkeypatch, capsys, ["run", prompt, *common])
        assert shown.count("undrafted") == 1 and "drafting ended early" not in shown
        document = json.loads(run_edge(monkeypatch, capsys, ["run", prompt, *common, "--json"]))
        assert len(document["tokens"]) == 28 and (document["num_drafted"] > 0) == (num_prompt < longest)
