"""Tests API keys: digests in a file that is read again, scopes, limits of their own, and what a removal ends.

Then `outrider-cloud serve` with keys, audit log and tokens per minute: what it reads again while it runs.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections import Counter
from pathlib import Path
from unittest.mock import ANY, Mock

import httpx
import pytest
from tests.serve_command import used_beside
from tests.serving import ALICE, BOB, PROMPT, StepGate, bearer, code_of, fake_target, key_line, open_session, serve_fake
from tests.waiting import wait_until
from typer.testing import CliRunner

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.server import serve as serve_module
from outrider.cloud.server.keys import add_key, new_key, remove_key
from outrider.cloud.server.main import app
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.signals import takes_hangups
from outrider.models.errors import ConfigError, RequestError
from outrider.models.http.keys import ApiKey, KeyRing, Scope, read_key_lines
from outrider.models.process.watched_files import WatchedFiles


def written(path: Path, *lines: str) -> Path:
    """A key file."""
    path.write_text("\n".join(lines) + "\n")
    return path


# -- the file --------------------------------------------------------------------------------------------------------


def test_a_line_is_a_key_or_a_digest_with_attributes() -> None:
    """What is written is what is read; a plain key has every scope, a digest only what its line says."""
    full = ApiKey(b"x" * 32, "team-a", frozenset(Scope), 2.5, 16, 60_000, -3)
    assert ApiKey.parse(full.as_line()) == full
    for plain in (ALICE, "c2VjcmV0LWluLWJhc2U2NA==", "shared:by-the-whole-team"):
        assert ApiKey.parse(plain) == ApiKey.plain(plain) and ApiKey.plain(plain).scopes == frozenset(Scope)
    digest = ApiKey.plain(ALICE).digest
    assert ApiKey.parse(key_line(ALICE)) == ApiKey(digest, f"key-{digest.hex()[:8]}", frozenset({Scope.GENERATE}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sha256:12ab", "expected 64 hex digits"),
        (key_line(ALICE, "scopes=write"), "expected one or more of generate,metrics"),
        (key_line(ALICE, "sessions=many"), "expected a whole number"),
        (key_line(ALICE, "sessions=0"), "expected more than 0"),
        (key_line(ALICE, "requests-per-second=nan"), "expected more than 0"),
        (key_line(ALICE, "priority=101"), "expected -100 to 100"),
        (key_line(ALICE, "colour=red"), "expected NAME=VALUE"),
        (key_line(ALICE, "name=a name=b"), "once each"),
        (key_line(ALICE, "name=a/b"), "letters, digits"),
        ("short", "expected 16 or more"),
        (f"sha265:{'0a' * 32} name=x scopes=metrics", "neither a key nor"),
        (f"sha265:{'0a' * 32}", "neither a key nor"),
        ("garbage line here", "neither a key nor"),
        ("name=team-x sessions=4", "neither a key nor"),
        ("name=a-team-without-spaces", "comments begin with #"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number_and_not_quoted(tmp_path: Path, line: str, message: str) -> None:
    """A plain line may be a key, so no message shows one."""
    with pytest.raises(ConfigError, match=f"line 2: .*{message}") as error:
        KeyRing.load(written(tmp_path / "keys", "# ours", line))
    assert line not in str(error.value)


def test_names_and_digests_are_unique(tmp_path: Path) -> None:
    """Two keys of one name could not be told apart in the audit log."""
    for lines in ((key_line(ALICE, "name=a"), key_line(BOB, "name=a")), (key_line(ALICE, "name=a"), ALICE)):
        with pytest.raises(ConfigError, match=r"line 2: .*earlier line"):
            read_key_lines(written(tmp_path / "keys", *lines))
    assert len(read_key_lines(written(tmp_path / "keys", ALICE, ALICE))) == 2  # the same one, as before


def test_commands_make_list_and_remove_keys(tmp_path: Path) -> None:
    """The key is printed once, the file has its digest and mode 0600, other lines stay."""
    path, run = written(tmp_path / "keys", "# ours", ALICE), CliRunner()
    limits = ["--sessions", "4", "--tokens-per-minute", "9000", "--requests-per-second", "0.5", "--priority", "7"]
    made = run.invoke(app, ["keys", "add", "team-a", str(path), "--scope", "generate", "--scope", "metrics", *limits])
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("outrider_") and new_key() != new_key()
    assert path.read_text().startswith(f"# ours\n{ALICE}\n") and key not in path.read_text()
    assert os.name != "posix" or stat.S_IMODE(path.stat().st_mode) == 0o600
    found = KeyRing.load(path).find(b"Bearer " + key.encode())
    assert found == ApiKey(ApiKey.plain(key).digest, "team-a", frozenset(Scope), 0.5, 4, 9000, 7)
    listed = run.invoke(app, ["keys", "list", str(path)]).stdout
    assert "team-a" in listed and "9000" in listed and key not in listed and ALICE not in listed
    with pytest.raises(ConfigError, match="choose another name"):
        add_key(path, ApiKey.parse(key_line(BOB, "name=team-a")))
    assert run.invoke(app, ["keys", "remove", "team-a", str(path)]).exit_code == 0
    assert path.read_text() == f"# ours\n{ALICE}\n"
    for name, message in (("team-a", "no key with the name"), (ApiKey.plain(ALICE).name, "the last key of .*; add")):
        with pytest.raises(ConfigError, match=message):  # without its last key a server would go on with that
            remove_key(path, name)
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


@pytest.mark.skipif(os.name != "posix", reason="files have no owner as on POSIX")
def test_a_changed_file_keeps_owner_and_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's user reads it; who cannot give it to them changes nothing."""
    path, give = written(tmp_path / "keys", ALICE), Mock()
    path.chmod(0o640)
    found = path.stat()
    monkeypatch.setattr(os, "fchown", give)
    add_key(path, ApiKey.parse(key_line(BOB, "name=b")))
    give.assert_called_once_with(ANY, found.st_uid, found.st_gid)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    give.side_effect = PermissionError(1, "Operation not permitted")
    with pytest.raises(ConfigError, match="another owner or group"):
        remove_key(path, "b")
    assert [each.name for each in read_key_lines(path)][1:] == ["b"]
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]


