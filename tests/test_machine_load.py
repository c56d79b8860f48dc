"""Tests that a busy machine is noticed where times are measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext

import psutil
import pytest

from outrider.models.process import machine_load
from outrider.models.process.machine_load import Counters, MachineLoad, read_counters

BURN = "import time\nwhile time.process_time() < {seconds}: pass"
"""Uses so much processor time, an interpreter's start included."""


def counters(
    clock_s: float,
    busy_s: tuple[float, ...],
    *,
    own_s: float,
    stolen_s: tuple[float, ...] = (0.0, 0.0),
    processors: tuple[int, ...] = (0, 1),
) -> Counters:
    return Counters(clock_s, busy_s, stolen_s, own_s, frozenset(processors))


BEGIN = counters(0, (0, 0), own_s=0)
BUSY = "This machine was busy: {} % of its processors while times were measured. Measure again when it is idle."
READINGS: dict[str, tuple[tuple[Counters, ...], float, str | None]] = {
    "nothing": ((), 0.0, None),
    "what this process uses": ((counters(5, (10, 10), own_s=3), counters(7, (12, 12), own_s=7)), 0.0, None),
    "other processes": (
        (counters(5, (10, 10), own_s=3), counters(7, (12, 11.48), own_s=4)),
        0.62,
        BUSY.format("other processes used 62"),
    ),
    "a little of others": ((BEGIN, counters(10, (5, 3), own_s=5.2)), 0.14, None),
    "what the host gave to others": (  # Linux counts steal in neither user nor system
        (BEGIN, counters(10, (6, 0), own_s=6, stolen_s=(3.0, 1.0))),
        0.2,
        BUSY.format("other virtual machines on its host used 20"),
    ),
    "processors that nothing of ours may use": (
        (counters(0, (0, 0), own_s=0, processors=(0,)), counters(2, (2, 2), own_s=2, processors=(0,))),
        0.0,
        None,
    ),
    "two measurements": (
        (BEGIN, counters(1, (1, 1), own_s=0), counters(5, (5, 5), own_s=0), counters(8, (5, 5), own_s=0)),
        0.25,
        BUSY.format("other processes used 25"),
    ),
    "too short for the counters": ((BEGIN, counters(0.05, (0.05, 0.05), own_s=0)), 1.0, None),
    # Of 0.1 s on two processors one tick each is 16 %.
    "ticks of the counters": ((BEGIN, counters(0.1, (0.03, 0.02), own_s=0)), 0.25, None),
    "a processor that is busy throughout": (
        (BEGIN, counters(0.1, (0.1, 0.0), own_s=0)),
        0.5,
        BUSY.format("other processes used 50"),
    ),
}


@pytest.mark.parametrize(("readings", "share", "warning"), READINGS.values(), ids=READINGS)
def test_others_are_reported_with_their_share_and_one_piece_of_advice(
    monkeypatch: pytest.MonkeyPatch, readings: tuple[Counters, ...], share: float, warning: str | None
) -> None:
    """Where they took more than a little, and enough was measured."""
    waiting, load = list(readings), MachineLoad()  # which reads two of them for each measurement
    monkeypatch.setattr(machine_load, "read_counters", lambda beside: waiting.pop(0))
    while waiting:
        with load:
            pass
    assert load.other_share == pytest.approx(share) and load.warning() == warning


def test_a_short_measurement_can_be_lengthened() -> None:
    """Until it can be judged; a long one is not."""
    with MachineLoad() as load:
        began = time.monotonic()
        load.lengthen()
        assert time.monotonic() - began > machine_load.SHORTEST_S * 0.5
        began = time.monotonic()
        load.lengthen()
        assert time.monotonic() - began < machine_load.SHORTEST_S


def test_a_child_is_ours_while_it_runs_and_after() -> None:
    before = read_counters().own_s
    code = BURN.format(seconds=0.2) + "\nprint(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "\n"
        assert read_counters().own_s - before >= 0.15
        child.communicate("\n")
    if sys.platform != "win32":
        assert read_counters().own_s - before >= 0.15


def test_processes_that_are_not_ours_are_noticed() -> None:
    """The real counters: as many busy processes as there are processors, none of them a descendant.

    Each reports when it begins and when it has used its time, so nothing here depends on how fast the machine is.
    """
    num_busy = psutil.cpu_count() or 1
    busy = f"import os\nos.write(1, b'b')\n{BURN.format(seconds=0.4)}\nos.write(1, b'e')"
    orphan = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {busy!r}])"
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as reports:
        for _ in range(num_busy):
            subprocess.run([sys.executable, "-c", orphan], check=True, stdout=writer)
        os.close(writer)
        seen, load = b"", MachineLoad()
        for mark, measured in ((b"b", nullcontext()), (b"e", load)):
            with measured:
                while seen.count(mark) < num_busy:
                    data = reports.read(64)
                    assert data, "a process ended too early"
                    seen += data
    assert load.other_share > 0.3 and load.warning() is not None
