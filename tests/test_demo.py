"""`outrider demo` from the outside: a process, its figures, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from outrider.edge.cli import main as cli
from outrider.edge.cli.demo_run import NPU_SHAPES
from outrider.edge.devices.discovery import find_runtime
from outrider.export.make.pair import PairPaths

KEYS = {
    *("tokens_per_s", "ttft_ms", "itl_ms_p50", "itl_ms_p95", "acceptance_rate", "tokens_per_pass", "passes_per_token"),
    *("bytes_up_per_token", "bytes_down_per_token", "identical"),
}
TIMEOUT_S = 300.0


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "outrider.edge.cli.main", "demo", "--widen", "0", *arguments]


def test_the_demo_shows_one_text_in_every_mode_and_writes_its_figures(reference_cache: Path, tmp_path: Path) -> None:
    """A short run over a real round trip: the schema is complete, and every mode gave cloud-only's text."""
    path = tmp_path / "demo.json"
    finished = subprocess.run(
        _command("--rtt-ms", "4", "--prompts", "2", "--max-tokens", "16", "--json", str(path)),
        env=os.environ | {"OUTRIDER_CACHE": str(reference_cache)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stderr
    document = json.loads(path.read_text())
    assert set(document) == {"pair", "rtt_ms", "modes"}
    assert document["rtt_ms"] == 4.0
    drafted_by = document["pair"]["drafted_by"]
    assert (drafted_by["runtime"], drafted_by["device"], drafted_by["precision"]) == ("openvino", "cpu", "int8")
    assert drafted_by["notes"] == [] and "drafted by: int8, OpenVINO on the CPU" in finished.stdout
    assert document["pair"]["target"]["parameters"] > 10 * document["pair"]["draft"]["parameters"]
    assert list(document["modes"]) == ["cloud_only", "stop_and_wait", "stream"]
    for mode, figures in document["modes"].items():
        assert set(figures) >= KEYS, mode
        assert figures["identical"] is True, mode
        assert figures["num_tokens"] == 32
        assert all(isinstance(figures[key], int | float) for key in KEYS)
        assert figures["tokens_per_s"] > 0 and figures["ttft_ms"] > 4.0
    assert document["modes"]["cloud_only"]["passes_per_token"] == 1.0
    assert document["modes"]["stop_and_wait"]["passes_per_token"] < 1.0
    assert "stop-and-wait" in finished.stdout and "yes" in finished.stdout


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
    assert "exporting" not in finished.stderr, "the fixture's pair is not the demo's own"
    document = json.loads(path.read_text())
    drafted_by = document["pair"]["drafted_by"]
    assert drafted_by["device"] == "npu" and drafted_by["is_emulated"] and drafted_by["notes"] == []
    assert all(figures["identical"] for figures in document["modes"].values())
    assert document["modes"]["stop_and_wait"]["acceptance_rate"] > 0.0
    shown = " ".join(finished.stdout.split())
    assert "drafted by: int8, OpenVINO's NPU path emulated on the CPU" in shown
    assert "emulated on the CPU: text, acceptance and code are an NPU's, the times are not" in shown


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], {"draft_device": "cpu", "draft_runtime": None, "draft_shapes": None}),
        (["--runtime", "ngram"], {"draft_device": "cpu", "draft_runtime": None, "draft_shapes": None}),
        (
            ["--draft-device", "cpu", "--runtime", "onnxruntime"],
            {"draft_device": "cpu", "draft_runtime": "onnxruntime", "draft_shapes": None},
        ),
        (["--emulate-npu"], {"draft_device": "npu", "draft_runtime": None, "draft_shapes": NPU_SHAPES}),
    ],
)
def test_the_demo_exports_the_draft_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: dict[str, object]
) -> None:
    """By device and runtime; the export itself has tests of its own."""
    seen: dict[str, object] = {}

    def export(**options: object) -> PairPaths:
        seen.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.export.make.reference_pair.export_reference_pair", export)
    monkeypatch.setattr(sys, "argv", ["outrider", "demo", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert {name: seen[name] for name in asked} == asked


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize(
    ("number", "is_background"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["SIGINT", "SIGTERM", "SIGTERM in the background"],
)
def test_an_interrupted_demo_leaves_no_process_behind(
    reference_cache: Path, tmp_path: Path, number: signal.Signals, is_background: bool
) -> None:
    """Ctrl-C, or being told to end, in the middle of the first text ends cloud and network too.

    Also where it was started as a script starts jobs in the background: to ignore SIGINT.
    """
    errors = tmp_path / "stderr"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if is_background else signal.default_int_handler)
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
        assert process.wait(TIMEOUT_S) == (130 if number == signal.SIGINT else 143)
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
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1
    assert "sees no NPU on this machine" in finished.stderr and "--emulate-npu" in finished.stderr
    assert not list(tmp_path.iterdir())
