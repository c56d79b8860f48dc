"""Tests what watches vLLM: a hang, a request without an end, an engine process that is dead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import fake_tokenizer, serve_fake
from typer.testing import CliRunner

from outrider.cloud.api.state import ServedModel
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.server import main as cli
from outrider.cloud.server import serve as serve_module
from outrider.cloud.server.target import LoadedTarget
from outrider.cloud.vllm.hang_watch import DEAD_AFTER, HUNG_AFTER, LOST_AFTER, HangWatch


def test_silence_is_a_hang_while_sequences_are_open() -> None:
    """First no new work is taken, then the engine is given up; an idle engine is silent, a report ends the silence."""
    watch = HangWatch()
    for _ in range(2 * DEAD_AFTER):
        watch.tick({})
    assert not watch.is_hung
    for tick in range(1, DEAD_AFTER + 1):
        watch.tick({1: None})
        assert watch.is_hung == (tick >= HUNG_AFTER) and watch.is_dead == (tick >= DEAD_AFTER)
    watch.heard()
    assert not watch.is_hung and not watch.is_dead


def test_a_request_that_vllm_answers_has_to_end() -> None:
    """What it refused in its own process is not reported by the scheduler."""
    watch = HangWatch()
    for number in (1, 2):
        watch.answered(number)
    found = [watch.tick({1: None, 3: None}) for _ in range(2 * LOST_AFTER)]
    assert [late for late in found if late] == [[1]] and found.index([1]) == LOST_AFTER - 1


CHILD = """
import os, sys
from outrider.cloud.vllm.parent import PLACE_VARIABLE, end_with_parent

def run(pipe):
    end_with_parent()
    end_with_parent()
    pipe.send(os.getpid())
    pipe.recv()

if __name__ == "__main__":
    import multiprocessing
    os.environ[PLACE_VARIABLE] = sys.argv[1]
    end_with_parent()  # nobody's child
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=run, args=(theirs,)).start()
    print(ours.recv(), flush=True)
    sys.stdin.read()
"""


def test_the_engine_process_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """And takes the directory of the sockets with it."""
    place, script = tmp_path / "place", tmp_path / "child.py"
    place.mkdir()
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        assert place.exists()
        server.kill()
    psutil.wait_procs([child], timeout=20.0)
    assert not child.is_running() and not place.exists()


def test_a_server_whose_engine_is_dead_is_neither_live_nor_ready() -> None:
    """So that a supervisor that asks sees it, too, until the process has ended."""
    with serve_fake() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health/live").json() == {"status": "live"}
        server.core.is_dead = server.core.is_draining = True
        for path in ("/health/live", "/livez", "/health/ready"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "failed"), path
        server.core.is_draining = False
        server.server.fail("vLLM has died")
        server.wait_until(lambda: server.server.should_exit)


def test_a_server_whose_engine_has_died_ends_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says why; a server that is ended by a signal returns 0."""
    tokenizer = fake_tokenizer()

    class Dying(EngineThread):
        def on_death(self, act: Callable[[str], None]) -> None:
            act("vLLM's engine process has died")

    class FakeTarget:
        path, source_name = tmp_path, "fake"
        model = ServedModel("fake", tokenizer, frozenset({0}), target="0" * 16)

        @contextmanager
        def load(self) -> Iterator[LoadedTarget]:
            yield LoadedTarget(Dying(FakeBatchRuntime(vocab_size=tokenizer.size)), "loaded")

    monkeypatch.setattr(serve_module, "open_target", lambda options: FakeTarget())
    command = ["serve", str(tmp_path), "--port", "0", "--port-file", str(tmp_path / "port")]
    found = CliRunner().invoke(cli.app, command)
    assert found.exit_code == serve_module.ENGINE_FAILED == 70
    assert "vLLM's engine process has died; its log is above." in found.output + capsys.readouterr().err
