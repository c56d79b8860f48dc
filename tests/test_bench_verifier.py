"""Tests how benchmarks choose their verifier: by engine and interpreter."""

from __future__ import annotations

import sys

import pytest
from bench.pairs import PAIR_OPTIONS, open_pair
from bench.report import parser
from bench.verifier import VLLM, Verifier, make_verifier

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
