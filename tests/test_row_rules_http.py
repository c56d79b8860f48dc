"""Tests rules over HTTP and on the device, and the options of `outrider run` for them and for grammars."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from bench.plain_text import plain_texts
from tests.fake_runtime import FakeBatchRuntime
from tests.local_endpoint import LocalEndpoint, fake_draft, serve_local
from tests.serving import EOS_ID, FakeServer, Transcript, code_of, fake_tokenizer, run_session
from tests.test_edge_resume import PROMPT as SCRIPTED
from tests.test_edge_resume import Script, ended, opened, session, stream
from tests.test_openai_fields import with_tokens
from tests.waiting import run

from outrider.edge.cli.run import make_request
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_options
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.edge.serve.state import LocalSettings
from outrider.models.client.client import VerifierClient
from outrider.models.errors import ConfigError, RequestError, SamplingError
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import ProcessorOptions, bad_word_ids
from outrider.models.processors.processor_plan import NO_PLAN, ProcessorPlan
from outrider.models.wire.protocol import Commit, ErrorAnswer

PROMPT = tuple(fake_tokenizer().encode("def verify(tokens, drafts):"))
PARAMS = SamplingParams(0.8, seed=5)
SAMPLED = {"temperature": 0.8, "seed": 5}
COUNT = 24
FIELDS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {"12": 6.0, "13": -100, str(EOS_ID): 9}, "min_tokens": 12},
    "words": {"bad_words": [[12], [40, 41]], "allowed_token_ids": [*range(10, 60)]},
    "narrow": {"typical_p": 0.7, "xtc_probability": 0.6, "xtc_threshold": 0.04},
}
RULES = {
    "penalties": ProcessorOptions(1.5, 0.8, 0.4),
    "bias": ProcessorOptions(logit_bias=((12, 6.0), (13, -100.0), (EOS_ID, 9.0)), min_tokens=12),
    "words": ProcessorOptions(bad_words=((12,), (40, 41)), allowed_ids=tuple(range(10, 60))),
    "narrow": ProcessorOptions(typical_p=0.7, xtc_probability=0.6, xtc_threshold=0.04),
}
each_rule = pytest.mark.parametrize("name", FIELDS)


def asked(rules: ProcessorOptions, count: int = COUNT) -> GenerationRequest:
    return GenerationRequest(PROMPT, PARAMS, count, frozenset({EOS_ID}), processors=rules)


def truth(rules: ProcessorOptions, count: int = COUNT) -> list[int]:
    (text,) = plain_texts(FakeBatchRuntime(vocab_size=fake_tokenizer().size), [asked(rules, count)])
    return list(text)


@pytest.fixture(scope="module")
def client(cloud: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cloud.url, timeout=30.0) as opened:
        yield opened


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    settings = LocalSettings(depth="8", options=make_options("1"))
    with serve_local(cloud.url, settings, runtime=fake_draft(1.0)) as running:
        yield running


def texted(client: httpx.Client, prompt: Sequence[int], **fields: Any) -> Transcript:
    return run_session(client, {"prompt": [*prompt], "max_tokens": COUNT, "patience_ms": 0, **SAMPLED, **fields})


@each_rule
def test_a_session_has_the_text_of_its_rules(client: httpx.Client, name: str) -> None:
    """From the start, and resumed in mid-text with `generated`."""
    expected = truth(RULES[name])
    later = texted(client, [*PROMPT, *expected[:5]], generated=5, max_tokens=COUNT - 5, **FIELDS[name])
    assert texted(client, PROMPT, **FIELDS[name]).tokens == expected != truth(ProcessorOptions())
    assert later.tokens == expected[5:]


@each_rule
def test_verified_blocks_make_the_text_of_their_rules(client: httpx.Client, name: str) -> None:
    """By hash and by tokens; each call says how much of what comes before belongs to the text."""
    expected, text, held = truth(RULES[name]), list[int](), None
    while len(text) < len(expected):
        draft = [*expected[len(text) : len(text) + 3], 7]
        before = {"prefix_hash": held} if held and len(text) % 2 else {"prefix": [*PROMPT, *text]}
        item = {"draft": draft, "generated": len(text), "max_tokens": COUNT - len(text), **before}
        answer = client.post("/v1/verify", json={"items": [{**item, **SAMPLED, **FIELDS[name]}]}).json()
        (result,) = answer["results"]
        assert result["accepted"] == min(3, len(expected) - len(text) - (len(result["tokens"]) == 3))
        text, held = [*text, *result["tokens"]], result.get("prefix_hash")
    assert text == expected


@each_rule
@pytest.mark.parametrize("is_local", [False, True], ids=["verifier", "endpoint"])
def test_completions_take_the_fields_of_openai_and_vllm(
    cloud: FakeServer, local: LocalEndpoint, name: str, is_local: bool
) -> None:
    """Bad words are texts there, and become token ids. The endpoint passes them on, and its drafts are accepted."""
    fields, rules = dict(FIELDS[name]), RULES[name]
    if name == "words":
        fields["bad_words"] = ["verify", "t"]
        encode = partial(fake_tokenizer().encode, add_special_tokens=False)
        rules = replace(rules, bad_words=tuple(map(tuple, bad_word_ids(encode, fields["bad_words"]))))
        assert len(rules.bad_words) > 2
    body = {"prompt": [*PROMPT], "max_tokens": COUNT, **SAMPLED, **fields}
    answer = httpx.post((local if is_local else cloud).url + "/v1/completions", json=body, timeout=30.0)
    assert answer.status_code == 200, answer.text
    tokens, usage = truth(rules), answer.json()["usage"]
    shown = fake_tokenizer().decode(tokens[:-1] if tokens[-1] == EOS_ID else tokens)
    assert (answer.json()["choices"][0]["text"], usage["completion_tokens"]) == (shown, len(tokens))
    assert not is_local or usage["completion_tokens_details"]["rejected_prediction_tokens"] == 0


def test_bad_words_have_a_form_after_a_space() -> None:
    """As in vLLM: only where it is another first token, of as many. White space has none."""
    ids = {"cat": [1], " cat": [2], "dog": [3], " dog": [9, 3], "go": [4], " go": [4], "\n": [5], " ": [6], "  ": [7]}
    assert bad_word_ids(ids.__getitem__, ["cat", " dog", "go", "\n", " "]) == [[1], [2], [3], [4], [5], [6]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", True),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "1"),
        ("logit_bias", {"12": 101}),
        ("logit_bias", {"012": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": True}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(1025)}),
        ("bad_words", [[]]),
        ("bad_words", "word"),
        ("min_tokens", -1),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1] * 8193),
        ("typical_p", 0),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -1),
        ("generated", -1),
        ("generated", 4),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(client: httpx.Client, field: str, value: Any) -> None:
    """In sessions, in items to verify, and in completions."""
    # Completions ignore fields that they do not know.
    for path in ("/v1/sessions",) if field == "generated" else ("/v1/sessions", "/v1/completions"):
        answer = client.post(path, json={"prompt": [1, 2, 3], "max_tokens": 4, field: value})
        error = ErrorAnswer.model_validate_json(answer.content).error
        assert (answer.status_code, error.code) == (400, "invalid_parameter")
        assert error.message.startswith(field) and len(error.message) < 300
    (result,) = client.post("/v1/verify", json={"items": [{"prefix": [1, 2, 3], field: value}]}).json()["results"]
    assert result["error"]["code"] == "invalid_parameter" and field in result["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value"), [("logit_bias", {"9999": 1}), ("allowed_token_ids", [1, 9999]), ("prompt", [1, 9999])]
)
def test_an_id_that_the_model_lacks_is_refused_by_the_fields_name(
    client: httpx.Client, field: str, value: Any, path: str
) -> None:
    """Everywhere; bad words of completions are texts, so they have none."""
    answer = client.post(path, json={"prompt": [1], "max_tokens": 4, field: value})
    error = answer.json()["error"]
    assert code_of(answer) == (400, "token_out_of_range")
    assert error["param"] == field and error["message"].startswith(f"{field} has token id 9999; ")


def test_rules_are_sent_only_where_there_are_some() -> None:
    """A server from before takes requests without; a resumed text says how much of its prompt is text."""

    def sent(rules: ProcessorOptions) -> list[dict[str, Any]]:
        first, second = Commit(base=0, tokens=[5, 6]), Commit(base=0, tokens=[7])
        script = MagicMock(side_effect=Script(session(opened(), first), session(opened(), second, ended())))
        run(stream(script, GenerationRequest(SCRIPTED, max_tokens=3, processors=rules)))
        return [json.loads(call.args[0].content) for call in script.call_args_list]

    plain, later = sent(ProcessorOptions())
    assert not {"generated", "logit_bias", "min_tokens"} & (plain.keys() | later.keys())
    first, second = sent(ProcessorOptions(logit_bias=((4, -2.0),), bad_words=((1, 2),)))
    assert first["logit_bias"] == second["logit_bias"] == {"4": -2.0} and first["bad_words"] == [[1, 2]]
    assert not {"generated", "presence_penalty"} & first.keys() and second["generated"] == 2


class NotKnowing(ModelDrafter):
    """Drafts as if there were no rules."""

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        super().begin(prompt, params)


@each_rule
async def test_a_device_that_knows_the_rules_has_more_tokens_accepted(cloud: FakeServer, name: str) -> None:
    """The draft is as good as can be, so with rules all it drafts is accepted; the text is the same."""
    knowing, blind = [
        await written(cloud.url, kind(fake_draft(agreement=1.0)), asked(RULES[name], 40))
        for kind in (ModelDrafter, NotKnowing)
    ]
    assert list(knowing.tokens) == list(blind.tokens) == truth(RULES[name], 40)
    assert blind.acceptance_rate is not None and blind.acceptance_rate < 0.95 < 1.0 == knowing.acceptance_rate
    assert knowing.num_passes < blind.num_passes


@each_rule
def test_branches_of_a_draft_are_each_ruled_by_their_own_tokens(name: str) -> None:
    """What a drafter guesses after a branch is what it would guess had the branch been committed."""
    plan = ProcessorPlan(RULES[name], frozenset({EOS_ID}))
    drafter, tokens = ModelDrafter(fake_draft(agreement=1.0)), truth(RULES[name], 8)
    drafter.begin(PROMPT, PARAMS, plan)
    branches = [[], tokens[:1], [99], tokens[:2], [99, 12], [12, 12, 40]]
    for branch, guesses in zip(branches, drafter.guess(branches, 3), strict=True):
        fresh = ModelDrafter(fake_draft(agreement=1.0))
        fresh.begin([*PROMPT, *branch], PARAMS, replace(plan, num_generated=len(branch)))
        assert fresh.guess([[]], 3) == [guesses]
    drafter.extend(tokens[:4])
    ((best, *_),) = drafter.guess([[]], 1)
    assert best.token == tokens[4]


def test_run_has_options_of_rules() -> None:
    """They become the request's rules; what is wrong is found before a model is loaded."""
    numbers = ["presence_penalty=0.5", "min_tokens=4", "typical_p=0.9", "top_p=0.8", "top_k=5"]
    options = RunOptions(prompt="a", param=numbers, logit_bias=["7=-3.5"], bad_word=["cat"])
    assert (options.params.top_p, options.params.top_k) == (0.8, 5)
    rules = options.with_bad_words({"cat": [1], " cat": [2]}.__getitem__)
    assert rules == ProcessorOptions(1.0, 0.5, 0.0, ((7, -3.5),), ((1,), (2,)), 4, typical_p=0.9)
    request = make_request(options, fake_tokenizer())
    assert request.processors.bad_words and request.plan.stop_ids == {EOS_ID}
    no_number = "expected NAME=NUMBER, with one of top_k, top_p"
    wrong: list[tuple[dict[str, Any], type[Exception] | tuple[type[Exception], ...], str]] = [
        ({"logit_bias": ["7"]}, ConfigError, r"--logit-bias is '7'"),
        ({"param": ["typical_p=0"]}, SamplingError, r"^typical_p"),
        ({"param": [f"top_k={'9' * 400}"]}, (ConfigError, SamplingError), "top_k"),
        *(
            ({"param": [each]}, ConfigError, no_number)
            for each in ("top_p", "top_k=1.5", "length=3", "min_p=x", "min_p=nan", "min_p=1e999")
        ),
    ]
    for given, error, told in wrong:
        with pytest.raises(error, match=told):
            RunOptions(prompt="a", **given)


