"""Tests `outrider doctor`: what each check finds, what it advises, and that nothing ends it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from tests.agents import nowhere
from tests.certificates import make_own, needs_openssl
from tests.commands import KEY, OTHER_KEY, Outrider, key_file
from tests.drafts import make_draft
from tests.raw_server import http_answer, raw_server, writes
from tests.serving import FakeServer, serve_fake
from tests.test_edge_doctor_parts import find_cpu

from outrider.cloud.api.state import ServerSettings
from outrider.edge.doctor.cloud import CloudReport
from outrider.edge.doctor.examine import (
    check_runtimes,
)
from outrider.edge.doctor.probe import TimedDraft, profile_draft
from outrider.edge.store.shelf import PulledFor, Shelf
from outrider.models.http.security import KeyRing
from outrider.models.ingress.sockets import TlsFiles

PROFILE = TimedDraft(words="int8, OpenVINO on the CPU", open_s=0.5, calls_ms={1: 2.0, 8: 8.0}, worst_ms=3.0)


@pytest.fixture(autouse=True)
def place(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a configuration of this test's own, and no child processes: they take a second each."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("outrider.edge.doctor.examine.check_runtimes", lambda: check_runtimes(find_cpu, tmp_path))
    monkeypatch.setattr("outrider.edge.doctor.examine.profile_draft", lambda *_: PROFILE)


@pytest.fixture(scope="module")
def guarded() -> Iterator[FakeServer]:
    """A server that asks for KEY."""
    with serve_fake(ServerSettings(keys=KeyRing([KEY]))) as running:
        yield running


Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def doctor(outrider: Outrider) -> Doctor:
    """`doctor("--server", url)`: exit code and findings by name, the last of each name."""

    def examine(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
        shown = outrider("doctor", "--json", *arguments, code=None)
        assert shown.err == "" and KEY not in shown.out and OTHER_KEY not in shown.out
        document = json.loads(shown.out)
        assert shown.code == (document["status"] == "fault")
        return shown.code, {each["name"]: each for each in document["checks"]}

    return examine


def test_each_named_draft_is_checked(fake_bundle: Path, tmp_path: Path, outrider: Outrider) -> None:
    """The first and the others, which commands choose from too."""
    given = ["--draft", fake_bundle, "--draft", tmp_path / "missing", "--draft", "auto", "--server", nowhere()]
    checks = json.loads(outrider("doctor", "--json", *given, code=1).out)["checks"]
    drafts = [(each["status"], each["found"]) for each in checks if each["name"] == "draft"]
    assert sorted(status for status, _ in drafts) == ["fault", "ok"]
    assert any(str(tmp_path / "missing") in found for _, found in drafts)


def test_all_is_well(guarded: FakeServer, fake_bundle: Path, doctor: Doctor) -> None:
    """Every part has its line, none is a fault, and the exit status is 0."""
    code, found = doctor("--server", guarded.url, "--draft", str(fake_bundle), "--api-key", KEY)
    assert code == 0 and list(found) == [
        "configuration", "Python", "packages", "OpenVINO", "ONNX Runtime", "NPU", "GPU", "draft",
        "DNS", "TCP", "HTTP", "key", "protocol", "server", "round trip", "clock", "tokenizer",
        *(name for name in found if name in ("draft's device", "load", "speed")), "memory", "disk", "power",
    ]  # fmt: skip
    assert found["key"]["found"] == "accepted" and found["clock"]["found"] == "the server's, within 1.5 s"
    assert "median of 9" in found["round trip"]["found"] and "fake share one" in found["tokenizer"]["found"]
    assert "intact" in found["draft"]["found"] and "speed" in found


def test_findings_are_lines_for_people(fake_bundle: Path, outrider: Outrider) -> None:
    """One line each: ok, warning or fault, what was found, what to do; then the counts."""
    url = nowhere()
    *lines, counts = outrider("doctor", "--server", url, "--draft", str(fake_bundle), code=1).out.splitlines()
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
    guarded: FakeServer, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, key: str | None, found: str, advice: str
) -> None:
    """What needs a key is not tried."""
    if key is not None:
        monkeypatch.setenv("OUTRIDER_API_KEY", key)
    code, findings = doctor("--server", guarded.url)
    assert (code, findings["key"]["found"], findings["key"]["advice"]) == (1, found, advice)
    assert findings["HTTP"]["status"] == "ok" and "round trip" not in findings


def test_a_key_that_no_server_asks_for_is_not_sent(server: FakeServer, doctor: Doctor) -> None:
    """Nor is one needed."""
    with patch.object(CloudReport, "_get", autospec=True, side_effect=CloudReport._get) as get:
        assert doctor("--server", server.url, "--api-key", KEY)[1]["key"]["found"] == "the server requires none"
    assert get.call_count > 10 and all(KEY not in (*each.args, *each.kwargs.values()) for each in get.call_args_list)


def test_a_damaged_bundle_is_a_fault(server: FakeServer, fake_bundle: Path, doctor: Doctor) -> None:
    """The file is named, and the checks that need the draft are left out."""
    (fake_bundle / "openvino_model.bin").write_bytes(b"WEIGHTS")
    code, found = doctor("--server", server.url, "--draft", str(fake_bundle))
    assert code == 1 and "openvino_model.bin is altered" in found["draft"]["found"]
    assert (found["draft"]["status"], found["draft"]["advice"]) == ("fault", "copy the bundle again")
    assert not found.keys() & {"tokenizer", "draft's device"} and found["round trip"]["status"] == "ok"


def test_a_broken_configuration_is_a_fault_and_the_rest_is_checked(
    config: Path, server: FakeServer, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line and key are named; variables that nothing reads too."""
    monkeypatch.setenv("OUTRIDER_MAX_TOKNS", "3")
    for text, expected, status, words, advice in (
        ("[run]\nmax_tokens = 'x'\n", 1, "fault", f"{config}, line 2: run.max_tokens is 'x'", "number, at least 1"),
        ("[run\n", 1, "fault", "is not TOML", ""),
        ("[common]\nmax_tokens = 1000\n", 0, "warning", "", "at most 512 for `outrider demo`"),
        ("", 0, "ok", "", ""),
    ):
        config.write_text(text, encoding="utf-8")
        code, found = doctor("--server", server.url)
        about = found["configuration"]
        assert (code, about["status"], found["clock"]["status"]) == (expected, status, "ok")
        assert words in about["found"] and about["advice"].endswith(advice)
    assert found["environment"]["advice"] == "did you mean OUTRIDER_MAX_TOKENS?"


