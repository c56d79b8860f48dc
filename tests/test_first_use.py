"""Tests what `outrider run` says about drafting, comparing and servers that do not answer."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from tests.agents import scripted_client
from tests.commands import screen
from tests.serving import fake_tokenizer, serve_fake

from outrider.edge.cli.devices_screen import show_devices
from outrider.edge.cli.run import _printer, run_once
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.summary import summary_lines, why_undrafted
from outrider.edge.cli.terminal import TokenPrinter
from outrider.edge.devices.discovery import FoundDevice, FoundRuntime
from outrider.edge.drafting.belief import CommitOutcome
from outrider.edge.drafting.depth import CostModelDepth, DepthController, FixedDepth
from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.lab.comparison import (
    DRAFTED,
    Comparison,
    compare_modes,
    measured_load,
    typical,
)
from outrider.edge.lab.laboratory import CLOUD_ONLY
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, Source, TokenBatch
from outrider.models.client.client import VerifierClient, verifier_url
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.command_line import print_line
from outrider.models.process.machine_load import MachineLoad, read_counters


def result(num_tokens: int = 40, tokens_per_s: float = 50.0, **changes: Any) -> GenerationResult:
    """A steady text, a token per commit."""
    values = GenerationResult(
        mode=Mode.STREAM,
        tokens=tuple(range(num_tokens)),
        sources=(Source.TARGET,) * num_tokens,
        arrival_s=tuple(0.1 + i / tokens_per_s for i in range(num_tokens)),
        finish_reason="length",
        num_passes=num_tokens,
        num_accepted=0,
        num_tested=0,
        num_proposed=0,
    )
    return replace(values, **changes)


def agent(estimates: Estimates, depth: DepthController) -> StreamAgent:
    """A drafting agent that has measured `estimates`."""
    client = scripted_client(lambda request: httpx.Response(500), "127.0.0.1:1")
    return StreamAgent(Endpoints([client]), NgramDrafter(), depth, estimates)


def estimates(step_ms: float, extra_ms: float = 0.4, draft_ms: float = 1.0, round_trip_ms: float = 1.0) -> Estimates:
    """As measured on a server that reported its step."""
    found = Estimates()
    found.on_open(round_trip_ms, step_ms, extra_ms)
    found.on_posted(round_trip_ms)
    for _ in range(40):
        found.on_drafted(draft_ms, 1)
    return found


@pytest.mark.parametrize(
    ("measured", "later_ms", "said"),
    [
        pytest.param(
            {"step_ms": 2.1},
            [],
            r"^Drafting would not pay: a target step takes 2\.1 ms.*a drafted token 1\.0 ms.*a round trip 1 ms.*"
            r"A drafted token saves 1\.3 ms on average \(60% of a step\)\. To draft again it must save 2\.8 ms: "
            r"1\.5 times the 1\.9 ms that it costs the server with its message\.$",
            id="the target is too fast",
        ),
        pytest.param(
            {"step_ms": 55.5, "extra_ms": 60.0},
            [28.1],
            r"saves 33\.3 ms on average.*it must save 44\.4 ms: 1\.5 times the 29\.6 ms",
            id="once off, a draft must be worth more than its cost",
        ),
        pytest.param(
            {"step_ms": 8.0, "draft_ms": 95.0},
            [],
            r"95\.0 ms.*The draft is too slow for this target\.$",
            id="no guess is worth 95 ms of the device",
        ),
    ],
)
def test_why_drafting_would_not_pay_is_named_with_its_times(
    measured: dict[str, float], later_ms: list[float], said: str
) -> None:
    """What the cost model decided, in its own numbers. later_ms: times of a drafted token, a commit each."""
    found = estimates(**measured)
    depth = CostModelDepth(found)
    depth.observe(CommitOutcome(tokens=(1,)))
    for extra_ms in later_ms:
        found.on_times(found.step_ms, extra_ms)
        depth.observe(CommitOutcome(tokens=(2,)))
    assert re.search(said, str(why_undrafted(result(num_drafted=4), agent(found, depth), None, 10)))


@pytest.mark.parametrize(
    ("changes", "depth", "said"),
    [
        ({"draft_error": "RuntimeError: no"}, "4", "after the draft failed: RuntimeError: no"),
        ({}, "0", "--depth 0 asks for it"),
        ({}, "4", "the draft had no guess"),
        ({"num_drafted": 9, "num_posts": 3}, "4", "No draft arrived in time: a target step takes 40.0 ms"),
        ({"num_drafted": 9, "num_tested": 9, "num_proposed": 9}, "4", "0 of 9 drafted tokens were accepted"),
        ({"num_drafted": 9, "num_tested": 9, "num_accepted": 8}, "4", None),
    ],
)
def test_other_reasons_for_a_text_without_drafts(changes: dict[str, Any], depth: str, said: str | None) -> None:
    """Each is one sentence; where drafts were accepted there is none."""
    why = why_undrafted(result(**changes), agent(estimates(40.0), FixedDepth(int(depth))), None, 10)
    assert (why is None) == (said is None) and (said or "") in (why or "")


def test_a_prompt_that_the_draft_cannot_hold_is_a_reason() -> None:
    """And modes that draft nothing, or always, have none."""
    assert "the prompt has 10 tokens and the draft holds 8" in str(
        why_undrafted(result(), agent(estimates(40.0), FixedDepth(4)), 8, 10)
    )
    endpoints = agent(estimates(40.0), FixedDepth(4)).endpoints
    for mode in (Mode.CLOUD_ONLY, Mode.STOP_AND_WAIT):
        assert why_undrafted(result(), make_agent(mode, endpoints, NgramDrafter()), None, 10) is None


def test_a_comparison_gives_the_median_of_its_rounds_and_their_spread() -> None:
    """How many rounds, the least and the greatest ratio, and whether the texts are the same."""
    found = Comparison(3, (1.8, 2.1, 2.0), None, {}, True, None)
    assert found.ratio == 2.0 and found.sentence("stream") == (
        "stream: 2.00x the speed of cloud-only (3 rounds in turn, 1.80x to 2.10x), the same text"
    )
    refused = Comparison(3, (), "only 5 tokens", {}, False, None)
    words = refused.sentence("stream")
    assert refused.ratio is None and re.match(r"(?s)Too short to compare: only 5 tokens\..*ANOTHER TEXT", words)
    slow, fast, middle = (result(tokens_per_s=rate) for rate in (10.0, 30.0, 20.0))
    assert typical([slow, fast, middle]) is middle and typical([fast, slow]) is slow


class Recording:
    """An agent that gives results that are ready, and notes when it was asked."""

    def __init__(self, name: str, log: list[str], results: list[GenerationResult]) -> None:
        self.name, self.log, self.results = name, log, iter(results)

    async def generate(self, request: GenerationRequest, on_tokens: object = None) -> GenerationResult:
        self.log.append(self.name)
        return next(self.results)


def test_modes_are_measured_in_turn() -> None:
    """Each round has both, and the order alternates; one text that has no rate is enough to refuse the ratio."""
    log, rounds = list[str](), list[int]()
    request = GenerationRequest((1, 2), SamplingParams())

    def compare(drafted: list[GenerationResult], alone: list[GenerationResult]) -> Comparison:
        modes = Recording("drafted", log, drafted), Recording("alone", log, alone)
        return asyncio.run(compare_modes(*modes, request, len(drafted), ["http://192.0.2.1:1"], rounds.append))

    found = compare([result(tokens_per_s=rate) for rate in (80.0, 120.0)], [result(tokens_per_s=40.0)] * 2)
    assert log == ["alone", "drafted", "drafted", "alone"] and rounds == [1, 2]
    assert found.ratios == pytest.approx((2.0, 3.0)) and found.is_same and set(found.typical) == {CLOUD_ONLY, DRAFTED}
    refused = compare([result(), result(arrival_s=(0.1,) * 40)], [result(), result()])
    assert refused.ratio is None and refused.why_not == "the text came in one burst"


def test_a_server_on_this_machine_is_not_somebody_else() -> None:
    """Its time belongs to the measurement; a server elsewhere takes nothing here."""
    with serve_fake() as server, measured_load([server.url, "http://192.0.2.1:1"]) as load:
        assert load.beside == (os.getpid(),)
        assert read_counters(load.beside).own_s == pytest.approx(read_counters().own_s, abs=0.5)  # not counted twice
    assert measured_load(["http://192.0.2.1:1"]).beside == ()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as other:
        other_pid = other.pid
        other.communicate(b"\n")
    assert read_counters([other_pid]).own_s > 0.0  # one that has ended is no error
    with MachineLoad() as plain:
        pass
    assert plain.warning() is None  # too short to be judged


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("http://host:1/v1", "http://host:1"),
        ("https://host/v1/", "https://host"),
        ("https://host/prefix/v1", "https://host/prefix"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("HTTPS://Cloud.Example:443/v1", "https://cloud.example"),
        ("Http://[FE80::A]:80/Prefix", "http://[fe80::a]/Prefix"),
    ],
)
def test_an_address_is_understood_as_other_clients_write_it(given: str, meant: str) -> None:
    """Without a scheme, and with the /v1 of OpenAI clients."""
    assert verifier_url(given) == meant and VerifierClient(given).url == meant


@pytest.mark.parametrize(
    "wrong", ["", "ftp://host", "http://", "host:port", "http://a b", "http://h:0", "http://h?x=1", "http://h/a@b"]
)
def test_what_is_no_address_is_refused(wrong: str) -> None:
    """In words that show what was given."""
    with pytest.raises(ConfigError, match="expected http://host:port"):
        verifier_url(wrong)


def test_a_message_begins_on_a_line_of_its_own() -> None:
    """Also where half a line of text has been shown; nothing is added where none is open."""
    (console, out), tokenizer = screen(force_terminal=True, color_system=None), fake_tokenizer()
    printer = TokenPrinter(console, tokenizer.detokenizer())
    printer.break_line()
    printer(TokenBatch(tuple(tokenizer.encode("def")), 0, 0.0))
    printer.break_line()
    printer.break_line()
    assert out.getvalue() == "def\n"


def test_messages_beside_the_text_in_one_log_begin_on_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`outrider run ... > log 2>&1`; a file that gets the text alone gets nothing else."""
    tokenizer, together, alone = fake_tokenizer(), tmp_path / "together", tmp_path / "alone"
    with together.open("w") as log, alone.open("w") as out:
        monkeypatch.setattr(sys, "stderr", log)
        for file in (log, out):
            printer = TokenPrinter(Console(file=file), tokenizer.detokenizer())
            printer(TokenBatch(tuple(tokenizer.encode("def")), 0, 0.0))
            printer.finish()
            print_line(Console(stderr=True), "seed 7")
    assert (together.read_text(), alone.read_text()) == ("def\nseed 7\nseed 7\n", "def")