def watched(folder: Path, *lines: str) -> tuple[Path, KeyRing, WatchedFiles, Counter[tuple[str, str]]]:
    """A key file, its ring, what looks at it, and the counts of its looks."""
    path = written(folder / "keys", *lines)
    ring = KeyRing.load(path)
    return path, ring, WatchedFiles("keys", [path], ring.reload), Counter()


def test_a_changed_file_is_read_once_it_keeps_still(tmp_path: Path) -> None:
    """A file that changes between two looks is left alone; one that is broken leaves the old keys, and is counted."""
    path, ring, files, counts = watched(tmp_path, ALICE)
    files.check(counts)
    assert not counts
    written(path, BOB)
    files.check(counts)
    assert ring.find(b"Bearer " + ALICE.encode())  # it may still be written
    files.check(counts)
    assert counts == {("keys", "ok"): 1} and ring.find(b"Bearer " + BOB.encode())
    with pytest.raises(RequestError, match="not accepted"):
        ring.find(b"Bearer " + ALICE.encode())
    for broken in (["short"], ["# none"], [BOB, "a line of prose"]):
        written(path, *broken)
        for _ in range(3):
            files.check(counts)
    path.unlink()
    files.check(counts, is_forced=True)
    files.check(counts)
    assert counts == {("keys", "ok"): 1, ("keys", "failed"): 4} and len(ring) == 1
    assert ring.find(b"Bearer " + BOB.encode())