def test_several_clouds_are_examined_each_with_its_own_key(config: Path, guarded: FakeServer, doctor: Doctor) -> None:
    """From [[endpoint]]; a key file that others can read is a fault of its own."""
    path = key_file(config.parent)
    with serve_fake(ServerSettings(keys=KeyRing([KEY]))) as two:
        one = f"[[endpoint]]\nname = 'one'\nurl = '{guarded.url}'\nkey_file = 'cloud.key'\n"
        config.write_text(f"{one}[[endpoint]]\nurl = '{two.url}'\n", encoding="utf-8")
        found = doctor()[1]
        assert found["key of one"]["found"] == "accepted"
        assert "none is set" in found[f"key of {two.url.removeprefix('http://')}"]["found"]
        path.chmod(0o644)
        found = doctor()[1]
        assert found["key file"]["advice"] == f"expected 0600: run `chmod 600 {path}`" and "key of one" not in found


def test_a_target_of_this_machine_needs_no_cloud(config: Path, doctor: Doctor) -> None:
    """Commands start its verifier; a cloud that is named is examined as ever."""
    config.write_text("[common]\ntarget = 'mine'\n", encoding="utf-8")
    assert f"since target is {config.parent / 'mine'}" in doctor()[1]["cloud"]["found"]
    assert "nothing accepts connections" in doctor("--cloud", nowhere())[1]["TCP"]["found"]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (http_answer(b"", "302 Found", "location: https://me:secret@login.example/"), "redirects to https://***@login"),
        (http_answer(b"<html>router</html>"), "answers 200, and not as a verifier"),
        (http_answer(b"[" * 60_000, "404 Not Found"), "answers 404, and not as a verifier"),
        (http_answer(b"x" * 200_000), "answers 200, and not as a verifier"),
        (b"SSH-2.0-OpenSSH_9\r\n", "does not answer HTTP"),
        (b"", "does not answer HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", "does not answer HTTP"),
        (http_answer(b'{"status":"live"}'), "is not an answer of this protocol"),
    ],
)
def test_whatever_answers_is_reported_without_a_traceback(doctor: Doctor, answer: bytes, found: str) -> None:
    """Another server, another protocol, endless or cut answers."""
    with raw_server(writes(answer)) as server:
        code, findings = doctor("--server", server.url)
    faults = [each for each in findings.values() if each["status"] == "fault"]
    assert code == 1 and len(faults) == 1 and found in faults[0]["found"] and faults[0]["advice"]


