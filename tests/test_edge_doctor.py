"""Tests `outrider doctor`: what each check finds, what it advises, and that nothing ends it."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests.drafts import make_draft
from tests.serving import FakeServer, fake_tokenizer, serve_fake
from tests.test_edge_config import KEY, OTHER_KEY, bundle, config, key_file, run_main

from outrider.cloud.api.state import ServerSettings
from outrider.edge.devices.discovery import FoundDevice, FoundRuntime, ModelRuntime
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.doctor import cloud as cloud_checks
from outrider.edge.doctor import examine as examination
from outrider.edge.doctor import probe
from outrider.edge.doctor.bundles import Bundles, cached_drafts, check_bundle
from outrider.edge.doctor.cloud import CloudReport, Facts, check_tokenizer
from outrider.edge.doctor.examine import (
    check_disk,
    check_memory,
    check_packages,
    check_power,
    check_runtimes,
)
from outrider.edge.doctor.findings import Failed, Finding, guarded, without_secrets
from outrider.edge.doctor.probe import ProbeFailed, TimedDraft, ask_runtime, profile_draft
from outrider.edge.store.shelf import PulledFor, Shelf
from outrider.models.http.security import KeyRing
from outrider.models.ingress.sockets import TlsFiles
from outrider.models.wire.protocol import PROTOCOL_VERSION

__all__ = ["bundle", "config"]  # fixtures

CPU = FoundDevice("CPU", "Some Processor", "cpu")
PROFILE = TimedDraft(words="int8, OpenVINO on the CPU", open_s=0.5, calls_ms={1: 2.0, 8: 8.0}, worst_ms=3.0)
NGRAM = DraftChoice("ngram")
Capture = pytest.CaptureFixture[str]


def find_cpu(runtime: ModelRuntime) -> FoundRuntime:
    """Both runtimes, and no other device."""
    return FoundRuntime(runtime, "1.2.3", (CPU,))


@pytest.fixture(autouse=True)
def place(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a configuration of this test's own, and no child processes: they take a second each."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(examination, "check_runtimes", lambda: check_runtimes(find_cpu, tmp_path))
    monkeypatch.setattr(examination, "profile_draft", lambda *_: PROFILE)


Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Doctor:
    """`doctor("--server", url)`: exit code and findings by name, the last of each name."""

    def run(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = run_main(monkeypatch, "doctor", "--json", *arguments)
        shown = capsys.readouterr()
        assert shown.err == "" and KEY not in shown.out and OTHER_KEY not in shown.out
        document = json.loads(shown.out)
        assert code == (document["status"] == "fault")
        return code, {each["name"]: each for each in document["checks"]}

    return run


@contextmanager
def serve_bytes(answer: bytes) -> Iterator[str]:
    """A server that gives every connection the same bytes; its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5.0)
                try:
                    if connection.recv(4096):
                        connection.sendall(answer)
                except OSError:
                    pass  # the client has left

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def free_port() -> int:
    """A port where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_all_is_well(bundle: Path, doctor: Doctor) -> None:
    """Every part has its line, none is a fault, and the exit status is 0."""
    with serve_fake(ServerSettings(keys=KeyRing([KEY]))) as server:
        code, found = doctor("--server", server.url, "--draft", str(bundle), "--api-key", KEY)
    assert code == 0
    assert list(found) == [
        "configuration", "Python", "packages", "OpenVINO", "ONNX Runtime", "NPU", "GPU", "draft",
        "DNS", "TCP", "HTTP", "key", "protocol", "server", "round trip", "clock", "tokenizer",
        *(name for name in found if name in ("draft's device", "load", "speed")), "memory", "disk", "power",
    ]  # fmt: skip
    assert found["key"]["found"] == "accepted" and found["clock"]["found"] == "the server's, within 1.5 s"
    assert "median of 9" in found["round trip"]["found"] and "fake share one" in found["tokenizer"]["found"]
    assert "intact" in found["draft"]["found"] and "speed" in found


def test_findings_are_lines_for_people(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """One line each: ok, warning or fault, what was found, what to do; then the counts."""
    url = f"http://127.0.0.1:{free_port()}"
    assert run_main(monkeypatch, "doctor", "--server", url, "--draft", str(bundle)) == 1
    *lines, counts = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok      ", "warning ", "fault   ")) for line in lines)
    (wrong,) = [line for line in lines if line.startswith("fault")]
    assert wrong.startswith(f"fault   TCP: nothing accepts connections at {url.removeprefix('http://')} (")
    assert wrong.endswith("Start `outrider-cloud serve` there, or correct the address")
    assert counts.startswith(f"{len(lines)} checks; faults: 1, warnings: ")


@pytest.mark.parametrize(
    ("key", "found", "advice"),
    [
        (None, "the server requires a key, and none is set", "set OUTRIDER_API_KEY or key_file"),
        (OTHER_KEY, "the server does not accept this key", "correct OUTRIDER_API_KEY or key_file"),
    ],
)
def test_a_wrong_key_is_a_fault(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, key: str | None, found: str, advice: str
) -> None:
    """What needs a key is not tried."""
    if key is not None:
        monkeypatch.setenv("OUTRIDER_API_KEY", key)
    with serve_fake(ServerSettings(keys=KeyRing([KEY]))) as server:
        code, findings = doctor("--server", server.url)
    assert code == 1 and findings["key"]["found"] == found and findings["key"]["advice"] == advice
    assert findings["HTTP"]["status"] == "ok" and "round trip" not in findings


def test_a_key_that_no_server_asks_for_is_not_sent(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one needed."""
    sent, get = [], CloudReport._get

    def record(*given: Any) -> Any:
        sent.append(given[2:])
        return get(*given)

    monkeypatch.setattr(CloudReport, "_get", record)
    with serve_fake() as server:
        assert doctor("--server", server.url, "--api-key", KEY)[1]["key"]["found"] == "the server requires none"
    assert len(sent) > 10 and all(KEY not in each for each in sent)


