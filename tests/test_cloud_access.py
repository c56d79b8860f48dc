"""Tests `outrider-cloud serve` with keys, audit log and tokens per minute: what it reads again while it runs."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest
from tests.serving import bearer, fake_target
from tests.waiting import wait_until

from outrider.cloud.server import serve as serve_module
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.signals import takes_hangups
from outrider.models.errors import ConfigError
from outrider.models.http.keys import ApiKey
from outrider.models.process import watched_files

ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_running_server_reads_its_keys_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change, and on SIGHUP, also in loading; a broken file is counted; the audit log names each key."""
    keys, audit, port_file = tmp_path / "keys", tmp_path / "audit.jsonl", tmp_path / "port"
    keys.write_text("the-key-of-the-start\n")
    monkeypatch.setattr(watched_files, "LOOK_S", 0.02)
    failures: list[BaseException] = []

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

    def beside() -> None:
        try:
            wait_until(port_file.exists)
            use(f"http://127.0.0.1:{port_file.read_text().strip()}")
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

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
        thread = threading.Thread(target=beside)
        thread.start()
        serve_module.serve(options)
        thread.join()
    if failures:
        raise failures[0]
    assert signal.getsignal(signal.SIGHUP) == before
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert {line["key"] for line in lines if line["status"] == 200} == {ApiKey.plain(ALICE).name, "bob"}
    assert "tokens_exhausted" in {line["end"] for line in lines}


def test_mistakes_show_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CA without HTTPS; a server beyond loopback without keys or client certificates; an audit log with no place."""
    monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
    with pytest.raises(ConfigError, match="--tls-client-ca needs HTTPS"):
        serve_module.serve(ServeOptions("fake", port=0, tls_client_ca=tmp_path / "ca.pem"))
    with pytest.raises(ConfigError, match="--api-key-file or --tls-client-ca"):
        serve_module.serve(ServeOptions("fake", port=0, host="0.0.0.0"))
    loads: list[bool] = []
    with fake_target(lambda: loads.append(True)) as target:
        monkeypatch.setattr(serve_module, "open_target", lambda _: target)
        with pytest.raises(ConfigError, match="the audit log "):
            serve_module.serve(ServeOptions("fake", port=0, audit_log=tmp_path / "missing" / "audit.jsonl"))
    assert not loads


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_hangup_is_remembered() -> None:
    """One that comes before the files are watched is acted upon when they are; a later one at once."""
    acts: list[str] = []
    before = signal.getsignal(signal.SIGHUP)
    with takes_hangups() as hangups:
        signal.raise_signal(signal.SIGHUP)
        assert not acts
        hangups.act_by(lambda: acts.append("read"))
        assert acts == ["read"]
        signal.raise_signal(signal.SIGHUP)
        assert acts == ["read", "read"]
    assert signal.getsignal(signal.SIGHUP) == before