def test_a_file_that_is_still_written_is_not_read_on_sighup(tmp_path: Path) -> None:
    """An editor that has begun to write leaves fewer keys; the forced read waits until the file keeps still."""
    path, ring, files, counts = watched(tmp_path, ALICE, BOB)
    written(path, ALICE)  # BOB's line is to follow
    files.check(counts, is_forced=True)
    assert not counts
    written(path, ALICE, BOB)
    for is_forced, num_read in ((False, 0), (False, 1), (False, 1), (True, 2)):  # unchanged and still: at once
        files.check(counts, is_forced=is_forced)
        assert counts["keys", "ok"] == counts.total() == num_read and len(ring) == 2


# -- the server ------------------------------------------------------------------------------------------------------


def test_a_route_needs_its_scope() -> None:
    """/metrics needs `metrics`, all others `generate`; the error names the one that is missing."""
    keys = [ApiKey.parse(key_line(ALICE, "scopes=generate")), ApiKey.parse(key_line(BOB, "scopes=metrics"))]
    with serve_fake(ServerSettings(KeyRing(keys))) as server, httpx.Client(base_url=server.url) as client:
        body = {"prompt": PROMPT, "max_tokens": 1}
        assert client.post("/v1/completions", json=body, headers=bearer(ALICE)).status_code == 200
        assert client.get("/metrics", headers=bearer(BOB)).status_code == 200
        for method, path, key, missing in (
            ("GET", "/metrics", ALICE, "metrics"),
            ("POST", "/v1/completions", BOB, "generate"),
            ("GET", "/v1/models", BOB, "generate"),
            ("POST", "/v1/sessions/x/drafts", BOB, "generate"),
        ):
            answer = client.request(method, path, json=body, headers=bearer(key))
            assert code_of(answer) == (403, "scope_missing") and missing in answer.json()["error"]["message"]
        assert client.get("/health/ready").status_code == 200
        for path in ("/v1/model", "/v1/models/a/b", "/metrics", "/v1/tokenizer/a", "/v1/drafts/a/b", "/nowhere"):
            assert code_of(client.get(path)) == (401, "unauthorized")
        assert client.get("/v1/sessions/a/b", headers=bearer(ALICE)).status_code == 404
        counted = server.core.metrics.requests
        for route, status in (("/v1/models", 403), ("/v1/model", 401), ("/v1/models/{model:path}", 401)):
            assert counted[route, "GET", status] == 1, "a refused request has its route's name"
        assert counted["unmatched", "GET", 401] == counted["unmatched", "GET", 404] == 1


def test_a_key_has_limits_of_its_own() -> None:
    """Its rate and its sessions come before the server's; other keys keep the server's."""
    keys = KeyRing([ApiKey.parse(key_line(ALICE, "sessions=1 requests-per-second=0.001")), BOB])
    one, two = ({"prompt": prompts, "max_tokens": 1} for prompts in (PROMPT, [PROMPT, PROMPT]))
    with serve_fake(ServerSettings(keys)) as server, httpx.Client(base_url=server.url) as client:
        assert code_of(client.post("/v1/completions", json=two, headers=bearer(ALICE))) == (400, "invalid_parameter")
        refused = client.post("/v1/completions", json=one, headers=bearer(ALICE))
        assert code_of(refused) == (429, "rate_limited") and int(refused.headers["retry-after"]) > 900
        assert {client.post("/v1/completions", json=two, headers=bearer(BOB)).status_code for _ in range(3)} == {200}


