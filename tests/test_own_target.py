"""Tests `--target`, a verifier on this machine, and commands that other commands start: their ends and their cores."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import psutil
import pytest
from rich.console import Console
from tests.commands import Outrider
from tests.serving import code_of
from tests.waiting import wait_until

from outrider.edge.cli.command_options import ChatOptions
from outrider.edge.cli.verifiers import _bundles
from outrider.edge.lab import cores
from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.own_verifier import OwnVerifier
from outrider.export.make.pair import PairPaths
from outrider.models.errors import RuntimeUnavailable
from outrider.models.process import with_parent
from outrider.models.process.child_command import run_child_command

TIMEOUT_S = 120.0
pytestmark = pytest.mark.usefixtures("signals_reach_children")


def command(name: str, pair: PairPaths, *more: str) -> list[str]:
    """`outrider NAME` with the pair on this machine."""
    options = ["--target", str(pair.target), "--draft", str(pair.draft)]
    return [sys.executable, "-m", "outrider.edge.cli", name, *options, *more]


@contextmanager
def started(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that finds our modules and is killed at the end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(arguments, env=environment, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def has_ended(*processes: psutil.Process) -> bool:
    """Waits for them."""
    return not psutil.wait_procs(processes, timeout=TIMEOUT_S)[1]


def is_verifier(child: psutil.Process) -> bool:
    """Whether it runs one; a short program may have ended since it was listed."""
    try:
        return with_parent.__name__ in child.cmdline()
    except psutil.NoSuchProcess:
        return False


def address(shown: str) -> str:
    """Where the verifier listens, by what the command says of it."""
    found = re.search(r"on this machine at (\S+) until", shown)
    assert found is not None, shown
    return found[1]


def test_ctrl_c_does_not_reach_a_child_on_windows_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group of its own; `terminate` and `kill` need none there."""
    popen = MagicMock(side_effect=OSError("not on Windows"))
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="not on Windows"), child_process(["-m", "json"], ready_prefix=""):
        pass
    assert [call.kwargs["creationflags"] for call in popen.call_args_list] == [0x200]


def test_a_text_from_a_target_on_this_machine(reference_pair: PairPaths) -> None:
    """One command: the same text as without drafts, and no verifier afterwards."""
    options = ["--compare", "--json", "--seed", "1", "--max-tokens", "24", "def walk(path):"]
    done = subprocess.run(command("run", reference_pair, *options), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["identical"] and len(document["tokens"]) == 24
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address(done.stderr)}/health/live")


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("killed", ["the command", "its verifier"])
def test_neither_of_both_outlives_the_other(reference_pair: PairPaths, killed: str, tmp_path: Path) -> None:
    """Also when it is killed. The verifier's end is an error with its last lines, and no request waits for another."""
    errors = tmp_path / "errors"
    options = command("serve", reference_pair, "--port", "0")
    with errors.open("w") as stderr, started(options, stdout=subprocess.PIPE, stderr=stderr) as served:
        assert served.stdout is not None
        ready = served.stdout.readline()
        assert ready.startswith("OUTRIDER_READY "), errors.read_text()
        (verifier,) = psutil.Process(served.pid).children()
        assert code_of(httpx.get(f"{address(errors.read_text())}/v1/model")) == (401, "unauthorized")
        assert verifier.environ()["OUTRIDER_API_KEYS"] not in " ".join(verifier.cmdline())
        assert httpx.get(f"{ready.split()[1]}/health/ready").status_code == 200
        if killed == "the command":
            served.kill()
            assert has_ended(verifier)
        else:
            verifier.kill()
            assert served.wait(TIMEOUT_S) == 70
            shown = errors.read_text()
            assert "the verifier of --target has ended: `-m outrider.cloud.server serve` ended with code -9" in shown
            assert "Traceback" not in shown


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_ctrl_c_while_the_target_loads_ends_both(reference_pair: PairPaths) -> None:
    """The child is in a session of its own, so the terminal does not tell it."""
    with started(command("run", reference_pair, "def f("), stderr=subprocess.PIPE) as running:
        parent = psutil.Process(running.pid)

        def verifiers() -> list[psutil.Process]:
            """Libraries start short programs while they are imported: Ctrl-C there is another matter."""
            assert running.poll() is None
            return [child for child in parent.children() if is_verifier(child)]

        wait_until(lambda: bool(verifiers()), TIMEOUT_S)
        children = verifiers()
        running.send_signal(signal.SIGINT)
        assert running.wait(TIMEOUT_S) == 130 and has_ended(*children)
        assert running.stderr is not None and "Traceback" not in running.stderr.read()


def test_a_text_whose_verifier_ends_is_an_error_at_once() -> None:
    """It is not asked again and again; one that has ended before is not asked at all."""
    own, began = OwnVerifier("key"), threading.Event()

    async def text() -> None:
        began.set()
        await asyncio.Event().wait()

    def end() -> None:
        began.wait(TIMEOUT_S)
        own.has_ended("its last words")

    ending = threading.Thread(target=end)
    ending.start()
    for _ in range(2):
        with pytest.raises(RuntimeUnavailable, match="the verifier of --target has ended: its last words"):
            own.run(text())
    ending.join()


