"""Tests the options of `outrider run` that hold the text to a grammar."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.local_endpoint import fake_draft
from tests.serving import fake_tokenizer, serve_fake
from tests.test_openai_fields import with_tokens

from outrider.edge.cli.run import make_request
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.results import GenerationResult, Mode
from outrider.models.client.client import VerifierClient
from outrider.models.errors import ConfigError, RequestError
from outrider.models.grammar.spec import GrammarSpec

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    return path


def test_the_grammar_goes_to_the_session_and_to_the_draft(schema: Path) -> None:
    """The texts are those without drafts, and what the grammar forces is drafted."""
    with serve_fake() as cloud:

        async def write(mode: Mode, **fields: Any) -> GenerationResult:
            options = RunOptions(prompt="zip", mode=mode, seed=3, max_tokens=200, **fields)
            request = make_request(options, fake_tokenizer())
            assert (request.draft_grammar is None) is (mode is Mode.CLOUD_ONLY)
            drafter = None if mode is Mode.CLOUD_ONLY else ModelDrafter(fake_draft(0.5))
            async with VerifierClient(cloud.url) as client:
                depth = FixedDepth(0 if drafter is None else 6)
                agent = StopAndWaitAgent(Endpoints([client]), drafter, depth, Estimates())
                return await agent.generate(request)

        for fields, pattern in (
            ({"schema": schema}, r'\{"city":"(Paris|Rome)","days":[1-9]\}'),
            ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
            ({"choice_of": ["yes, of course", "not at all"]}, "yes, of course|not at all"),
        ):
            drafted = asyncio.run(write(Mode.STOP_AND_WAIT, **fields))
            text = fake_tokenizer().decode(drafted.tokens)
            assert re.fullmatch(pattern, text), text
            assert drafted.tokens == asyncio.run(write(Mode.CLOUD_ONLY, **fields)).tokens
            if "regex" not in fields:
                assert drafted.num_passes < len(drafted.tokens) // 2


def test_a_device_without_the_library_drafts_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has the grammar all the same."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    request = make_request(RunOptions("x", regex="a"), fake_tokenizer())
    assert request.grammar == GrammarSpec("regex", "a") and request.draft_grammar is None


def test_options_of_grammars_are_checked(schema: Path, tmp_path: Path) -> None:
    """Before a model is loaded."""
    with pytest.raises(ConfigError, match=r"--schema and --regex both say which texts are allowed"):
        RunOptions("x", schema=schema, regex="a")
    with pytest.raises(ConfigError, match=r"--schema .*nowhere.json cannot be read: No such file"):
        RunOptions("x", schema=tmp_path / "nowhere.json")
    for wrong, message in (("{", "not JSON"), ("[]", "expected an object")):
        schema.write_text(wrong)
        with pytest.raises(RequestError, match=message):
            RunOptions("x", schema=schema)
    with pytest.raises(ConfigError, match="so --ignore-eos would have no effect"):
        RunOptions("x", regex="a", ignore_eos=True)
    assert RunOptions("x").grammar is None
    assert RunOptions("x", choice_of=["b", "a"]).grammar == GrammarSpec("choice", '["b","a"]')


def test_a_chats_grammar_follows_the_reasoning(tmp_path: Path) -> None:
    """Where the template marks it; a prompt without --chat has none."""
    template = "{% for m in messages %}{{ m.content }}</think>{% endfor %}<think>"
    tokenizer = with_tokens(tmp_path, ["<think>", "</think>"])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = type(tokenizer).from_dir(tmp_path)
    for is_chat, after in ((True, "</think>"), (False, "")):
        options = RunOptions("x", regex="a", chat=is_chat)
        grammar = make_request(options, tokenizer).grammar
        assert grammar is not None and grammar.after == after
