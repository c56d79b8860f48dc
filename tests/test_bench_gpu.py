"""Runs `bench.gpu` in its smallest form on a processor, so that it does not rot before there is a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bench.gpu import __main__ as command
from bench.gpu import exact, host, load, needs, round_trips, steps
from bench.gpu.needs import Found, Need
from bench.gpu.place import SMALL, Run

from outrider.export.check.runner import where_to_check
from outrider.export.make.pair import PairPaths
from outrider.export.recipes import ExportOptions
from outrider.models.errors import RuntimeUnavailable
from outrider.models.picks.sampling_torch import noise_bits, pick_rows
from outrider.models.version import outrider_version

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # its profiler says what it lacks on this machine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the parts keep the bundles that they share."""
    yield tmp_path_factory.mktemp("gpu")


def run_of(number: int, made: Path, out: Path, **more: object) -> Run:
    """One part on this processor, with sizes of `SMALL` replaced by `more`."""
    return Run(number, out, made, "cpu", replace(SMALL, **more), 600.0)  # type: ignore[arg-type]


def test_the_sampler_and_the_texts_are_compared(made: Path, tmp_path: Path) -> None:
    """Part 1: nothing differs on a processor, and the JSON has each figure."""
    run = run_of(1, made, tmp_path, texts=1, tokens=6, sessions=(2,))
    assert exact.measure(run) == []
    found = json.loads(run.path.read_text(encoding="utf-8"))
    assert found["hash"]["different"] == 0 and found["hash"]["words"] > 1000
    assert {name: each["different"] for name, each in found["picks"].items()} == dict.fromkeys(exact.SAMPLINGS, 0)
    assert found["texts_f32"]["reference target"]["texts"] == 1
    assert found["shapes_f32"]["2 sequences, 8 tokens each"]["max_over_std"] < 1e-4
    assert found["shapes_bf16"]["2 sequences, 8 tokens each"]["greedy"] == 8
    drafted = found["bitwise"].pop("drafted tokens")
    assert found["bitwise"] == {"tokens": 42, "with trees of drafts": 0, "alone": 0}
    assert drafted["accepted"] > 0 and drafted["rejected"] > 0
    assert found["device"] == {"kind": "cpu", "is_hardware": False}


def test_a_sampler_that_differs_is_told(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pick that numpy does not make is no near tie; a wrong word of the hash is counted."""
    monkeypatch.setattr(exact, "pick_rows", lambda *given: [(token or 0) ^ 1 for token in pick_rows(*given)])
    monkeypatch.setattr(exact, "torch_noise_bits", lambda *given: noise_bits(*given) ^ 1)
    run = run_of(1, made, tmp_path, rows=2, vocab=64)
    assert "384 words" in exact._hashes(run)[0]
    assert len(exact._picks(run)) == len(exact.SAMPLINGS)


def test_what_has_no_time_is_named(made: Path, tmp_path: Path) -> None:
    """A part that is over its limit leaves the rest out, and says so."""
    run = run_of(1, made, tmp_path)
    run.limit_s = 0.0
    assert exact.measure(run) == []
    assert run.left_out == ["texts in f32", "shapes in f32", "texts in bf16", "shapes in bf16", "bitwise"]


def test_a_step_needs_few_launches_beside_its_graph() -> None:
    """As many for a tree as for one token each."""
    counts = {host.launches(host.PLAIN, parents) for parents in host.TREES}
    assert len(counts) == 1 and max(counts) < host.MOST_LAUNCHES


def test_steps_are_timed_against_the_floor(made: Path, tmp_path: Path) -> None:
    """Part 2: each model at each number of sequences, and a profile with the product's own operations."""
    run = run_of(2, made, tmp_path, sessions=(2,))
    assert steps.measure(run) == []
    found = json.loads(run.path.read_text(encoding="utf-8"))
    for name in ("widened target", "8B shape"):
        (cell,) = found[name]["sessions"].values()
        assert cell["floor_ms"] > 0 and cell["steps_per_s"] > 0 and cell["engine_steps_per_s"] > 0
        assert {row["name"] for row in cell["profile"]["host"]} >= {"aten::mm"}
    assert not (made / "random").exists()  # 16 GB, where it is an 8B shape


def test_round_trips_and_load_run_on_given_bundles(
    made: Path, tmp_path: Path, reference_pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts 3 and 4: sessions of every kind; texts equal cloud-only's. In OpenVINO, whose servers start at once."""
    monkeypatch.setattr(Run, "target", lambda _: reference_pair.target)
    run = run_of(3, made, tmp_path, tokens=12)
    run.draft = reference_pair.draft
    assert not [miss for miss in round_trips.measure(run) if "differ" in miss]
    (place,) = run.found["round_trips"][0]["round_trips"]
    assert set(place["modes"]) == {"cloud_only", "path", "tree", "tree_always_wrong"}
    run = run_of(4, made, tmp_path, tokens=12)
    run.draft = reference_pair.draft
    assert not [miss for miss in load.measure(run) if "differ" in miss]
    (count,) = run.found["load"][0]["sessions"].values()
    assert set(count) == {"cloud-only", "stream", "verify", "auto", "json", "logprobs"}
    assert run.found["capacity"]["tokens_per_s"].keys() == {"beside", "devices", "batched"}


def test_needs_are_one_list_with_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing has the command that brings it; nothing runs without what all parts need."""
    wheel, gone = Need("pydantic", "no_such_module", "2.14.3"), Need("torch-for-nobody", "no_such_module")
    new = Need("typer", "typer", "0.25.1", below=(0, 1))
    partly = Need("no-such-package", "no_such_module", what="a part")
    assert needs.is_enough([Found(partly, None, "missing")])
    monkeypatch.setattr(needs, "NEEDS", (wheel, gone, new, partly))
    assert command.main(["--needs"]) == 2
    told = capsys.readouterr().out
    assert "does not import" in told and "too new; expected below 0.1" in told and "(only for a part)" in told
    assert "pydantic==2.14.3 typer==0.25.1" in told and "No wheel of torch-for-nobody" in told
    assert sys.version.split()[0] in told and needs.install() in told


def test_needs_name_what_the_parts_declare() -> None:
    """A dependency of the server or of the shared floor that is new has to be on the list."""
    import tomllib

    project = tomllib.loads((needs.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {each.split(">")[0].split("=")[0].split("[")[0].strip() for each in project["dependencies"]}
    assert declared <= {need.name for need in needs.NEEDS}


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, the agent and the exporter say "source" there; none of them asks for metadata by itself."""
    monkeypatch.setattr(importlib.metadata, "version", _no_package)
    assert outrider_version() == "source"
    asking = [path for part in needs.PARTS for path in (needs.ROOT / part / "outrider").rglob("*.py")]
    assert [path.name for path in asking if 'version("outrider")' in path.read_text("utf-8")] == ["version.py"]


def _no_package(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_an_openvino_check_without_openvino_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback where only torch and onnxruntime are there."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RuntimeUnavailable, match=r"openvino.*pip install"):
        where_to_check(ExportOptions("draft", "int4", "openvino", device="gpu"))
