"""Runs benches in their smallest forms: `bench.gpu` on a processor, so that it does not rot before there is a GPU,
`bench.soak`, where kills and faults of the link strike real processes, and `bench.side_channel`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from bench.eavesdropper import Read, Trace, padded
from bench.gpu import benches, host, needs, steps
from bench.gpu.place import SMALL, Run
from bench.side_channel import Lane, main
from bench.soak import ALONE, Plan, run, too_few
from bench.soak_faults import FAULTS
from bench.soak_texts import Case, Ledger, make_cases
from rich.console import Console
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.serving import fake_tokenizer, serve_fake

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.laboratory import Lab, open_lab
from outrider.edge.results import GenerationRequest
from outrider.export.check.runner import where_to_check
from outrider.export.make.pair import PairPaths
from outrider.export.recipes import ExportOptions
from outrider.models.errors import RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams
from outrider.models.version import outrider_version

# Its profiler says what it lacks on this machine.
warns = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the parts keep the bundles that they share."""
    return tmp_path_factory.mktemp("gpu")


def run_of(number: int, made: Path, out: Path, **more: object) -> Run:
    """One part on this processor, with sizes of `SMALL` replaced by `more`."""
    return Run(number, out, made, "cpu", replace(SMALL, **more), 600.0)  # type: ignore[arg-type]


@warns
def test_bitwise_texts_are_compared(made: Path, tmp_path: Path) -> None:
    """Part 5: nothing differs, and drafts of both kinds were there."""
    run = run_of(5, made, tmp_path, tokens=6, sessions=(2,))
    assert steps.bitwise(run) == []
    drafted = run.found["bitwise"].pop("drafted tokens")
    assert run.found["bitwise"] == {"tokens": 42, "with trees of drafts": 0, "alone": 0}
    assert drafted["accepted"] > 0 and drafted["rejected"] > 0


@warns
def test_a_step_needs_few_launches_beside_its_graph() -> None:
    """As many for a tree as for one token each; where rows are truncated, too, few."""
    for kind in host.KINDS:
        counts = {host.launches(kind, parents) for parents in host.TREES}
        assert max(counts) < host.MOST_LAUNCHES
        assert kind != "plain" or len(counts) == 1


@warns
def test_steps_are_timed_against_the_floor(made: Path, tmp_path: Path) -> None:
    """Part 2: each model at each number of sequences, and a profile with the product's own operations."""
    run = run_of(2, made, tmp_path, sessions=(2,))
    assert steps.measure(run) == []
    found = json.loads(run.path.read_text(encoding="utf-8"))
    for name in ("widened target", "8B shape"):
        (cell,) = found[name]["sessions"].values()
        assert cell["floor_ms"] > 0 and cell["steps_per_s"] > 0 and cell["engine_steps_per_s"] > 0
        assert {row["name"] for row in cell["profile"]["host"]} >= {"aten::mm"}
    assert found["device"] == {"kind": "cpu", "is_hardware": False}
    assert not (made / "random").exists()  # 16 GB, where it is an 8B shape


