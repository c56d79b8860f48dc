"""Tests `outrider` on the command line, and the numbers that it prints."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Outrider, screen
from tests.export_cli import run_export
from tests.fake_runtime import FakeSequenceRuntime
from tests.serving import fake_tokenizer

from outrider.edge.cli.command_options import DemoOptions
from outrider.edge.cli.run import Ran, _lines, make_request
from outrider.edge.cli.run import _document as as_document
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.summary import result_as_json, summary_lines
from outrider.edge.cli.terminal import print_document
from outrider.edge.drafting.depth import CostModelDepth, Effort
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.lab.comparison import DRAFTED, Comparison, measured_rate, why_no_rate
from outrider.edge.lab.laboratory import CLOUD_ONLY
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent, make_options
from outrider.edge.modes.recorder import Recorder
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationResult, Mode, Source, TokenBatch
from outrider.export.cli import main as export_cli
from outrider.export.quiet import quiet_upstream
from outrider.models.client.client import VerifierClient
from outrider.models.client.messages import ByteCounts
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.process.extras import missing_extra


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "nowhere"], "nowhere"),
        (["--draft", "nowhere", "--temperature", "nan"], "temperature is nan"),
        (["--draft", "nowhere", "--depth", "deep"], "expected auto or a number"),
        (["--draft", "nowhere", "--width", "9"], "width is '9'; expected auto or a number, 1 to 8"),
        *(
            (["--draft", "nowhere", "--width", width], "expected auto or a number, 1 to 8")
            for width in ("wide", "0", "2.5", "-1", "²")
        ),
        (["--draft", "nowhere", "--depth", "65"], "expected 0 to 64"),
        (["--draft", "nowhere", "--depth", "1.5"], "expected auto or a number"),
        (["--draft", "nowhere", "--depth", "-1"], "expected auto or a number"),
        (["--draft", "nowhere", "--runtime", "ngram", "--draft-device", "cpu"], "no device runs it"),
        (["--draft", "nowhere", "--emulate-npu", "--draft-device", "cpu"], "leave one of them out"),
        (
            ["--draft", "nowhere", "--emulate-npu", "--runtime", "onnxruntime"],
            "leave out --runtime onnxruntime",
        ),
        (
            ["--draft", "nowhere", "--draft-device", "prefer-npu", "--runtime", "openvino"],
            "leave out --runtime openvino",
        ),
        (["--draft", "nowhere", "--mode", "cloud-only", "--runtime", "ngram"], "nothing drafts"),
        (["--draft", "nowhere", "--verbose"], "nowhere"),
        (["--draft", "nowhere", "-v", "--mode", "cloud-only"], "nowhere"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(outrider: Outrider, options: list[str], message: str) -> None:
    """No traceback; standard output stays clean for programs."""
    shown = outrider("run", "hello", *options, code=2)
    assert re.fullmatch(f"error: .*{re.escape(message)}.*\n", shown.err) and shown.out == ""


@pytest.mark.parametrize(
    ("words", "content", "variables"),
    [
        (["run", "x", "--draft=~nosuchuser/d"], "", {}),
        (["run", "x", "--key-file=~nosuchuser/d"], "", {}),
        (["chat", "--load=~nosuchuser/d"], "", {}),
        (["serve", "--api-key-file=~nosuchuser/d"], "", {}),
        (["run", "x"], "[run]\ndraft = '~nosuchuser/d'\n", {}),
        (["run", "x"], "[[endpoint]]\nurl = 'https://a'\nkey_file = '~nosuchuser/d'\n", {}),
        (["run", "x"], "", {"OUTRIDER_CONFIG": "~nosuchuser/d"}),
        (["doctor"], "", {"OUTRIDER_CACHE": "~nosuchuser/d"}),
    ],
)
def test_a_home_directory_of_nobody_is_one_clear_line(
    config: Path,
    outrider: Outrider,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    content: str,
    variables: dict[str, str],
) -> None:
    """Wherever a path comes from."""
    config.write_text(content, encoding="utf-8")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = outrider(*words, code=2).err
    assert shown == "error: ~nosuchuser/d cannot be used: ~nosuchuser is no known home directory; name the whole path\n"


def test_exporting_without_its_packages_is_answered_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`outrider-export` says it in one line too; again a missing module of our own is a bug and stays one."""

    def load(*_: object) -> None:
        with quiet_upstream("loading draft"):
            import torch  # noqa: F401

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(export_cli, "export_model", load)
    code = run_export(monkeypatch, "draft", str(tmp_path), "--out", str(tmp_path / "out"))
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "") and "error: loading draft needs the package 'torch'" in shown.err
    assert 'run: pip install "outrider[export]"\n' in shown.err and "Traceback" not in shown.err
    own, ours = (ModuleNotFoundError("no such", name=f"outrider.{name}") for name in ("export.nowhere", "reference"))
    assert missing_extra(own, "exporting", "export") is missing_extra(own, "serving", "cloud") is own
    told = missing_extra(ours, "the demo", "all")
    assert isinstance(told, RuntimeUnavailable) and 'pip install "outrider[all]"' in str(told)