def test_the_removal_of_a_key_ends_its_work(tmp_path: Path) -> None:
    """Streams of the removed key end with `unauthorized`, its next request is refused; other keys notice nothing."""
    path = written(tmp_path / "keys", ALICE, BOB)
    keys = KeyRing.load(path)
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    with (
        serve_fake(ServerSettings(keys), gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
        open_session(client, body, bearer(ALICE)) as session,
        client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=bearer(ALICE)) as text,
        open_session(client, body | {"max_tokens": 9}, bearer(BOB)) as other,
    ):
        server.gate.allow(3)
        session.commit()
        written(path, BOB)
        files = WatchedFiles("keys", [path], lambda: server.core.admission.revoke(keys.reload()))
        files.check(Counter(), is_forced=True)
        server.gate.open()
        end = session.rest().end
        assert end.reason == "error" and end.error is not None and end.error.code == "unauthorized"
        assert '"unauthorized"' in text.read().decode()
        end = other.rest().end
        assert end.reason == "length" and end.usage.completion_tokens == 9
        assert code_of(client.post("/v1/sessions", json=body, headers=bearer(ALICE))) == (401, "unauthorized")
        server.wait_until(server.is_empty)
        assert not server.core.admission._open


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_running_server_reads_its_keys_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change, and on SIGHUP, also in loading; a broken file is counted; the audit log names each key."""
    keys, audit, port_file = tmp_path / "keys", tmp_path / "audit.jsonl", tmp_path / "port"
    keys.write_text("the-key-of-the-start\n")
    monkeypatch.setattr("outrider.models.process.watched_files.LOOK_S", 0.02)

    def use(url: str) -> None:
        body = {"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True}

        def status(key: str) -> int:
            return client.post("/v1/completions", json=body, headers=bearer(key)).status_code

        with httpx.Client(base_url=url) as client:
            wait_until(lambda: status(ALICE) == 200)  # the file changed while the model was loaded
            assert status(BOB) == 401
            keys.write_text(f"sha256:{ApiKey.plain(BOB).digest.hex()} name=bob scopes=generate,metrics\n")
            wait_until(lambda: status(BOB) == 200)
            assert status(ALICE) == 401
            keys.write_text("broken\n")
            os.kill(os.getpid(), signal.SIGHUP)
            failed = 'outrider_reloads_total{file="keys",result="failed"} 1.0'
            wait_until(lambda: failed in client.get("/metrics", headers=bearer(BOB)).text)
            assert status(BOB) == 200
            assert client.post("/v1/completions", json=body | {"prompt": [1] * 90}, headers=bearer(BOB)).is_error

    options = ServeOptions(
        "fake", port=0, port_file=port_file, api_key_file=keys, audit_log=audit, tokens_per_minute=80, drain_s=0.0
    )

    def on_load() -> None:
        keys.write_text(f"{ALICE}\n")
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.getsignal(signal.SIGHUP)
    with fake_target(on_load) as target:
        monkeypatch.setattr(serve_module, "open_target", lambda _: target)
        monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
        with used_beside(port_file, use):
            serve_module.serve(options)
    assert signal.getsignal(signal.SIGHUP) == before
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {line["key"] for line in lines if line["status"] == 200} == {ApiKey.plain(ALICE).name, "bob"}
    assert "tokens_exhausted" in {line["end"] for line in lines}


def test_mistakes_show_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CA without HTTPS; an audit log with no place."""
    on_load = Mock()
    with fake_target(on_load) as target:
        monkeypatch.setattr(serve_module, "open_target", lambda _: target)
        monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
        for message, options in (
            ("--tls-client-ca needs HTTPS", ServeOptions("fake", port=0, tls_client_ca=tmp_path / "ca.pem")),
            ("the audit log ", ServeOptions("fake", port=0, audit_log=tmp_path / "missing" / "audit.jsonl")),
        ):
            with pytest.raises(ConfigError, match=message):
                serve_module.serve(options)
    assert not on_load.called


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_hangup_is_remembered() -> None:
    """One that comes before the files are watched is acted upon when they are; a later one at once."""
    before, act = signal.getsignal(signal.SIGHUP), Mock()
    with takes_hangups() as hangups:
        signal.raise_signal(signal.SIGHUP)
        assert not act.called
        hangups.act_by(act)
        assert act.call_count == 1
        signal.raise_signal(signal.SIGHUP)
        assert act.call_count == 2
    assert signal.getsignal(signal.SIGHUP) == before
