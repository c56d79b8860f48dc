"""Tests how benchmarks choose their verifier, by engine and interpreter, and the processes that they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from bench.pairs import PAIR_OPTIONS, open_pair
from bench.processes import Program, started
from bench.report import parser
from bench.verifier import VLLM, Verifier, make_verifier

from outrider.models.errors import ConfigError
from outrider.models.ingress.sockets import READY_PREFIX


def test_the_embedded_engine_needs_nothing() -> None:
    """This interpreter, and no options."""
    assert make_verifier("embedded", None) == Verifier("embedded", sys.executable)
    assert Verifier().options == ()


def test_vllm_runs_by_an_interpreter_of_its_own() -> None:
    """One that exists; its texts are compared, so it computes in float32."""
    verifier = make_verifier(VLLM, sys.executable)
    assert verifier.is_vllm and "dtype=float32" in verifier.options
    with pytest.raises(ConfigError, match="give its interpreter with --server"):
        make_verifier(VLLM, None)
    with pytest.raises(ConfigError, match="there is no interpreter /no/such"):
        make_verifier(VLLM, "/no/such")


def test_what_vllm_cannot_be_compared_with_is_refused() -> None:
    """The draft beside the target runs on a runtime of ours."""
    options = parser(None, PAIR_OPTIONS).parse_args(["--engine", "vllm", "--server", sys.executable])
    with pytest.raises(ConfigError, match="--leave-out beside"), open_pair(options, beside=True):
        pass


SERVER = f"print({READY_PREFIX!r} + 'http://127.0.0.1:9', flush=True); import time; time.sleep(600)"


@pytest.mark.skipif(not os.access("/proc/self/autogroup", os.W_OK), reason="sessions have no nice level here")
def test_a_session_has_the_nice_level_of_its_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `nice` alone would not reach: Linux shares the processors between sessions first."""
    for level in (0, 7):
        monkeypatch.setattr(os, "getpriority", lambda which, who, level=level: level)
        with started(Program(["-c", SERVER], tmp_path / "log")) as program:
            assert Path(f"/proc/{program.pid}/autogroup").read_text().split()[-2:] == ["nice", str(level)]
