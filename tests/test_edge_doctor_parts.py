"""Tests single checks of `outrider doctor`: the machine, its packages, runtimes and bundles; clocks and protocols."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tests.commands import KEY
from tests.serving import fake_tokenizer

from outrider.edge.devices.discovery import FoundDevice, FoundRuntime, ModelRuntime
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.doctor.bundles import Bundles, cached_drafts, check_bundle
from outrider.edge.doctor.cloud import CloudReport, Facts, _check_protocol, _limited, check_tokenizer
from outrider.edge.doctor.examine import (
    check_disk,
    check_memory,
    check_packages,
    check_power,
    check_runtimes,
    judge_speed,
)
from outrider.edge.doctor.findings import Failed, Finding, guarded, without_secrets
from outrider.edge.doctor.probe import ProbeFailed, TimedDraft, ask_runtime, profile_draft
from outrider.models.wire.protocol import PROTOCOL_VERSION

CPU = FoundDevice("CPU", "Some Processor", "cpu")


def find_cpu(runtime: ModelRuntime) -> FoundRuntime:
    """Both runtimes, and no other device."""
    return FoundRuntime(runtime, "1.2.3", (CPU,))


@pytest.mark.parametrize(
    ("token_ms", "step_ms", "round_trip_ms", "status", "found"),
    [
        (2.0, 20.0, 40.0, "ok", "the target is the slowest"),
        (25.0, 20.0, 40.0, "warning", "the draft is slower than the target"),
        (12.0, 20.0, 40.0, "warning", "little time for alternatives"),
        (1.0, 2.0, 200.0, "warning", "100 tokens ahead, at most 64"),
        (1.0, None, 10.0, "ok", "has not measured its step"),
    ],
)
def test_what_is_slow_is_named(
    token_ms: float, step_ms: float | None, round_trip_ms: float, status: str, found: str
) -> None:
    """Draft, target or network, with all three times."""
    profile = TimedDraft(words="int8", open_s=0.5, calls_ms={1: token_ms}, worst_ms=token_ms)
    finding = judge_speed(profile, step_ms, round_trip_ms)
    assert finding.status == status and found in finding.found and bool(finding.advice) == (found[:10] != "the target")


def test_devices_are_listed_and_a_broken_runtime_is_a_fault(tmp_path: Path) -> None:
    """Hardware that the system shows and no runtime drives is a warning; none at all is no problem."""

    def ask(runtime: ModelRuntime) -> FoundRuntime:
        if runtime == "onnxruntime":
            raise ProbeFailed("its process was ended by SIGSEGV")
        return find_cpu(runtime)

    openvino, onnx, npu, _gpu = check_runtimes(ask, tmp_path)
    assert openvino.found == "1.2.3: CPU (Some Processor)" and npu.status == "ok"
    assert onnx.status == "fault" and "SIGSEGV" in onnx.found and "--force-reinstall" in onnx.advice
    (tmp_path / "dev" / "accel" / "accel0").mkdir(parents=True)
    *_, npu, gpu = check_runtimes(ask, tmp_path)
    assert npu.status == "warning" and "no runtime drives it" in npu.found and npu.advice and gpu.status == "ok"
    none = list(check_runtimes(lambda runtime: FoundRuntime(runtime, None, ()), tmp_path))
    assert [each.status for each in none] == ["ok", "ok", "warning"] and "n-gram" in none[-1].found
    assert next(iter(check_runtimes(lambda runtime: FoundRuntime(runtime, "1", ()), tmp_path))).status == "fault"


def test_probes_run_in_a_process_of_their_own(fake_bundle: Path) -> None:
    """A draft is timed; a model that a runtime cannot read is an error in one line."""
    assert profile_draft(str(fake_bundle), DraftChoice("ngram")).token_ms < 1000.0
    with pytest.raises(ProbeFailed) as found:
        profile_draft(str(fake_bundle), DraftChoice())
    assert "\n" not in str(found.value) and "Traceback" not in str(found.value)


def test_a_probe_runs_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` would look there first, and a directory with a model may hold anything."""
    (tmp_path / "psutil.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    assert ask_runtime("openvino").version


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for a driver that crashes")
def test_a_driver_that_crashes_ends_only_its_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is named; a driver that hangs too."""
    program = tmp_path / "python"
    program.touch(0o755)
    monkeypatch.setattr("outrider.edge.doctor.probe.sys.executable", str(program))
    for script, timeout_s, words in (
        ("echo loading >&2\nkill -SEGV $$", 30.0, "its process was ended by SIGSEGV: loading"),
        ("exec sleep 60", 0.05, "no answer within"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        monkeypatch.setattr("outrider.edge.doctor.probe.TIMEOUT_S", timeout_s)
        with pytest.raises(ProbeFailed, match=words):
            ask_runtime("openvino")


def test_packages_must_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one that is missing or of another version is named, with the command that mends it."""
    needed = [
        "rich>=13.9",
        'httpx<0.29,>=0.28; extra == "edge"',
        'openvino==2026.4.1; extra == "edge"',
        'torch==2; extra == "cloud"',
        'colorama; sys_platform == "none"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    have = {"outrider": "0.1.0", "rich": "14.0", "httpx": "0.28.1", "openvino": "2026.4.1"}

    def version(name: str) -> str:
        if name not in have:
            raise metadata.PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr(metadata, "version", version)
    assert [each.found for each in check_packages()] == ["outrider 0.1.0; 3 requirements are met"]
    have |= {"openvino": "2025.1.0", "onnxruntime": "1", "onnxruntime-gpu": "1"}
    del have["httpx"]
    findings = list(check_packages())
    assert [each.found for each in findings] == [
        "httpx is not installed; expected <0.29,>=0.28",
        "openvino is 2025.1.0; expected ==2026.4.1",
        "onnxruntime and onnxruntime-gpu are both installed and overwrite each other",
    ]
    assert findings[0].advice == 'pip install "outrider[edge]"'
    have.clear()
    assert [each.status for each in guarded("packages", check_packages)] == ["fault"]


def test_memory_disk_and_battery(tmp_path: Path) -> None:
    """Warnings with numbers; a machine without a battery is fine."""
    gib, folder, less = 1 << 30, tmp_path / "not" / "there", "draft less: --effort low"
    memory = SimpleNamespace(available=gib, total=8 * gib)
    for checked, status, found, advice in (
        (check_memory(2 * gib, memory), "warning", "1.0 of 8.0 GiB free; the draft needs about 2.3", ""),
        (check_memory(None, memory), "ok", "", ""),
        (check_disk(folder, lambda path: SimpleNamespace(free=gib)), "warning", "", ""),
        (check_disk(folder, lambda path: SimpleNamespace(free=9 * gib)), "ok", "", ""),
        (check_power(lambda: SimpleNamespace(percent=31.2, power_plugged=False)), "warning", "on battery, 31 %", less),
        (check_power(lambda: SimpleNamespace(percent=99, power_plugged=True)), "ok", "", ""),
        (check_power(lambda: None), "ok", "", ""),
    ):
        (finding,) = checked
        assert finding.status == status and found in ("", finding.found) and advice in ("", finding.advice)


def test_bundles_of_the_cache_are_checked(fake_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts only; a damaged one is a warning there, since it is made again."""
    cache = tmp_path / "cache"
    assert list(cached_drafts(cache)) == []
    (none,) = Bundles("auto", cache).findings()
    assert none.status == "ok" and "`outrider pull`" in none.advice
    monkeypatch.setattr("outrider.edge.doctor.bundles.is_installed", lambda name: name != "torch")
    (none,) = Bundles("auto", cache).findings()
    assert none.status == "warning" and "cannot be exported: torch is not installed" in none.found
    names = ("pairs/a/draft", "pairs/b/draft", ".half/draft", "pairs/a/target")
    first, second, _, target = (Path(shutil.copytree(fake_bundle, cache / name)) for name in names)
    manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    (target / "manifest.json").write_text(json.dumps(manifest | {"role": "target"}), encoding="utf-8")
    assert list(cached_drafts(cache)) == [first, second]
    (second / "tokenizer.json").unlink()
    bundles = Bundles("reference", cache)
    assert [each.status for each in bundles.findings()] == ["ok", "warning"]
    chosen = bundles.for_target(fake_tokenizer().fingerprint)
    assert chosen is not None and chosen.manifest.files
    assert bundles.for_target("f" * 64) is chosen  # shows why nothing fits
    for wrong, words in ((target, "is a target bundle"), (tmp_path / "none", "none")):
        found = check_bundle(wrong, is_used=True)[0]
        assert found.status == "fault" and words in found.found


def test_a_check_that_breaks_is_a_fault_and_shows_no_key() -> None:
    """Its error is one line; keys in it are covered."""

    def check() -> Iterator[Finding]:
        yield Finding("ok", "first", "fine")
        raise OSError(f"broken\nwith {KEY}")

    assert [each.found for each in guarded("thing", check)] == ["fine", "the check failed (OSError: broken)"]
    assert without_secrets(Finding("ok", "x", f"a\n{KEY} b", KEY), [KEY]) == Finding("ok", "x", "a *** b", "***")


def test_a_slow_name_server_does_not_hang_the_doctor() -> None:
    """Looking up a name has no time limit of its own."""
    release = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        _limited(lambda: release.wait(30), 0.01)
    release.set()
    start = time.monotonic()
    assert _limited(lambda: 3, 5.0) == 3 and time.monotonic() - start < 5.0


def test_a_certificate_of_another_time_points_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong clock refuses every certificate."""
    error = ssl.SSLCertVerificationError(1, "refused")
    error.verify_message = "certificate is not yet valid"
    monkeypatch.setattr("outrider.edge.doctor.cloud.system_tls", tls := Mock())
    tls.return_value.wrap_socket.side_effect = error
    with socket.socket() as unused, pytest.raises(Failed) as failed:
        CloudReport("https://a")._check_tls(unused, "a")
    finding = failed.value.finding
    assert (finding.status, finding.advice) == ("fault", "set this machine's clock")
    tls.assert_called_once_with(None)


def test_a_key_is_not_sent_where_others_can_read_it() -> None:
    """Plain http beyond this machine, unless the endpoint allows it: no request is made."""
    with pytest.raises(Failed) as failed:
        list(CloudReport("http://192.0.2.1", KEY)._check_key(None))  # type: ignore[arg-type]
    finding = failed.value.finding
    assert finding.status == "fault" and "allow_http" in finding.advice and KEY not in finding.found


@pytest.mark.parametrize(
    ("behind_s", "status", "found"),
    [
        (0.0, "ok", "within 1.5 s"),
        (-20.0, "ok", "behind the server's"),
        (90.0, "warning", "90 s ahead of the server's"),
    ],
)
def test_clocks_are_compared(behind_s: float, status: str, found: str) -> None:
    """By the Date header; a minute is where TLS begins to suffer."""
    report, now_s = CloudReport("http://a"), 1_800_000_000.5
    assert "sends no Date" in report._check_clock().found
    report._last_date = formatdate(now_s - 0.5 - behind_s, usegmt=True), now_s
    finding = report._check_clock()
    assert finding.status == status and found in finding.found
    report._last_date = "yesterday", now_s
    assert "cannot be read" in report._check_clock().found


def test_protocols_and_tokenizers_must_fit() -> None:
    """An older server still works, with less; another tokenizer is mapped."""

    def protocol(version: int) -> Finding:
        return _check_protocol(Facts(name="target", protocol=version, tokenizer="a" * 64))

    assert protocol(PROTOCOL_VERSION).status == "ok" and protocol(1).advice == "update the server"
    assert protocol(PROTOCOL_VERSION + 1).advice == "update outrider on this device"
    facts = Facts(name="target", protocol=2, tokenizer="a" * 64)
    same, other = (check_tokenizer(facts, "draft", letter * 64) for letter in "ab")
    words = f"draft has tokenizer {'b' * 12}, target has {'a' * 12}: its tokens are mapped"
    assert (same.status, other.status, other.found) == ("ok", "warning", words) and "--tokenizer DIR" in other.advice