@warns
def test_round_trips_and_load_run_on_given_bundles(
    made: Path, tmp_path: Path, reference_pair: PairPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts 3 and 4: sessions of every kind; texts equal cloud-only's. In OpenVINO, whose servers start at once."""
    monkeypatch.setattr(Run, "target", lambda _: reference_pair.target)
    run = run_of(3, made, tmp_path, tokens=12)
    run.draft = reference_pair.draft
    assert not [miss for miss in benches.round_trips(run) if "differ" in miss]
    (place,) = run.found["round trip of 0 ms"]["round_trips"]
    assert set(place["modes"]) == {"cloud_only", "path", "tree", "tree_always_wrong"}
    run = run_of(4, made, tmp_path, tokens=12)
    run.draft = reference_pair.draft
    assert not [miss for miss in benches.sessions(run) if "differ" in miss]
    (count,) = run.found["1 sessions"]["sessions"].values()
    assert set(count) == {"cloud-only", "stream", "verify", "auto"}
    assert run.found["capacity"]["tokens_per_s"].keys() == {"beside", "devices", "batched"}


def test_needs_name_what_the_parts_declare() -> None:
    """A dependency of the server or of the shared floor that is new has to be on the list."""
    import tomllib

    project = tomllib.loads((needs.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {each.split(">")[0].split("=")[0].split("[")[0].strip() for each in project["dependencies"]}
    assert declared <= set(needs.names())


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, the agent and the exporter say "source" there; none of them asks for metadata by itself."""
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert outrider_version() == "source"
    asking = [path for part in needs.PARTS for path in (needs.ROOT / part / "outrider").rglob("*.py")]
    assert [path.name for path in asking if 'version("outrider")' in path.read_text("utf-8")] == ["version.py"]


def test_an_openvino_check_without_openvino_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback where only torch and onnxruntime are there."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RuntimeUnavailable, match=r"openvino.*pip install"):
        where_to_check(ExportOptions("draft", "int4", "openvino", device="gpu"))


# -- bench.soak in small: its hour, with memory limits, replicas and Redis, is `make soak` -----------------------------

strikes = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)
NAMES = [name for name, fault in FAULTS.items() if not fault.is_replicated and "memory" not in name]
LONGEST_S = 0.3


@pytest.fixture(scope="module")
def lab(reference_pair: PairPaths) -> Iterator[Lab]:
    """The pair, with a verifier that writes alone."""
    with open_lab(reference_pair.target, reference_pair.draft, cloud_options=ALONE) as lab:
        yield lab


@pytest.fixture(scope="module")
def cases(lab: Lab) -> list[Case]:
    """One of each sampling, with processors and inside a grammar too."""
    return make_cases(lab, 1, 40)


@strikes
def test_faults_change_no_text(lab: Lab, cases: list[Case]) -> None:
    """Each kind strikes in mid-text; every text is its twin, and only kills end one before it is asked for again."""
    ledger, _ = run(lab, cases, NAMES, Plan(longest_s=LONGEST_S), Console(quiet=True))
    assert ledger.missed == [] and not ledger.different
    assert {name for name, num in ledger.ended.items() if num} <= {"agent killed", "verifier killed"}
    assert ledger.injected == dict.fromkeys(NAMES, 1) and all(ledger.struck[name] >= 1 for name in NAMES)
    assert ledger.num_accepted > 0 and ledger.accepted.total() > 0


@strikes
def test_a_wrong_token_is_caught(lab: Lab, cases: list[Case]) -> None:
    """One token that is changed on its way: the run names the text and the place."""
    ledger, _ = run(lab, cases, ["connections cut"], Plan(plant=True), Console(quiet=True))
    assert len(ledger.missed) == 1 and ledger.missed[0].startswith("DIFFERENT: ") and ledger.different.total() == 1


def test_an_hour_has_enough_of_everything() -> None:
    """Texts and each fault, in its share; what cannot be made here is not asked for."""
    (first, second), ledger = NAMES[:2], Ledger()
    assert too_few(ledger, [first], 0.0) == []
    ledger.injected[first], ledger.num_equal[""], ledger.accepted[first] = 19, 500, 1
    assert too_few(ledger, [first], 60.0) == [f"{first}: 19 times; expected at least 20"]
    missed = too_few(ledger, [first, second], 90.0)
    assert len(missed) == 4 and f"{second}: nothing was drafted after it" in missed


# -- what an eavesdropper of bench.side_channel records and learns -----------------------------------------------------


def test_the_wire_is_heard_from_the_first_token_on() -> None:
    """Both directions, from a read that comes down to the window's end, and the opening apart."""
    size = fake_tokenizer().size
    requests = [
        GenerationRequest(
            prompt=tuple(5 + at % 20 for at in range(length)),
            params=SamplingParams(temperature=0.3, seed=number),
            max_tokens=512,
            stop_ids=frozenset(),
            ignore_eos=True,
        )
        for number, length in enumerate((4, 400, 4))
    ]
    texts = tuple((number == 2, number, request) for number, request in enumerate(requests))
    runtime = FakeBatchRuntime(vocab_size=size, on_step=lambda batch: time.sleep(0.01))
    drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=size, agreement=0.8))
    with serve_fake(runtime=runtime) as server:
        short, long, steady = asyncio.run(Lane(4.0, 0.5, 0.3, texts).listen(server.url, drafter))
    assert (short.prompt, long.prompt) == (0, 1) and short.opening < long.opening < steady.opening
    sizes = [read.num_bytes for read in steady.reads if read.is_up]
    assert not any(size % min(sizes) for size in sizes)  # several may come in one read
    for trace in (short, long, steady):
        assert trace.num_tokens > 0 and {read.is_up for read in trace.reads} == {False, True}
        assert trace.reads[0].at_s == 0.0 and not trace.reads[0].is_up
        assert all(0.0 <= read.at_s < 0.3 for read in trace.reads)


def _traces(sizes: dict[int, int], seeds: int = 8) -> list[Trace]:
    """Of prompts whose reads down are this large, at random times; and steady ones, which are all alike."""
    chance = random.Random(1)
    frames = tuple(Read(at * 0.02, at % 2 == 1, 256) for at in range(40))
    return [Trace(prompt, seed, 4300, 38, frames, is_steady=True) for prompt in sizes for seed in range(seeds)] + [
        Trace(
            prompt,
            seed,
            opening=500 + 10 * prompt,
            num_tokens=40,
            reads=tuple(
                Read(at * 0.05 + chance.random() / 100, at % 2 == 1, size + chance.randrange(2)) for at in range(20)
            ),
        )
        for prompt, size in sizes.items()
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(("sizes", "code"), [((40, 50, 60, 70), 0), ((40, 40, 40, 40), 1)])
def test_prompts_are_named_by_sizes_alone(
    sizes: tuple[int, ...],
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A classifier that cannot tell them fails, because it shows nothing of what hides them."""
    monkeypatch.setattr("bench.eavesdropper.NUM_TREES", 20)
    monkeypatch.setattr("bench.side_channel.record", lambda options: _traces(dict(enumerate(sizes))))
    assert main(["--prompts", "4", "--train", "5", "--test", "3"]) == code
    assert ("100.0%" in capsys.readouterr().out.split("as it is")[1].splitlines()[0]) == (code == 0)


def test_padding_leaves_times_only() -> None:
    """One size per direction, the greatest, and one opening."""
    before = [trace for trace in _traces({0: 40, 1: 90}) if not trace.is_steady]
    after = padded(before)
    assert {(read.is_up, read.num_bytes) for trace in after for read in trace.reads} == {(False, 91), (True, 91)}
    assert {trace.opening for trace in after} == {510}
    times_before, times = ([[read.at_s for read in trace.reads] for trace in traces] for traces in (before, after))
    assert times == times_before