def test_what_cannot_be_asked_is_a_fault(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without an address, a wrong address, an address whose password all could read: nothing is asked then."""

    unknown = Mock(side_effect=socket.gaierror(-2, "Name or service not known"))
    monkeypatch.setattr("outrider.edge.doctor.cloud.socket.getaddrinfo", unknown)
    monkeypatch.setattr("outrider.edge.doctor.cloud.urllib.request.getproxies", dict)
    code, found = doctor("--server", "https://nowhere.invalid")
    assert code == 1 and found["DNS"]["found"] == "nowhere.invalid has no address (Name or service not known)"
    assert "TCP" not in found
    code, found = doctor("--server", "ftp://me:secret@x")
    assert code == 1 and found["cloud"]["found"].startswith("'ftp://***@x' is no address")
    # An address's password is not sent unencrypted; nor is anything else asked then.
    monkeypatch.setattr(CloudReport, "_check_direct", lambda *_, **__: iter(()))
    code, found = doctor("--server", "http://me:hunter2@cloud.invalid")
    assert code == 1 and found["key"]["found"].startswith("not sent") and "HTTP" not in found


def test_a_proxy_is_used_and_named_without_its_password(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not looked up here then: the proxy does."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with raw_server(writes(http_answer(status="502 Bad Gateway"))) as server:
        monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:secret@"))
        code, found = doctor("--server", "http://cloud.invalid")
    assert code == 1 and found["proxy"]["found"] == f"requests go through {server.url.replace('//', '//***@')}"
    assert "DNS" not in found and "answers 502" in found["HTTP"]["found"]


@needs_openssl
def test_tls_is_checked_as_the_agent_checks_it(
    server: FakeServer, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A certificate of nobody is refused, with its issuer known it is accepted; plain HTTP is no TLS."""
    certificate, key = make_own(tmp_path, "localhost")
    with serve_fake(tls=TlsFiles(certificate, key)) as encrypted:
        code, found = doctor("--server", encrypted.url)
        assert code == 1 and "the certificate was refused: self" in found["TLS"]["found"] and "HTTP" not in found
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        found = doctor("--server", encrypted.url)[1]
        assert found["TLS"]["found"].startswith("TLSv1.3, certificate valid until ") and "HTTP" in found
    tls = doctor("--server", server.url.replace("http:", "https:"))[1]["TLS"]
    assert "no TLS there" in tls["found"] and "http://" in tls["advice"]


def test_a_server_that_is_not_ready_is_a_fault(doctor: Doctor) -> None:
    """It says why."""
    with serve_fake(drain_s=20.0) as server:
        server.core.is_draining = True
        code, found = doctor("--server", server.url)
        server.core.is_draining = False
    assert code == 1 and found["server"]["found"] == "fake is not ready: it is shutting down"


def test_the_pulled_draft_is_examined(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that `run` takes for the server's target, before the reference draft; damaged, `outrider pull` helps."""
    monkeypatch.setattr("outrider.edge.doctor.examine.profile_draft", profile := Mock(return_value=PROFILE))
    shelf = Shelf(tmp_path / "cache" / "drafts")
    reference = make_draft(tmp_path / "cache" / "pairs" / "a" / "draft").path
    with serve_fake() as server:
        asked = ("--server", server.url)
        assert doctor(*asked)[0] == 0
        pulled = make_draft(shelf.root / "new", content=b"1").path.rename(shelf.place("1" * 64))
        make_draft(shelf.root / "newer", content=b"2").path.rename(shelf.place("2" * 64))
        target = str(server.core.model.target)
        shelf.note("1" * 64, target, PulledFor(model="fake", server=server.url, name="cpu", at_s=1.0))
        code, found = doctor(*asked)
        assert code == doctor(*asked, "--draft", "reference")[0] == 0 and "share one" in found["tokenizer"]["found"]
        assert [call.args[0] for call in profile.call_args_list] == list(map(str, (reference, pulled, reference)))
        (pulled / "openvino_model.bin").write_bytes(b"damaged")
        code, found = doctor(*asked)
        assert code == 1 and found["draft"]["advice"] == "run `outrider pull` again"
        assert found["draft"]["found"] == f"the one pulled for fake is damaged, at {pulled}"


def test_one_real_examination(
    fake_bundle: Path, server: FakeServer, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the installed packages and a probe in its own process, through the command."""
    monkeypatch.setattr("outrider.edge.doctor.examine.profile_draft", profile_draft)
    code, found = doctor("--server", server.url, "--draft", str(fake_bundle), "--runtime", "ngram")
    assert code == 0 and "n-gram" in found["draft's device"]["found"]