def test_a_damaged_bundle_is_a_fault(bundle: Path, doctor: Doctor) -> None:
    """The file is named, and the checks that need the draft are left out."""
    (bundle / "openvino_model.bin").write_text("nine")
    with serve_fake() as server:
        code, found = doctor("--server", server.url, "--draft", str(bundle))
    assert (
        code == 1 and found["draft"]["status"] == "fault" and "openvino_model.bin is altered" in found["draft"]["found"]
    )
    assert found["draft"]["advice"] == "copy the bundle again"
    assert "tokenizer" not in found and "draft's device" not in found and found["round trip"]["status"] == "ok"


def test_a_broken_configuration_is_a_fault_and_the_rest_is_checked(
    config: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line and key are named; variables that nothing reads too."""
    config.write_text("[run]\nmax_tokens = 'x'\n", encoding="utf-8")
    with serve_fake() as server:
        code, found = doctor("--server", server.url)
        assert code == 1 and f"{config}, line 2: run.max_tokens is 'x'" in found["configuration"]["found"]
        assert found["configuration"]["advice"] == "expected a whole number, at least 1"
        assert found["clock"]["status"] == "ok"
        config.write_text("[run\n", encoding="utf-8")
        assert "is not TOML" in doctor("--server", server.url)[1]["configuration"]["found"]
        config.write_text("[common]\nmax_tokens = 1000\n", encoding="utf-8")
        code, found = doctor("--server", server.url)
        assert code == 0 and found["configuration"]["status"] == "warning"
        assert found["configuration"]["advice"].endswith("at most 512 for `outrider demo`")
        config.write_text("", encoding="utf-8")
        monkeypatch.setenv("OUTRIDER_MAX_TOKNS", "3")
        code, found = doctor("--server", server.url)
        assert code == 0 and found["environment"]["advice"] == "did you mean OUTRIDER_MAX_TOKENS?"


def test_several_clouds_are_examined_each_with_its_own_key(config: Path, doctor: Doctor) -> None:
    """From [[endpoint]]; a key file that others can read is a fault of its own."""
    path = key_file(config.parent)
    with serve_fake(ServerSettings(keys=KeyRing([KEY]))) as one, serve_fake(ServerSettings(keys=KeyRing([KEY]))) as two:
        config.write_text(
            f"[[endpoint]]\nname = 'one'\nurl = '{one.url}'\nkey_file = 'cloud.key'\n[[endpoint]]\nurl = '{two.url}'\n",
            encoding="utf-8",
        )
        found = doctor()[1]
        assert found["key of one"]["found"] == "accepted"
        assert "none is set" in found[f"key of {two.url.removeprefix('http://')}"]["found"]
        path.chmod(0o644)
        found = doctor()[1]
        assert found["key file"]["advice"] == f"expected 0600: run `chmod 600 {path}`" and "key of one" not in found


def http(status: str, body: bytes = b"", *headers: str) -> bytes:
    """An HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_target_of_this_machine_needs_no_cloud(config: Path, doctor: Doctor) -> None:
    """Commands start its verifier; a cloud that is named is examined as ever."""
    config.write_text("[common]\ntarget = 'mine'\n", encoding="utf-8")
    assert "since target is mine" in doctor()[1]["cloud"]["found"]
    assert "nothing accepts connections" in doctor("--cloud", f"http://127.0.0.1:{free_port()}")[1]["TCP"]["found"]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (http("302 Found", b"", "location: https://me:secret@login.example/"), "redirects to https://***@login"),
        (http("200 OK", b"<html>router</html>"), "answers 200, and not as a verifier"),
        (http("404 Not Found", b"[" * 60_000), "answers 404, and not as a verifier"),
        (http("200 OK", b"x" * 200_000), "answers 200, and not as a verifier"),
        (b"SSH-2.0-OpenSSH_9\r\n", "does not answer HTTP"),
        (b"", "does not answer HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", "does not answer HTTP"),
        (http("200 OK", b'{"status":"live"}'), "is not an answer of this protocol"),
    ],
)
def test_whatever_answers_is_reported_without_a_traceback(doctor: Doctor, answer: bytes, found: str) -> None:
    """Another server, another protocol, endless or cut answers."""
    with serve_bytes(answer) as url:
        code, findings = doctor("--server", url)
    faults = [each for each in findings.values() if each["status"] == "fault"]
    assert code == 1 and len(faults) == 1 and found in faults[0]["found"] and faults[0]["advice"]


