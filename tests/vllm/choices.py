"""Checks of what a chooser adds on vLLM, on both model runners: logprobs, rules, grammars, with and without drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from tests.requests import flat_request
from tests.vllm.serving import Reference
from tests.vllm.test_equality import NUM_TOKENS, ROOT_DIR, Text, mixed, nothing, right, run_all
from tests.waiting import TIMEOUT_S

from outrider.cloud.seam import CommitEvent, Event
from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenChooser, TokenLogprobs
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.text.tokenizer import Tokenizer


class Chosen(Text):
    """Keeps the logprobs, too."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, CommitEvent):
            assert [each.token for each in event.logprobs] == list(event.tokens)
            self.logprobs: list[TokenLogprobs] = [*getattr(self, "logprobs", []), *event.logprobs]
        super().__call__(event)


@pytest.mark.parametrize("guess", [nothing, right, mixed])
def test_logprobs_are_the_models_and_change_no_text(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], guess: object
) -> None:
    """Half of the texts ask for them, beside others that do not."""
    running = []
    for index, (prompt, params, truth) in enumerate(texts[:10]):
        text = (Chosen if index % 2 else Text)(engine, truth, guess)  # type: ignore[arg-type]
        count = 3 if index % 2 else None
        text.submit(flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0, num_logprobs=count))
        running.append(text)
    for text in running:
        assert text.ended.wait(4 * TIMEOUT_S)
    assert [text.tokens for text in running] == [truth for _, _, truth in texts[:10]]
    if guess is not nothing:
        assert sum(text.end.usage.accepted_tokens for text in running if text.end) > NUM_TOKENS
    shown = [text.logprobs for text in running if isinstance(text, Chosen)]
    _check(shown, [truth for _, _, truth in texts[1:10:2]])


def _check(shown: Sequence[Sequence[TokenLogprobs]], truths: Sequence[Sequence[int]]) -> None:
    for own, truth in zip(shown, truths, strict=True):
        assert [each.token for each in own] == list(truth)
        assert all(len(each.top) == 3 and each.top[0][1] >= each.logprob for each in own)


def test_an_item_has_the_logprobs_of_all_its_passes(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]]
) -> None:
    """One report, however many steps it took."""
    prompt, params, truth = texts[0]
    text = Chosen(engine, truth, nothing)
    draft = (*truth[:5], truth[6])
    text.submit(flat_request(prompt, params, NUM_TOKENS, draft=draft, once=True, num_logprobs=0))
    assert text.ended.wait(TIMEOUT_S)
    assert text.tokens == truth[:6] and len(text.logprobs) == 6


RULES = (
    ProcessorOptions(repetition_penalty=1.3, presence_penalty=0.5),
    ProcessorOptions(frequency_penalty=0.7, logit_bias=((20, 3.0), (31, -5.0))),
    ProcessorOptions(typical_p=0.9, xtc_probability=0.5),
    ProcessorOptions(allowed_ids=tuple(range(5, 400)), bad_words=((20, 21), (30,)), min_tokens=5),
)


class Ruled:
    """Texts by transformers' logits, one pass a token, and the chooser of our engine."""

    def __init__(self) -> None:
        self.reference = Reference(ROOT_DIR / "target")
        self.tokenizer = Tokenizer.from_dir(ROOT_DIR / "target")
        self.vocab_size = int(self.reference.model.config.vocab_size)

    def __call__(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan) -> list[int]:
        import torch

        tokens, past, new = list(prompt), None, list(prompt)
        chooser = TokenChooser(params, plan.states(prompt, self.vocab_size), None, plan.narrowing)
        with torch.no_grad():
            while len(tokens) < len(prompt) + NUM_TOKENS and not plan.stop_ids.intersection(tokens[len(prompt) :]):
                out = self.reference.model(torch.tensor([new]), past_key_values=past, use_cache=True)
                past, row = out.past_key_values, out.logits[0, -1].numpy().astype(np.float32)
                new = chooser.choose([row], [], [], len(tokens), stop_ids=plan.stop_ids).tokens
                tokens += new
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def ruled() -> Ruled:
    return Ruled()


