"""Tests `outrider demo` from the outside: a process, its figures, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import typer.main
from rich.console import Console
from tests.commands import screen

from outrider.edge.cli.command_options import DemoOptions
from outrider.edge.cli.demo_run import (
    KEPT_MS,
    RTTS_MS,
    WARM_UP,
    _rounded,
    _tree,
    run_demo,
    short_round_trip_note,
    show_figures,
    show_plan,
    show_sweep,
)
from outrider.edge.cli.draft_source import NPU_SHAPES, draft_kind
from outrider.edge.devices.discovery import find_runtime
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.drafting.depth import Effort
from outrider.edge.lab.comparison import MARGIN, ModeFigures, TextTime, TimePlan, compare, plan_texts
from outrider.edge.lab.laboratory import CLOUD_ONLY, STOP_AND_WAIT, STREAM
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.results import GenerationResult, Mode, Source
from outrider.export.cli import main as export_cli
from outrider.export.make.pair import PairPaths
from outrider.models.bundle.reference_export import export_arguments
from outrider.models.errors import ConfigError

KEYS = {
    *("tokens_per_s", "ttft_ms", "itl_ms_p50", "itl_ms_p95", "acceptance_rate", "tokens_per_pass", "passes_per_token"),
    *("bytes_up_per_token", "bytes_down_per_token", "identical"),
}
TIMEOUT_S = 300.0


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "outrider.edge.cli", "demo", "--widen", "0", *arguments]


def test_the_demo_shows_one_text_in_every_mode_and_writes_its_figures(reference_cache: Path, tmp_path: Path) -> None:
    """A short run over a real round trip: the schema is complete, and every mode gave cloud-only's text."""
    path = tmp_path / "demo.json"
    finished = subprocess.run(
        _command("--rtt-ms", "4", "--prompts", "2", "--max-tokens", "48", "--json", str(path)),
        env=os.environ | {"OUTRIDER_CACHE": str(reference_cache)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stderr
    document = json.loads(path.read_text())
    pair, modes = document["pair"], document["modes"]
    assert document.keys() == {"pair", "rtt_ms", "modes", "left_out", "machine_load"}
    assert (document["rtt_ms"], document["left_out"]) == (4.0, [])
    shown = "Measures 2 texts of 48 tokens at a round trip of 4 ms", "drafted by: int8, OpenVINO on the CPU"
    assert all(words in finished.stdout for words in (*shown, "stop-and-wait", "yes"))
    drafted_by = {"runtime": "openvino", "device": "cpu", "precision": "int8", "notes": []}
    assert drafted_by.items() <= pair["drafted_by"].items()
    assert pair["target"]["parameters"] > 10 * pair["draft"]["parameters"]
    assert list(modes) == ["cloud_only", "stop_and_wait", "stream"]
    for mode, figures in modes.items():
        assert figures["identical"] is True and figures["num_tokens"] == 96, mode
        assert all(isinstance(figures[key], int | float) for key in KEYS)
        assert figures["tokens_per_s"] > 0 and figures["ttft_ms"] > 4.0
    assert (modes["cloud_only"]["passes_per_token"], modes["cloud_only"]["hits_per_token"]) == (1.0, 0.0)
    assert modes["stop_and_wait"]["passes_per_token"] < 1.0 and modes["stop_and_wait"]["hits_per_token"] > 0.1


def test_the_demo_drafts_on_an_emulated_npu(reference_cache: Path, npu_pair: PairPaths, tmp_path: Path) -> None:
    """The laptop's demonstration, anywhere: another draft, the same texts, and nobody takes it for an NPU."""
    path = tmp_path / "demo.json"
    finished = subprocess.run(
        _command("--emulate-npu", "--rtt-ms", "4", "--prompts", "1", "--max-tokens", "12", "--json", str(path)),
        env=os.environ | {"OUTRIDER_CACHE": str(reference_cache)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stderr
    assert "draft: " not in finished.stderr, "the fixture's pair is not the demo's own"
    document, shown = json.loads(path.read_text()), " ".join(finished.stdout.split())
    drafted_by = {"device": "npu", "is_emulated": True, "notes": []}
    assert drafted_by.items() <= document["pair"]["drafted_by"].items()
    assert all(figures["identical"] for figures in document["modes"].values())
    assert document["modes"]["stop_and_wait"]["acceptance_rate"] > 0.0
    assert "drafted by: int8, OpenVINO's NPU path emulated on the CPU" in shown
    assert "emulated on the CPU: text, acceptance and code are an NPU's, the times are not" in shown


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        (DraftChoice(), ["--draft-device", "cpu"]),
        (DraftChoice("ngram"), ["--draft-device", "cpu"]),
        (DraftChoice("onnxruntime", "cpu"), ["--draft-device", "cpu", "--draft-runtime", "onnxruntime"]),
        (
            DraftChoice(emulate_npu=True),
            [
                *("--draft-device", "npu", "--prompt-len", str(NPU_SHAPES.prompt_len)),
                *("--response-len", str(NPU_SHAPES.response_len)),
            ],
        ),
    ],
)
def test_the_demo_exports_the_draft_that_was_asked_for(choice: DraftChoice, asked: list[str]) -> None:
    """By device and runtime, in words that the exporter's command line understands; it has tests of its own."""
    arguments = export_arguments(700.0, *draft_kind(choice))
    assert arguments == ["pair", "reference", "--cached", "--json", "--widen", "700", *asked]
    group = typer.main.get_command(export_cli.app)
    assert isinstance(group, click.Group)
    group.commands["pair"].make_context("pair", list(arguments[1:]))


def test_the_demo_says_at_once_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is exported or shown: the package, and the command that installs it."""
    for package in ("torch", "outrider.reference", "fastapi"):
        code = (
            f"import sys; sys.modules[{package!r}] = None; sys.argv = ['outrider', 'demo']\n"
            "from outrider.edge.cli.__main__ import main; main()"
        )
        finished = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"OUTRIDER_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert finished.returncode == 2 and finished.stdout == ""
        needed = rf'[^\n]*needs the package {package!r}[^\n]*pip install "outrider\[all\]"[^\n]*\n'
        assert re.fullmatch(needed, finished.stderr)
    assert not list(tmp_path.iterdir())


def test_the_demos_tree_is_that_of_its_options() -> None:
    """A wrong width is found before the export; the right one reaches the stream agent."""
    tree = _tree(DemoOptions(width="2", effort=Effort.LOW, lookup=False))
    assert (tree.tree.width, tree.effort, tree.is_looked_up) == (2, Effort.LOW, False)
    assert _tree(DemoOptions()) == AgentOptions()
    with pytest.raises(ConfigError, match="width is '9'; expected auto or a number, 1 to 8"):
        run_demo(DemoOptions(width="9"), Console(quiet=True))


def test_figures_that_cannot_be_written_are_refused_at_once(tmp_path: Path) -> None:
    """Not after minutes of measuring."""
    DemoOptions(json=tmp_path / "demo.json")
    for place in (tmp_path, tmp_path / "missing" / "demo.json"):
        with pytest.raises(ConfigError, match="cannot be written"):
            DemoOptions(json=place)


FAST = [TextTime(10.0, 0.1, 0.01, 0.0), TextTime(10.0, 0.1, 0.01, 0.0), TextTime(10.0, 0.1, 0.005, 0.4)]
SLOW = [replace(each, token_s=30 * each.token_s) for each in FAST]


@pytest.mark.parametrize(
    ("times", "left_s", "rtts_ms", "num_texts", "max_tokens"),
    [
        (FAST, 1000.0, RTTS_MS, 6, 64),
        (FAST, 60.0, RTTS_MS, 4, 64),
        (SLOW, 900.0, RTTS_MS, 3, 64),
        (SLOW, 230.0, KEPT_MS, 1, 64),
        (SLOW, 150.0, KEPT_MS, 1, 32),
        (SLOW, 0.0, KEPT_MS, 1, 16),
    ],
)
def test_what_fits_into_the_time_is_decided_before(
    times: list[TextTime], left_s: float, rtts_ms: tuple[float, ...], num_texts: int, max_tokens: int
) -> None:
    """As many texts as fit at every round trip; 0 and 100 ms always. One more text would not have fitted."""
    plan = plan_texts(times, RTTS_MS, KEPT_MS, 6, 64, WARM_UP, left_s)
    assert (plan.rtts_ms, plan.num_texts, plan.max_tokens) == (rtts_ms, num_texts, max_tokens)
    took_s = sum(each.at(rtt, WARM_UP) + num_texts * each.at(rtt, max_tokens) for rtt in rtts_ms for each in times)
    assert plan.seconds == pytest.approx(MARGIN * took_s)
    assert plan.seconds <= left_s or not left_s
    text_s = MARGIN * sum(each.at(rtt, max_tokens) for rtt in rtts_ms for each in times)
    assert num_texts == 6 or plan.seconds + text_s > left_s


def test_the_time_of_a_text_is_that_of_its_trial() -> None:
    """At its own round trip; a mode that waits for every pass takes longer by each of them at another."""
    streamed = GenerationResult(
        *(Mode.STREAM, tuple(range(5)), (Source.TARGET,) * 5, (0.5, 0.7, 0.7, 0.9, 1.3), "length", 3, 0, 0, 0)
    )
    waiting = replace(streamed, mode=Mode.STOP_AND_WAIT, num_passes=4)
    for result, trips in ((streamed, 0), (waiting, 4)):
        time = TextTime.of(result, 10.0)
        assert time.at(10.0, 5) == pytest.approx(0.5 + 5 * 0.2)
        assert time.at(110.0, 5) == pytest.approx(time.at(10.0, 5) + 0.1 * (1 + trips))
    assert TextTime.of(replace(streamed, tokens=(1,), arrival_s=(0.5,)), 10.0).at(0.0, 64) == pytest.approx(0.49)


def test_the_demo_says_before_it_measures_what_it_measures() -> None:
    """How many texts, where, for how long; and what would take longer."""
    console, out = screen(width=80)
    show_plan(console, TimePlan((0.0, 10.0, 100.0), 1, 32, 99.6), ["5 of 6 texts", "the round trip of 50 ms"], 120.0)
    show_plan(console, TimePlan((4.0,), 2, 64, 8.0), [], 120.0)
    assert out.getvalue().splitlines() == [
        "Measures 1 text of 32 tokens at round trips of 0, 10 and 100 ms, in three modes in turn: about 100 s.",
        "120 s are too short for 5 of 6 texts and the round trip of 50 ms; --max-seconds 240 measures more.",
        "Measures 2 texts of 64 tokens at a round trip of 4 ms, in three modes in turn: about 8 s.",
    ]


def figures(**changes: Any) -> ModeFigures:
    """Figures as wide as they get."""
    values = ModeFigures(
        *(
            1234.5,
            12345.0,
            1.0,
            1.0,
            0.7512,
            0.9312,
            12.34,
            0.0812,
            1234.0,
            1234.0,
            1.0,
            1.0,
            0.9312,
            12.34,
            True,
            0,
            6,
            384,
        )
    )
    return replace(values, **changes)


def short_text(num_tokens: int) -> GenerationResult:
    """A text that arrives in one burst after its first token."""
    arrival_s = (0.1, *[0.1001] * (num_tokens - 1))
    return GenerationResult(
        *(Mode.STREAM, tuple(range(num_tokens)), (Source.TARGET,) * num_tokens, arrival_s, "length", 2, 0, 0, 0)
    )


def test_a_text_too_short_for_a_rate_has_none() -> None:
    """Neither has the ratio: a dash on the screen, null in the file; as `outrider run` reports it."""
    modes, (console, out) = compare({CLOUD_ONLY: [short_text(8)], STREAM: [short_text(8)]}, CLOUD_ONLY), screen()
    show_figures(console, modes, 10.0)
    rows = {line.split("  ")[0]: line.split()[-2:] for line in out.getvalue().splitlines()}
    assert rows["speed-up"] == rows["tokens/s"] == ["-", "-"] and rows["first token, ms"] == ["100", "100"]
    found = modes[STREAM]
    rounded = [_rounded(each) for each in (found.tokens_per_s, found.speed_up, found.ttft_ms, found.num_tokens)]
    assert rounded == [None, None, 100.0, 8]


@pytest.mark.parametrize("width", [60, 100])
def test_the_demos_tables_keep_their_numbers_on_a_narrow_terminal(width: int) -> None:
    """Nothing is cut or folded; a number that there is not is a dash."""
    console, out = screen(width=width)
    modes = {
        CLOUD_ONLY: figures(speed_up=1.0),
        STOP_AND_WAIT: figures(tokens_per_s=math.nan, speed_up=math.nan),
        STREAM: figures(identical=False, num_different=12),
    }
    show_figures(console, modes, 10.0)
    show_sweep(console, dict.fromkeys((0.0, 10.0, 50.0, 100.0), modes))
    shown = out.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    rows = {line.split("  ")[0].strip(): " ".join(line.split()) for line in shown.splitlines()}
    for name, values in (
        ("speed-up", "1.00x - 12.34x"),
        ("tokens/s", "1234.5 - 1234.5"),
        ("first token, ms", "12345 12345 12345"),
        ("from accepted drafts", "- 93 % 93 %"),
        ("same text", "yes yes 12 not"),
        ("stream", "12.34x 12.34x 12.34x 12.34x"),
    ):
        assert rows[name] == f"{name} {values}"


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_behind(
    reference_cache: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C, or being told to end, in the middle of the first text ends cloud and network too."""
    errors = tmp_path / "stderr"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            _command("--rtt-ms", "20", "--max-tokens", "256"),
            env=os.environ | {"OUTRIDER_CACHE": str(reference_cache), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "accepted drafts are green" in line:
                break
        else:
            pytest.fail(f"the demo ended before its first text: {errors.read_text()}")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2, f"the cloud and the network, not {[child.cmdline() for child in children]}"
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(TIMEOUT_S) == (130 if number == signal.SIGINT else -number)
        _, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
        assert not alive
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_demo_asks_for_the_device_before_it_exports_anything(tmp_path: Path) -> None:
    """Where there is no NPU it says so at once, and what would help; nothing is left in the cache."""
    if find_runtime("openvino").has("npu"):
        pytest.skip("this machine has an NPU")
    finished = subprocess.run(
        _command("--draft-device", "npu"),
        env=os.environ | {"OUTRIDER_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 2 and not list(tmp_path.iterdir())
    assert re.fullmatch(r"[^\n]*sees no NPU on this machine[^\n]*--emulate-npu[^\n]*\n", finished.stderr)


def test_a_lead_of_stop_and_wait_is_explained() -> None:
    """Only where it leads; a speed-up that cannot be known explains nothing."""
    for waiting, streaming, is_explained in ((1.9, 1.8, True), (1.8, 1.9, False), (float("nan"), 1.0, False)):
        modes = {STOP_AND_WAIT: figures(speed_up=waiting), STREAM: figures(speed_up=streaming)}
        assert (short_round_trip_note(modes) is not None) == is_explained