def test_a_name_without_address_and_a_wrong_address_are_faults(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is tried then."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("outrider.edge.doctor.cloud.socket.getaddrinfo", fail)
    monkeypatch.setattr("outrider.edge.doctor.cloud.urllib.request.getproxies", dict)
    code, found = doctor("--server", "https://nowhere.invalid")
    assert code == 1 and found["DNS"]["found"] == "nowhere.invalid has no address (Name or service not known)"
    assert "TCP" not in found
    code, found = doctor("--server", "ftp://me:secret@x")
    assert code == 1 and found["cloud"]["found"].startswith("'ftp://***@x' is no address")


def test_a_proxy_is_used_and_named_without_its_password(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not looked up here then: the proxy does."""
    with serve_bytes(http("502 Bad Gateway")) as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", proxy.replace("//", "//me:secret@"))
        code, found = doctor("--server", "http://cloud.invalid")
    assert code == 1 and found["proxy"]["found"] == f"requests go through {proxy.replace('//', '//***@')}"
    assert "DNS" not in found and "answers 502" in found["HTTP"]["found"]


def test_tls_is_checked_as_the_agent_checks_it(doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A certificate of nobody is refused, with its issuer known it is accepted; plain HTTP is no TLS."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost")
    name = ("-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([openssl, "req", "-x509", *curve, *files, *name], check=True, capture_output=True)
    with serve_fake(tls=TlsFiles(certificate, key)) as server:
        code, found = doctor("--server", server.url)
        assert code == 1 and "the certificate was refused: self" in found["TLS"]["found"] and "HTTP" not in found
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        code, found = doctor("--server", server.url)
        assert found["TLS"]["found"].startswith("TLSv1.3, certificate valid until ") and "HTTP" in found
    with serve_fake() as server:
        found = doctor("--server", server.url.replace("http:", "https:"))[1]
        assert "no TLS there" in found["TLS"]["found"] and "http://" in found["TLS"]["advice"]


def test_a_certificate_of_another_time_points_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong clock refuses every certificate."""

    class Context:
        def __init__(self, certificate: object) -> None:
            assert certificate is None

        def wrap_socket(self, *_: object, **__: object) -> None:
            error = ssl.SSLCertVerificationError(1, "refused")
            error.verify_message = "certificate is not yet valid"
            raise error

    monkeypatch.setattr("outrider.edge.doctor.cloud.system_tls", Context)
    with socket.socket() as unused, pytest.raises(Failed) as failed:
        CloudReport("https://a")._check_tls(unused, "a")
    finding = failed.value.finding
    assert finding.status == "fault" and finding.advice == "set this machine's clock"


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
        return cloud_checks._check_protocol(Facts(name="target", protocol=version, tokenizer="a" * 64))

    assert protocol(PROTOCOL_VERSION).status == "ok" and protocol(1).advice == "update the server"
    assert protocol(PROTOCOL_VERSION + 1).advice == "update outrider on this device"
    facts = Facts(name="target", protocol=2, tokenizer="a" * 64)
    assert check_tokenizer(facts, "draft", "a" * 64).status == "ok"
    other = check_tokenizer(facts, "draft", "b" * 64)
    words = f"draft has tokenizer {'b' * 12}, target has {'a' * 12}: its tokens are mapped"
    assert other.status == "warning" and other.found == words and "--tokenizer DIR" in other.advice


def test_a_server_that_is_not_ready_is_a_fault(doctor: Doctor) -> None:
    """It says why."""
    with serve_fake(drain_s=20.0) as server:
        server.core.is_draining = True
        code, found = doctor("--server", server.url)
        server.core.is_draining = False
    assert code == 1 and found["server"]["found"] == "fake is not ready: it is shutting down"


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
    finding = examination.judge_speed(profile, step_ms, round_trip_ms)
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
    (tmp_path / "dev" / "accel").mkdir(parents=True)
    (tmp_path / "dev" / "accel" / "accel0").touch()
    *_, npu, gpu = check_runtimes(ask, tmp_path)
    assert npu.status == "warning" and "no runtime drives it" in npu.found and npu.advice and gpu.status == "ok"
    none = list(check_runtimes(lambda runtime: FoundRuntime(runtime, None, ()), tmp_path))
    assert [each.status for each in none] == ["ok", "ok", "warning"] and "n-gram" in none[-1].found
    no_cpu = list(check_runtimes(lambda runtime: FoundRuntime(runtime, "1", ()), tmp_path))
    assert no_cpu[0].status == "fault"


def test_probes_run_in_a_process_of_their_own(bundle: Path) -> None:
    """A draft is timed; a model that a runtime cannot read is an error in one line."""
    assert profile_draft(str(bundle), NGRAM).token_ms < 1000.0
    with pytest.raises(ProbeFailed) as found:
        profile_draft(str(bundle), DraftChoice())
    assert "\n" not in str(found.value) and "Traceback" not in str(found.value)


def test_a_probe_runs_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m` would look there first, and a directory with a model may hold anything."""
    (tmp_path / "psutil.py").write_text("raise SystemExit('run')")
    monkeypatch.chdir(tmp_path)
    assert ask_runtime("openvino").version


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for a driver that crashes")
def test_a_driver_that_crashes_ends_only_its_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is named; a driver that hangs too."""
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\necho loading >&2\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr("outrider.edge.doctor.probe.sys.executable", str(crash))
    with pytest.raises(ProbeFailed, match="its process was ended by SIGSEGV: loading"):
        ask_runtime("openvino")
    crash.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(probe, "TIMEOUT_S", 0.05)
    with pytest.raises(ProbeFailed, match="no answer within"):
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
    del have["httpx"]
    have |= {"openvino": "2025.1.0", "onnxruntime": "1", "onnxruntime-gpu": "1"}
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
    gib = 1 << 30
    (low,) = check_memory(2 * gib, SimpleNamespace(available=gib, total=8 * gib))
    assert low.status == "warning" and low.found == "1.0 of 8.0 GiB free; the draft needs about 2.3"
    (enough,) = check_memory(None, SimpleNamespace(available=gib, total=8 * gib))
    assert enough.status == "ok"
    for free, status in ((gib, "warning"), (9 * gib, "ok")):
        usage = SimpleNamespace(free=free)
        (disk,) = check_disk(tmp_path / "not" / "there", lambda path, usage=usage: usage)  # type: ignore[misc]
        assert disk.status == status

    def power(**fields: Any) -> Finding:
        (finding,) = check_power(lambda: SimpleNamespace(**fields) if fields else None)
        return finding

    assert power(percent=31.2, power_plugged=False).found == "on battery, 31 %"
    assert power(percent=31.2, power_plugged=False).advice == "draft less: --effort low"
    assert power(percent=99, power_plugged=True).status == power().status == "ok"


def test_bundles_of_the_cache_are_checked(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts only; a damaged one is a warning there, since it is made again."""
    cache = tmp_path / "cache"
    assert list(cached_drafts(cache)) == []
    (none,) = Bundles("auto", cache).findings()
    assert none.status == "ok" and "`outrider pull`" in none.advice
    with monkeypatch.context() as patch:
        patch.setattr("outrider.edge.doctor.bundles.is_installed", lambda name: name != "torch")
        (none,) = Bundles("auto", cache).findings()
    assert none.status == "warning" and "cannot be exported: torch is not installed" in none.found
    places = [cache / "pairs" / "a" / "draft", cache / "pairs" / "b" / "draft", cache / ".half" / "draft"]
    for each in places:
        shutil.copytree(bundle, each)
    target = cache / "pairs" / "a" / "target"
    shutil.copytree(bundle, target)
    manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    (target / "manifest.json").write_text(json.dumps(manifest | {"role": "target"}), encoding="utf-8")
    assert list(cached_drafts(cache)) == places[:2]
    (places[1] / "tokenizer.json").unlink()
    bundles = Bundles("reference", cache)
    found = list(bundles.findings())
    assert [each.status for each in found] == ["ok", "warning"]
    chosen = bundles.for_target(fake_tokenizer().fingerprint)
    assert chosen is not None and chosen.manifest.files
    assert bundles.for_target("f" * 64) is chosen  # shows why nothing fits
    wrong = check_bundle(target, is_used=True)[0]
    assert wrong.status == "fault" and "is a target bundle" in wrong.found
    assert check_bundle(tmp_path / "none", is_used=True)[0].status == "fault"


def test_the_pulled_draft_is_examined(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that `run` takes for the server's target, before the reference draft; damaged, `outrider pull` helps."""
    profiled: list[str] = []

    def profile(path: str, *_: object) -> TimedDraft:
        profiled.append(path)
        return PROFILE

    monkeypatch.setattr(examination, "profile_draft", profile)
    shelf = Shelf(tmp_path / "cache" / "drafts")
    reference = make_draft(tmp_path / "cache" / "pairs" / "a" / "draft").path
    with serve_fake() as server:
        assert doctor("--server", server.url)[0] == 0 and profiled == [str(reference)]
        pulled = make_draft(shelf.root / "new", content=b"1").path.rename(shelf.place("1" * 64))
        make_draft(shelf.root / "newer", content=b"2").path.rename(shelf.place("2" * 64))
        with httpx.Client() as client:
            target = client.get(f"{server.url}/v1/model").json()["target"]
        shelf.note("1" * 64, target, PulledFor(model="fake", server=server.url, name="cpu", at_s=1.0))
        code, found = doctor("--server", server.url)
        assert code == 0 and profiled[1:] == [str(pulled)] and "share one" in found["tokenizer"]["found"]
        assert doctor("--server", server.url, "--draft", "reference")[0] == 0 and profiled[2:] == [str(reference)]
        (pulled / "openvino_model.bin").write_bytes(b"damaged")
        code, found = doctor("--server", server.url)
        assert code == 1 and found["draft"]["advice"] == "run `outrider pull` again"
        assert found["draft"]["found"] == f"the one pulled for fake is damaged, at {pulled}"


def test_a_check_that_breaks_is_a_fault_and_shows_no_key() -> None:
    """Its error is one line; keys in it are covered."""

    def check() -> Iterator[Finding]:
        yield Finding("ok", "first", "fine")
        raise OSError(f"broken\nwith {KEY}")

    first, second = guarded("thing", check)
    assert first.found == "fine" and second.found == "the check failed (OSError: broken)"
    hidden = without_secrets(Finding("ok", "x", f"a\n{KEY} b", KEY), [KEY])
    assert hidden.found == "a *** b" and hidden.advice == "***"


def test_a_slow_name_server_does_not_hang_the_doctor() -> None:
    """Looking up a name has no time limit of its own."""
    release = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        cloud_checks._limited(lambda: release.wait(30), 0.01)
    release.set()
    start = time.monotonic()
    assert cloud_checks._limited(lambda: 3, 5.0) == 3 and time.monotonic() - start < 5.0


def test_one_real_examination(bundle: Path, server_without_fakes: FakeServer, doctor: Doctor) -> None:
    """With the installed packages and a probe in its own process, through the command."""
    code, found = doctor("--server", server_without_fakes.url, "--draft", str(bundle), "--runtime", "ngram")
    assert code == 0 and "n-gram" in found["draft's device"]["found"]


@pytest.fixture
def server_without_fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server; the draft is profiled by the real probe."""
    monkeypatch.setattr(examination, "profile_draft", profile_draft)
    with serve_fake() as server:
        yield server
