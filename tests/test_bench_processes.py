"""The processes that benches start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.processes import Program, started

from outrider.models.ingress.sockets import READY_PREFIX

SERVER = f"print({READY_PREFIX!r} + 'http://127.0.0.1:9', flush=True); import time; time.sleep(600)"


@pytest.mark.skipif(not os.access("/proc/self/autogroup", os.W_OK), reason="sessions have no nice level here")
def test_a_session_has_the_nice_level_of_its_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `nice` alone would not reach: Linux shares the processors between sessions first."""
    for level in (0, 7):
        monkeypatch.setattr(os, "getpriority", lambda which, who, level=level: level)
        with started(Program(["-c", SERVER], tmp_path / "log")) as program:
            assert Path(f"/proc/{program.pid}/autogroup").read_text().split()[-2:] == ["nice", str(level)]