def test_a_run_ends_where_the_target_says_and_not_where_the_draft_would() -> None:
    """The draft bundle's end tokens are not sent: unset, the server's own rule."""
    for ignore_eos in (False, True):
        options = RunOptions(prompt="def verify", runtime="ngram", max_tokens=5, ignore_eos=ignore_eos)
        request = make_request(options, fake_tokenizer())
        assert request.stop_ids is None and request.ignore_eos is ignore_eos


def test_an_agent_drafts_as_its_options_say() -> None:
    """A tree of four by default, with lookup beside a model; a path and stop-and-wait draft with the model alone."""
    model = ModelDrafter(FakeSequenceRuntime())
    endpoints = Endpoints([VerifierClient("192.0.2.1:1")])

    def made(draft: Drafter, options: AgentOptions | None = None, mode: Mode = Mode.STREAM) -> StreamAgent:
        agent = make_agent(mode, endpoints, draft, "auto", options)
        assert isinstance(agent, StreamAgent)
        return agent

    usual, lookup, waiting = made(model), NgramDrafter(), make_agent(Mode.STOP_AND_WAIT, endpoints, model)
    assert isinstance(usual.drafter, ModelDrafter) and usual.drafter.lookup
    assert usual.options == make_options() == AgentOptions()
    assert (usual.options.tree.width, usual.options.bytes_per_token) == (4, 150.0)
    for options in (make_options("1"), make_options("8", is_looked_up=False)):
        assert made(model, options).drafter is model
    assert made(model, make_options("8")).options.tree.width == 8 and made(lookup).drafter is lookup
    assert isinstance(waiting, StopAndWaitAgent) and waiting.drafter is model
    for effort in Effort:
        agent = made(model, make_options("auto", effort, 40.0))
        assert isinstance(agent.depth, CostModelDepth) and agent.depth._effort is effort
        assert agent.options.bytes_per_token == 40.0


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"mode": Mode.CLOUD_ONLY, "width": "2"}, r"nothing drafts .*, so --width would have no effect; leave it out"),
        ({"mode": Mode.CLOUD_ONLY, "lookup": True, "width": "2"}, r"so --width and --lookup or --no-lookup"),
        ({"mode": Mode.CLOUD_ONLY, "lookup": False}, r"--lookup or --no-lookup would have no effect"),
        ({"mode": Mode.CLOUD_ONLY, "depth": "4", "effort": Effort.LOW}, r"so --depth and --effort .* leave them out"),
        ({"mode": Mode.CLOUD_ONLY, "threads": 2}, r"so --threads would"),
        ({"mode": Mode.CLOUD_ONLY, "same_tokenizer": True}, r"so --same-tokenizer would"),
        ({"mode": Mode.STREAM, "runtime": "ngram", "threads": 2}, r"no model drafts, so --threads would"),
        ({"mode": Mode.STOP_AND_WAIT, "width": "1"}, r"stop-and-wait sends one path .*, so --width would"),
        ({"mode": Mode.STOP_AND_WAIT, "lookup": True}, r"so --lookup or --no-lookup would"),
        ({"width": "1", "lookup": True}, r"--width 1 drafts a single path, so --lookup or --no-lookup would"),
        ({"runtime": "ngram", "lookup": False}, r"nothing but lookup drafts, so --lookup or --no-lookup would"),
        ({"depth": "4", "effort": Effort.LOW}, r"--depth 4 does not depend on times, so --effort would"),
        ({"mode": Mode.STOP_AND_WAIT, "depth": "4", "threads": 1}, None),
        ({"mode": Mode.STOP_AND_WAIT, "effort": Effort.LOW}, None),
        ({"width": "8", "lookup": True, "effort": Effort.LOW}, None),
        ({"width": "1", "depth": "4"}, None),
    ],
)
def test_options_without_effect_are_refused_by_name(options: dict[str, Any], found: str | None) -> None:
    """In every mode, and beside one another; those with an effect are taken. The demo's too."""
    makers: list[Callable[..., object]] = [partial(RunOptions, "x")]
    makers += [] if options.keys() & {"mode", "depth"} else [DemoOptions]
    for make in makers:
        with pytest.raises(ConfigError, match=found) if found else nullcontext():
            make(**options)