def test_an_empty_prompt_is_refused_before_anything_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an empty file on standard input gives it."""

    monkeypatch.setattr(
        "outrider.edge.cli.draft_source.default_draft", lambda choice: pytest.fail("an export was started")
    )
    with pytest.raises(ConfigError, match="the prompt is empty"):
        run_once(RunOptions(""), screen()[0], screen()[0])


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_prompt_is_shown_before_the_text_on_a_terminal_only(is_terminal: bool) -> None:
    """Dim, once, with the first token; a pipe gets the generated text alone."""
    tokenizer = fake_tokenizer()
    console, out = screen(force_terminal=is_terminal, color_system="standard" if is_terminal else None)
    printer = _printer(console, RunOptions("def f(x):\n "), tokenizer.detokenizer())
    printer.break_line()
    assert out.getvalue() == ""
    for token in tokenizer.encode("return"):
        printer(TokenBatch((token,), 0, 0.0))
    printer.finish()
    assert out.getvalue() == ("\x1b[2mdef f(x):\x1b[0m\n\x1b[2m \x1b[0mreturn\n" if is_terminal else "return")
    out.truncate(out.seek(0))
    printer = _printer(console, RunOptions("Why?", chat=True), tokenizer.detokenizer())
    printer(TokenBatch(tuple(tokenizer.encode("def")), 0, 0.0))
    assert out.getvalue() == ("\x1b[2mWhy?\x1b[0m\ndef" if is_terminal else "def")


def test_options_that_contradict_each_other_are_refused() -> None:
    """And the seed that is drawn is kept."""
    with pytest.raises(ConfigError, match="leave one of them out"):
        RunOptions("x", mode=Mode.CLOUD_ONLY, compare=True)
    options = RunOptions("x")
    assert replace(options, seed=options.params.seed).params == options.params
    assert options.cloud == ["http://127.0.0.1:8000"]


def test_devices_and_summaries_keep_their_numbers_on_a_narrow_terminal() -> None:
    """60 columns: versions and figures are whole, and nothing is cut."""
    long = "Some Vendor(R) Processor(TM) 1234567 with Graphics 98765"
    found = [
        FoundRuntime("openvino", "2026.4.1", (FoundDevice("GPU.1", long, "gpu", "32.0.101.6987"),)),
        FoundRuntime("onnxruntime", "1.31.1", (FoundDevice("NvTensorRTRTXExecutionProvider", long, "gpu"),)),
    ]
    for width in (60, 200):
        console, out = screen(width=width, no_color=True)
        show_devices(console, found)
        shown = out.getvalue()
        assert "…" not in shown and max(len(line.rstrip()) for line in shown.splitlines()) <= width
        versions = ("2026.4.1", "1.31.1", "32.0.101.6987", "1234567", "98765")
        assert not [whole for whole in (*versions, "GPU.1", "NvTensorRTRTXExecutionProvider") if whole not in shown]
    assert max(len(word) for line in summary_lines(result(tokens_per_s=1234.5)) for word in line.split()) < 60
