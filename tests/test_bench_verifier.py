"""Tests how benchmarks choose their verifier: by engine and interpreter."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from bench.open_and_drop import leaks, state_of
from bench.pairs import PAIR_OPTIONS, open_pair
from bench.processes import Program
from bench.report import parser
from bench.verifier import VLLM, Verifier, make_verifier
from tests.serving import run_session, serve_fake

from outrider.models.errors import ConfigError


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


@contextmanager
def reports_to(watch: Path) -> Iterator[None]:
    """This process does as `bench.watched_server` on SIGUSR1, with no tasks and objects."""
    report = json.dumps({"tasks": [], "objects": {}})
    before = signal.signal(signal.SIGUSR1, lambda *_: watch.write_text(report))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs SIGUSR1")
def test_a_server_that_is_watched_for_leaks(tmp_path: Path) -> None:
    """Its metrics have the names that the bench reads; kept prefixes and texts are no leaks."""
    watch = tmp_path / "alive.json"
    body: dict[str, Any] = {"prompt": [5, 17, 99], "max_tokens": 8, "ignore_eos": True, "keep_prefix": True}
    with serve_fake() as server, reports_to(watch), httpx.Client(base_url=server.url) as client:
        port = int(server.url.rpartition(":")[2])
        program = cast(Program, SimpleNamespace(url=server.url, pid=os.getpid(), port=port))
        client.headers["connection"] = "close"
        before = state_of(program, watch)
        run_session(client, body)
        after = state_of(program, watch)
    assert (before.parked, after.parked, after.blocks, after.busy) == (0.0, 1.0, 0, {})
    assert not [each for each in leaks(before, after) if "KV blocks" in each or "nobody" in each]
