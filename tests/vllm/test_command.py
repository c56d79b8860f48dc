"""`outrider-cloud serve --engine vllm` as a process: from its start over the death of vLLM's process to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from tests.serving import read_events, run_session
from tests.vllm.serving import Reference
from tests.waiting import wait_until

from outrider.cloud.server.serve import ENGINE_FAILED
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import SessionEnd, SessionOpen

TARGET = Path(__file__).parents[2] / "reference" / "outrider" / "reference" / "target"
START_S = 240.0


COMMAND = [sys.executable, "-m", "outrider.cloud.server", "serve", str(TARGET), "--engine", "vllm", "--port", "0"]


def children_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return list(psutil.Process(process.pid).children(recursive=True))


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def is_engine(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("EngineCore" in part for part in (process.name(), *process.cmdline()))
    return False


@contextmanager
def serving(tmp_path: Path, code: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """The command, ready, in a process group of its own. code: how it ends."""
    port_file = tmp_path / "port"
    options = ["--vllm-option", "dtype=float32", "--vllm-option", "enforce_eager=true", "--port-file", str(port_file)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*COMMAND, *options], stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until(lambda: port_file.exists() or process.poll() is not None, START_S)
            assert process.poll() is None, (tmp_path / "log").read_text()
            with httpx.Client(base_url=f"http://127.0.0.1:{port_file.read_text().strip()}", timeout=60.0) as client:
                yield process, client
            assert (process.wait(60.0), port_file.exists()) == (code, code == -signal.SIGKILL)
        finally:
            process.kill()
            process.wait()


def prompt_ids() -> list[int]:
    return Tokenizer.from_dir(TARGET).encode("def walk(path):", add_special_tokens=False)


def test_the_death_of_vllm_ends_the_server(tmp_path: Path) -> None:
    """It serves the target's text; when vLLM's process dies, open streams get an error, and a supervisor a code."""
    prompt = prompt_ids()
    with serving(tmp_path, ENGINE_FAILED) as (process, client):
        children = children_of(process)
        body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True}
        expected = Reference(TARGET)(prompt, 12)
        assert run_session(client, body).tokens == expected
        facts = client.get("/v1/model").json()
        assert facts["name"] == "target" and len(facts["target"]) == 16
        verified = client.post("/v1/verify", json={"items": [{"prefix": prompt, "draft": expected[:3]}]}).json()
        assert verified["results"][0]["tokens"] == expected[:4]
        long = body | {"max_tokens": 900, "temperature": 1.0}  # a greedy text repeats itself, and lookup ends it soon
        with client.stream("POST", "/v1/sessions", json=long) as response:
            events = read_events(response)
            assert isinstance(next(events), SessionOpen)
            next(events)
            for child in filter(is_engine, children):
                child.kill()
            *_, end = events
        assert isinstance(end, SessionEnd) and end.reason == "error"
    assert "vLLM's engine process has died; its log is above" in (tmp_path / "log").read_text()
    wait_until(lambda: are_gone(children), 60.0)


def test_nothing_outlives_a_server_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither processes nor files. While it runs, no process of vLLM holds its port; all sockets are in one place."""
    with tempfile.TemporaryDirectory(prefix="o-", ignore_cleanup_errors=True) as directory:  # sockets have short paths
        monkeypatch.setenv("TMPDIR", directory)
        with serving(tmp_path, -signal.SIGKILL) as (process, client):
            children = children_of(process)
            assert any(map(is_engine, children))
            (place,) = Path(directory).glob("outrider-vllm-*")
            assert place.stat().st_mode & 0o777 == 0o700
            ports = [each.laddr.port for child in children for each in child.net_connections("tcp")]
            assert client.base_url.port not in ports
            sockets = [
                each.laddr for one in (process, *children) for each in psutil.Process(one.pid).net_connections("unix")
            ]
            named = {path for path in sockets if isinstance(path, str) and path.startswith("/")}
            assert {Path(path).parent for path in named} == {place}
            process.kill()
        wait_until(lambda: are_gone(children) and not place.exists(), 60.0)


def test_a_signal_during_the_load_ends_vllm_too(tmp_path: Path) -> None:
    """SIGTERM from a supervisor that does not want to wait for the weights."""
    with (tmp_path / "log").open("w") as log, subprocess.Popen(COMMAND, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: len(children_of(process)) > 1, START_S)  # Python's tracker, and vLLM's process
            children = children_of(process)
            process.terminate()
            assert process.wait(60.0) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
        finally:
            process.kill()
    wait_until(lambda: are_gone(children), 60.0)


def test_ctrl_c_lets_a_session_finish(tmp_path: Path) -> None:
    """It reaches every process of the terminal; vLLM's go on until the server has drained."""
    body = {"prompt": prompt_ids(), "max_tokens": 300, "ignore_eos": True}
    with serving(tmp_path) as (process, client):
        with client.stream("POST", "/v1/sessions", json=body) as response:
            events = read_events(response)
            next(events), next(events)
            os.killpg(process.pid, signal.SIGINT)
            *_, end = events
        assert isinstance(end, SessionEnd) and end.reason == "length" and end.usage.completion_tokens == 300