def test_rules_give_the_same_text_with_and_without_drafts(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], ruled: Ruled
) -> None:
    """Four sets of rules, with no drafts, right ones and mixed ones, in one batch with a plain text."""
    asked = []
    for index, rules in enumerate(RULES):
        prompt, params, _ = texts[index]
        truth = ruled(prompt, params, ProcessorPlan(rules))
        request = flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0, processors=rules)
        asked += [(request, truth, guess) for guess in (nothing, right, mixed)]
    prompt, params, truth = texts[5]
    asked.append((flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0), truth, right))
    running = run_all(engine, asked)
    assert [text.tokens for text in running] == [truth for _, truth, _ in asked]
    assert sum(text.end.usage.accepted_tokens for text in running if text.end) > NUM_TOKENS


def test_a_text_goes_on_with_what_belongs_to_it(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], ruled: Ruled
) -> None:
    """A resumed session's rules see what was committed before as text."""
    prompt, params, _ = texts[0]
    truth = ruled(prompt, params, ProcessorPlan(RULES[1]))
    request = flat_request((*prompt, *truth[:10]), params, NUM_TOKENS - 10, processors=RULES[1], num_generated=10)
    (text,) = run_all(engine, [(request, truth, nothing)])
    assert text.tokens == truth[10:]


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["ab", "cd"]}, "n": {"type": "integer"}}}


def grammar_of(ruled: Ruled, spec: GrammarSpec, engine: VllmEngine | None = None) -> CompiledGrammar:
    """Compiled for the reference target, here or in the engine's workers."""
    stop_id = int(ruled.reference.model.config.eos_token_id)
    elsewhere = None if engine is None else engine.grammar_builder
    return GrammarCompiler(ruled.tokenizer, ruled.vocab_size, [stop_id], elsewhere).compile(spec)


def test_grammars_hold_on_vllm(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], ruled: Ruled
) -> None:
    """A schema and a pattern: the texts of our engine's chooser; drafts outside the grammar are rejected."""
    schema = GrammarSpec("json_schema", json.dumps(SCHEMA | {"required": ["name"], "additionalProperties": False}))
    asked = []
    for index, spec in enumerate((schema, GrammarSpec("regex", "[a-c]{3,9}x"))):
        grammar = grammar_of(ruled, spec, engine)
        stops = frozenset(grammar.stop_ids)
        prompt, params, _ = texts[index]
        truth = ruled(prompt, params, ProcessorPlan(stop_ids=stops, grammar=grammar_of(ruled, spec)))
        request = flat_request(prompt, params, NUM_TOKENS, stops, patience_ms=0.0, grammar=grammar)
        asked += [(request, truth, guess) for guess in (nothing, right, mixed)]
    running = run_all(engine, asked)
    assert [text.tokens for text in running] == [truth for _, truth, _ in asked]
    found = json.loads(ruled.tokenizer.decode(running[0].tokens))
    assert found["name"] in ("ab", "cd")


def test_what_no_token_fits_ends_alone(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], ruled: Ruled
) -> None:
    """A grammar and rules that leave nothing together; a text beside it goes on."""
    prompt, params, truth = texts[0]
    grammar = grammar_of(ruled, GrammarSpec("choice", '["yes", "no"]'), engine)
    rules = ProcessorOptions(allowed_ids=(ruled.tokenizer.encode("?", add_special_tokens=False)[0],))
    bad = flat_request(prompt, params, NUM_TOKENS, frozenset(grammar.stop_ids), grammar=grammar, processors=rules)
    fine = flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0)
    ended, other = run_all(engine, [(bad, truth, nothing), (fine, truth, nothing)])
    assert ended.end is not None and ended.end.error is not None
    assert ended.end.error.code == "grammar_excluded" and ended.tokens == []
    assert other.tokens == truth