LONG = GenerationResult(
    mode=Mode.STREAM,
    tokens=tuple(range(17)),
    sources=(Source.TARGET,) * 17,
    arrival_s=tuple(0.1 + 0.1 * (i // 2) for i in range(17)),
    finish_reason="length",
    num_passes=9,
    num_accepted=8,
    num_tested=10,
    num_proposed=12,
)
RESULT = GenerationResult(
    mode=Mode.STREAM,
    tokens=(1, 2, 3, 4),
    sources=(Source.TARGET, Source.DRAFT, Source.DRAFT, Source.TARGET),
    arrival_s=(0.1, 0.2, 0.2, 0.2),  # one burst after the first: no rate
    finish_reason="length",
    num_passes=2,
    num_accepted=2,
    num_tested=3,
    num_proposed=4,
    num_sessions=2,
    wire=ByteCounts(400, 200, 800, 100),
    depths=((0, 5),),
)


def test_numbers_for_programs_are_plain_json() -> None:
    """The keys of every report, no NaN, and the whole document survives a round trip."""
    document = result_as_json(RESULT, "text")
    numbers = {
        "tokens_per_s": None,
        "ttft_ms": 100.0,
        "itl_ms_p50": 0.0,
        "itl_ms_p95": pytest.approx(90.0),
        "acceptance_rate": 0.6667,
        "accepted_share": 0.5,
        "tokens_per_pass": 2.0,
        "passes_per_token": 0.5,
        "bytes_up_per_token": 100.0,
        "bytes_down_per_token": 50.0,
    }
    assert {name: document[name] for name in numbers} == numbers
    assert result_as_json(LONG, "")["tokens_per_s"] == pytest.approx(15 / 0.8)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_a_comparison_of_one_token_is_a_document_that_every_parser_reads() -> None:
    """`run --compare --json --max-tokens 1`: numbers that cannot be known are null, and NaN is never printed."""
    one = replace(RESULT, tokens=(1,), sources=(Source.TARGET,), arrival_s=(0.1,), num_accepted=0, num_tested=0)
    compared = Comparison(1, (), "only 1 token", {CLOUD_ONLY: one, DRAFTED: one}, True, None)
    ran, (console, out) = Ran(one, one, None, compared), screen()
    print_document(console, as_document(RunOptions("x", compare=True), ran, None, fake_tokenizer()))
    document = json.loads(out.getvalue(), parse_constant=pytest.fail)
    unknown = dict.fromkeys(("tokens_per_s", "itl_ms_p50", "itl_ms_p95", "acceptance_rate"))
    assert (unknown | {"speed_up": None, "speed_up_unknown": "only 1 token"}).items() <= document.items()
    assert unknown.items() <= document["cloud_only"].items()
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_document(console, {"tokens_per_s": one.tokens_per_s})


def test_the_summary_has_three_figures() -> None:
    """Speed, the share of the text that was drafted, tokens per pass; and that the connection was lost on the way."""
    assert summary_lines(LONG) == [
        "stream: 17 tokens (ended by --max-tokens), 18.8 tokens/s, 47 % from accepted drafts, 1.89 tokens per target "
        "pass"
    ]
    first, lost = summary_lines(replace(RESULT, finish_reason="stop"))
    assert first.startswith("stream: 4 tokens, - tokens/s (only 4 tokens), 50 % from accepted drafts, 2.00 tokens per")
    assert "resumed 1 time" in lost
    alone = replace(LONG, mode=Mode.CLOUD_ONLY, num_accepted=0, num_tested=0, num_proposed=0)
    assert summary_lines(alone) == [
        "cloud-only: 17 tokens (ended by --max-tokens), 18.8 tokens/s, 1.89 tokens per target pass"
    ]


def test_a_text_that_the_server_drafted_from_an_earlier_answer_says_so() -> None:
    """Or the second run of a measured prompt would look like the speed of the first."""
    words = "the server drafted from the answer that this prompt got before (17 tokens); switch it off with --no-recent"
    for result, more in ((LONG, []), (replace(LONG, num_recent=17), [words])):
        assert _lines(3, Ran(result, result, None, None), None, False)[1:] == more


def test_all_other_figures_are_shown_to_who_asks() -> None:
    """Drafts from guess to acceptance, whose they were, which guess was the target's pick, and bytes."""
    result = replace(LONG, num_drafted=90, num_sent=210, num_proposed=80, hits={0: 54, 1: 9, 2: 2, 5: 1, 8: 2})
    assert summary_lines(result, is_verbose=True) == [
        *summary_lines(LONG),
        "first token after 100 ms; target passes: 9",
        "drafted tokens, the server's own included: 80 verified, 10 tested, 8 accepted (80 % of those tested)",
        "this device: guesses at 90 positions, 210 guesses sent; hits: 54 first guess, 9 second, 3 third or later, "
        "2 looked up",
        "bytes per token: 0 up, 0 down; headers 0 up, 0 down",
    ]
    assert summary_lines(replace(LONG, num_drafted=3), is_verbose=True)[3].endswith("hits: none")
    servers_own = summary_lines(replace(LONG, num_proposed=199), is_verbose=True)
    assert not any("this device" in line for line in servers_own) and "199 verified" in servers_own[2]
    assert "100 up, 50 down" in summary_lines(RESULT, is_verbose=True)[3]
    turns = replace(result, num_turns=7, turns="turns, measured faster: 64.4 tokens/s, both at once 44.1")
    assert f"in turns with the target: 7 of 9 target passes ({turns.turns})" in summary_lines(turns, is_verbose=True)
    assert [result_as_json(each, "")["turns"] for each in (result, turns)] == [None, turns.turns]
    hits = {"0": 54, "1": 9, "2": 2, "5": 1, "lookup": 2}
    numbers: dict[str, Any] = {"num_drafted": 90, "num_sent": 210, "num_proposed": 80, "hits": hits}
    assert numbers.items() <= result_as_json(result, "").items()


@pytest.mark.parametrize(
    ("arrival_s", "why"),
    [
        ((0.1, 0.2, 0.3), "only 3 tokens"),
        ((0.1,) * 40, "the text came in one burst"),
        ((0.1,) + (0.2,) * 39, "the text came in one burst"),
        (tuple(0.1 + 1e-4 * i for i in range(40)), "the text came in one burst"),
    ],
)
def test_a_rate_that_cannot_be_known_is_not_shown(arrival_s: tuple[float, ...], why: str) -> None:
    """A dash and the reason, where the text is too short or came at once."""
    result = replace(LONG, tokens=(1,) * len(arrival_s), arrival_s=arrival_s)
    assert (measured_rate(result), why_no_rate(result), result_as_json(result, "")["tokens_per_s"]) == (None, why, None)
    assert f"- tokens/s ({why})" in summary_lines(result)[0]


def test_a_result_tells_rates_as_ratios_of_sums() -> None:
    """Tested tokens are the accepted ones and the first rejected one; passes, gaps and bytes follow from the record."""
    batches, times_s = list[TokenBatch](), iter((10.0, 10.5, 10.6, 10.7))
    recorder = Recorder(Mode.STREAM, batches.append, lambda: next(times_s))
    for tokens, accepted, proposed in (((1,), 0, 0), ((2, 3, 4), 2, 5), ((5, 6), 1, 1)):
        recorder.commit(tokens, accepted, proposed)
    recorder.depth(4)
    result = recorder.finish("length", ByteCounts(600, 120, 9, 9))
    own, drafted = Source.TARGET, Source.DRAFT
    assert (result.tokens, result.sources) == ((1, 2, 3, 4, 5, 6), (own, drafted, drafted, own, drafted, own))
    assert (result.num_proposed, result.num_passes, result.tokens_per_pass) == (6, 3, 2.0)
    measured = result.acceptance_rate, result.ttft_ms, result.tokens_per_s, result.gap_ms(50), result.gap_ms(99)
    assert measured == pytest.approx((3 / 4, 500.0, 5 / 0.2, 0.0, 100.0))
    assert (result.bytes_up_per_token, result.bytes_down_per_token) == (100.0, 20.0)
    assert [batch.num_accepted for batch in batches] == [0, 2, 1]
    tree = Recorder(Mode.STREAM)
    tree.commit((1, 2, 3), 2, 9, may_reject=False)  # the rest were other branches
    tree.commit((4,), 0, 6)
    assert tree.finish("length", ByteCounts()).acceptance_rate == pytest.approx(2 / 3)
    empty = Recorder(Mode.CLOUD_ONLY).finish("length", ByteCounts())
    assert math.isnan(empty.tokens_per_s) and empty.acceptance_rate is None