SCHEMA = """{
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": false
}"""


async def written(
    url: str, drafter: ModelDrafter | None, request: GenerationRequest, depth: int = 4
) -> GenerationResult:
    async with VerifierClient(url) as client:
        agent = StopAndWaitAgent(Endpoints([client]), drafter, FixedDepth(depth if drafter else 0), Estimates())
        return await agent.generate(request)


async def test_the_grammar_goes_to_the_session_and_to_the_draft(server: FakeServer, tmp_path: Path) -> None:
    """The texts are those without drafts, and what the grammar forces is drafted."""
    (tmp_path / "schema.json").write_text(SCHEMA)
    for fields, pattern in (
        ({"schema": tmp_path / "schema.json"}, r'\{"city":"(Paris|Rome)","days":[1-9]\}'),
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice_of": ["yes, of course", "not at all"]}, "yes, of course|not at all"),
    ):
        options: dict[str, Any] = {"prompt": "zip", "seed": 3, "max_tokens": 200, **fields}
        asked, bare = (
            make_request(RunOptions(mode=mode, **options), fake_tokenizer())
            for mode in (Mode.STOP_AND_WAIT, Mode.CLOUD_ONLY)
        )
        assert asked.draft_grammar is not None and bare.draft_grammar is None
        drafted = await written(server.url, ModelDrafter(fake_draft(0.5)), asked, 6)
        text = fake_tokenizer().decode(drafted.tokens)
        assert re.fullmatch(pattern, text), text
        assert drafted.tokens == (await written(server.url, None, bare)).tokens
        assert "regex" in fields or drafted.num_passes < len(drafted.tokens) // 2