def test_a_module_reads_nothing_and_ends_with_what_started_it() -> None:
    """`with_parent` runs it as `python -m` does: its name, its arguments, an empty standard input."""
    code = "import sys, time; print(sys.argv[1:], sys.stdin.read(), flush=True); time.sleep(3600)"
    arguments = [sys.executable, "-m", with_parent.__name__, "timeit", "-n1", "-r1", code]
    with started(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == f"{arguments[4:]} \n"
        process.stdin.close()  # as the system does when the parent has ended
        assert process.wait(TIMEOUT_S) == 1


def test_the_target_comes_from_the_source_that_comes_first(config: Path, outrider: Outrider) -> None:
    """A flag before the file; two of one source are refused in one sentence."""
    config.write_text("[common]\ntarget = 'nowhere'\n", encoding="utf-8")
    for flags, said in (
        ([], f"--target is '{config.parent / 'nowhere'}', where no bundle is"),
        (["--cloud", "http://192.0.2.1:x"], "the cloud's address is 'http://192.0.2.1:x'"),
        (["--cloud", "http://127.0.0.1:8000", "--target", "x"], "leave one of them out"),
        (["--target", "x", "--key-file", "k"], "--target asks no other verifier, so --key-file would have no effect"),
    ):
        for name in ("run", "chat", "serve"):
            shown = outrider(name, *(["text"] if name == "run" else []), *flags, code=2).err
            assert said in shown and shown.count("\n") == 1
    config.write_text("[run]\ncloud = 'http://192.0.2.1'\ntarget = 'nowhere'\n", encoding="utf-8")
    assert "leave one of them out" in outrider("run", "text", code=2).err
    assert "--target is 'x'" in outrider("run", "text", "--target", "x", code=2).err


def test_without_the_servers_packages_one_command_is_named(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For a bundle those of the server; for the reference pair those of the exporter, too. The docs name the same."""
    page = (Path(__file__).parent.parent / "docs" / "serve.md").read_text(encoding="utf-8")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for target, extras in ((str(tmp_path), "cloud"), ("reference", "cloud,export")):
        shown = outrider("run", "text", "--target", target, code=2).err
        assert "needs the package 'fastapi'" in shown and shown.count("\n") == 1
        assert f'run: pip install "outrider[{extras}]"\n' in shown and f'"outrider[{extras}]"`' in page


def test_the_draft_beside_the_target_is_taken(tmp_path: Path) -> None:
    """Where none is named: `outrider-export pair` puts both there."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    for given, taken in ((["auto"], [str(draft)]), (["mine", "reference"], ["mine", "reference"])):
        found = _bundles(ChatOptions(target=str(target), draft=given), str(target), Console(quiet=True))
        assert found == (target, taken)


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open({told!r}, 'w').write('told'))
open({began!r}, 'w').write(str(os.getpid()))
while True:
    time.sleep(60.0)
"""


def test_a_child_command_gives_what_it_prints_or_fails() -> None:
    """Its standard error is ours; a failure is one error."""
    assert run_child_command(["-c", "print('東')"], "no") == "東\n"
    with pytest.raises(RuntimeUnavailable, match="it did not work"):
        run_child_command(["-c", "raise SystemExit(2)"], "it did not work")


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_child_command_ends_with_us(number: signal.Signals, tmp_path: Path) -> None:
    """However we are told to end: the child is told, and has ended before we have. Where we are killed it ends, too."""
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    child = f"import os, signal; open({str(fifo)!r}, 'w').write(str(os.getpid())); signal.pause()"
    options = ["-m", with_parent.__name__, "timeit", "-n1", "-r1", child]
    code = f"from outrider.models.process.child_command import run_child_command as run; run({options!r}, 'no')"
    with started([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        module = psutil.Process(int(fifo.read_text()))  # waits for it
        process.send_signal(number)
        process.wait(TIMEOUT_S)
        assert has_ended(module)


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_a_second_ctrl_c_ends_a_child_that_takes_its_time(tmp_path: Path) -> None:
    """The child ignores being told to end; it is killed long before its time is up."""
    began, told = tmp_path / "began", tmp_path / "told"
    os.mkfifo(began)
    os.mkfifo(told)
    child = STUBBORN.format(began=str(began), told=str(told))
    code = (
        "from outrider.models.process import child_command\n"
        "child_command._GRACE_S = 1e6\n"
        f"child_command.run_child_command(['-c', {child!r}], 'no')"
    )
    with started([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        stubborn = psutil.Process(int(began.read_text()))  # waits for the child
        process.send_signal(signal.SIGINT)
        assert told.read_text() == "told"
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
        assert has_ended(stubborn)


@pytest.mark.skipif(not hasattr(psutil.Process, "cpu_affinity"), reason="this system pins nothing")
def test_cores_are_chosen_without_posix_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where psutil asks the system."""
    before = psutil.Process().cpu_affinity()
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    assert (cores.plan_cores().cloud is None) == (len(before) < 2)
    several = cores.plan_cores(8)
    if several.cloud and several.agent:
        assert len(several.cloud) == len(several.agent) == min(8, len(before) // 2)
        assert not several.cloud & several.agent
    with cores.running_on(frozenset(before[:1])):
        assert psutil.Process().cpu_affinity() == before[:1]
    assert psutil.Process().cpu_affinity() == before
