"""Tests commands that other commands start: what they print, how they end, and on which cores they run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from outrider.edge.lab import cores
from outrider.models.errors import RuntimeUnavailable
from outrider.models.process.child_command import run_child_command

TIMEOUT_S = 120.0
pytestmark = pytest.mark.usefixtures("signals_reach_children")
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open({told!r}, 'w').write('told'))
open({started!r}, 'w').write(str(os.getpid()))
while True:
    time.sleep(60.0)
"""


def test_a_child_command_gives_what_it_prints_or_fails() -> None:
    """Its standard error is ours; a failure is one error."""
    assert run_child_command(["-c", "print('東')"], "no") == "東\n"
    with pytest.raises(RuntimeUnavailable, match="it did not work"):
        run_child_command(["-c", "raise SystemExit(2)"], "it did not work")


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_child_command_ends_with_us(number: signal.Signals, tmp_path: Path) -> None:
    """However we are told to end: the child is told, and has ended before we have."""
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    child = f"import os, signal; open({str(fifo)!r}, 'w').write(str(os.getpid())); signal.pause()"
    code = f"from outrider.models.process.child_command import run_child_command as run; run(['-c', {child!r}], 'no')"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.DEVNULL,
    )
    try:
        started = psutil.Process(int(fifo.read_text()))  # waits for the child
        process.send_signal(number)
        process.wait(TIMEOUT_S)
        assert not psutil.wait_procs([started], timeout=TIMEOUT_S)[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_a_second_ctrl_c_ends_a_child_that_takes_its_time(tmp_path: Path) -> None:
    """The child ignores being told to end; it is killed long before its time is up."""
    started, told = tmp_path / "started", tmp_path / "told"
    os.mkfifo(started)
    os.mkfifo(told)
    child = STUBBORN.format(started=str(started), told=str(told))
    code = (
        "from outrider.models.process import child_command\n"
        "child_command._GRACE_S = 1e6\n"
        f"child_command.run_child_command(['-c', {child!r}], 'no')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.DEVNULL,
    )
    try:
        stubborn = psutil.Process(int(started.read_text()))  # waits for the child
        process.send_signal(signal.SIGINT)
        assert told.read_text() == "told"
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
        assert not psutil.wait_procs([stubborn], timeout=TIMEOUT_S)[1]
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not hasattr(psutil.Process, "cpu_affinity"), reason="this system pins nothing")
def test_cores_are_chosen_without_posix_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where psutil asks the system."""
    before = psutil.Process().cpu_affinity()
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    plan = cores.plan_cores()
    assert (plan.cloud is None) == (len(before) < 2)
    several = cores.plan_cores(8)
    if several.cloud and several.agent:
        assert len(several.cloud) == len(several.agent) == min(8, len(before) // 2)
        assert not several.cloud & several.agent
    with cores.running_on(frozenset(before[:1])):
        assert psutil.Process().cpu_affinity() == before[:1]
    assert psutil.Process().cpu_affinity() == before