def test_options_become_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """None without one; choices in their order. A device without the library drafts without; the server has it."""
    assert RunOptions("x").grammar is None
    assert RunOptions("x", choice_of=["b", "a"]).grammar == GrammarSpec("choice", '["b","a"]')
    monkeypatch.setitem(sys.modules, "llguidance", None)
    request = make_request(RunOptions("x", regex="a"), fake_tokenizer())
    assert (request.grammar, request.draft_grammar) == (GrammarSpec("regex", "a"), None)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"schema": SCHEMA, "regex": "a"}, ConfigError, "--schema and --regex both say which texts are allowed"),
        ({"schema": None}, ConfigError, "--schema .*schema.json cannot be read: No such file"),
        ({"schema": "{"}, RequestError, "not JSON"),
        ({"schema": "[]"}, RequestError, "expected an object"),
        ({"regex": "a", "ignore_eos": True}, ConfigError, "so --ignore-eos would have no effect"),
    ],
)
def test_options_of_grammars_are_checked(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    """Before a model is loaded."""
    path = tmp_path / "schema.json"
    if schema := options.get("schema"):
        path.write_text(schema)
    with pytest.raises(error, match=told):
        RunOptions("x", **options | ({"schema": path} if "schema" in options else {}))


def test_a_chats_grammar_follows_the_reasoning(tmp_path: Path) -> None:
    """Where the template marks it; a prompt without --chat has none."""
    template = "{% for m in messages %}{{ m.content }}</think>{% endfor %}<think>"
    tokenizer = with_tokens(tmp_path, ["<think>", "</think>"])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = type(tokenizer).from_dir(tmp_path)
    for is_chat, after in ((True, "</think>"), (False, "")):
        grammar = make_request(RunOptions("x", regex="a", chat=is_chat), tokenizer).grammar
        assert grammar == GrammarSpec("regex", "a", after=after)
