"""Checks of what a chooser adds on vLLM, on both model runners: logprobs, rules, grammars, with and without drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.requests import flat_request
from tests.vllm.serving import Reference
from tests.vllm.test_equality import (
    NUM_TOKENS,
    ROOT_DIR,
    Guess,
    Text,
    engine,
    mixed,
    nothing,
    right,
    run_all,
    texts,
)

from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenChooser, TokenLogprobs
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.text.tokenizer import Tokenizer

__all__ = ["engine", "texts"]


def logprobs_of(text: Text) -> list[TokenLogprobs]:
    """Of all its tokens, three each; none of a text that did not ask."""
    found = [each for commit in text.commits for each in commit.logprobs]
    assert all(len(each.top) == 3 and each.top[0][1] >= each.logprob for each in found)
    return found


@pytest.mark.parametrize("guess", [nothing, right, mixed])
def test_logprobs_are_the_models_and_change_no_text(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], guess: Guess
) -> None:
    """Half of the texts ask for them, beside others that do not."""
    counts = [None, 3] * 5
    asked = [
        (flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0, num_logprobs=count), truth, guess)
        for (prompt, params, truth), count in zip(texts[:10], counts, strict=True)
    ]
    running, truths = run_all(engine, asked), [truth for _, truth, _ in asked]
    assert [text.tokens for text in running] == truths
    assert guess is nothing or sum(text.wait().usage.accepted_tokens for text in running) > NUM_TOKENS
    shown = [[each.token for each in logprobs_of(text)] for text in running]
    assert shown == [truth if count else [] for truth, count in zip(truths, counts, strict=True)]


def test_an_item_has_the_logprobs_of_all_its_passes(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]]
) -> None:
    """One report, however many steps it took."""
    prompt, params, truth = texts[0]
    draft = (*truth[:5], truth[6])
    request = flat_request(prompt, params, NUM_TOKENS, draft=draft, once=True, num_logprobs=0)
    (text,) = run_all(engine, [(request, truth, nothing)])
    assert [each.token for commit in text.commits for each in commit.logprobs] == text.tokens == truth[:6]


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
        chooser, stops = TokenChooser(params, plan.states(prompt, self.vocab_size), None, plan.narrowing), plan.stop_ids
        return self.reference.written(
            prompt, NUM_TOKENS, lambda row, at: chooser.choose([row], [], [], at, stop_ids=stops).tokens, stops
        )

    def with_stop(
        self, prompt: Sequence[int], params: SamplingParams, rules: ProcessorOptions, first: int
    ) -> tuple[list[int], frozenset[int]]:
        """The text, and its stop ids: where the rules have a minimum, a token that would end it from this place on, but
        for the minimum.
        """
        free = self(prompt, params, ProcessorPlan(replace(rules, min_tokens=0)))
        new = [token for at, token in enumerate(free[: rules.min_tokens]) if at >= first and token not in free[:at]]
        stops = frozenset(new[:1])
        truth = self(prompt, params, ProcessorPlan(rules, stops))
        assert len(truth) > rules.min_tokens and bool(stops) == bool(rules.min_tokens)
        return truth, stops


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
        truth, stops = ruled.with_stop(prompt, params, rules, 2)
        request = flat_request(prompt, params, NUM_TOKENS, stops, patience_ms=0.0, processors=rules)
        asked += [(request, truth, guess) for guess in (nothing, right, mixed)]
    prompt, params, truth = texts[5]
    asked.append((flat_request(prompt, params, NUM_TOKENS, patience_ms=0.0), truth, right))
    running = run_all(engine, asked)
    assert [text.tokens for text in running] == [truth for _, truth, _ in asked]
    assert sum(text.wait().usage.accepted_tokens for text in running) > NUM_TOKENS


def test_a_text_goes_on_with_what_belongs_to_it(
    engine: VllmEngine, texts: list[tuple[tuple[int, ...], SamplingParams, list[int]]], ruled: Ruled
) -> None:
    """A resumed session's rules see what was committed before as text; a minimum counts it."""
    prompt, params, _ = texts[0]
    rules = replace(RULES[1], min_tokens=20)
    truth, stops = ruled.with_stop(prompt, params, rules, 10)
    resumed = (*prompt, *truth[:10])
    request = flat_request(resumed, params, NUM_TOKENS - 10, stops, processors=rules, num_generated=10)
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
    assert json.loads(ruled.tokenizer.decode(running[0].tokens))["name"] in ("ab", "cd")


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
    assert (ended.code, ended.tokens, other.tokens) == ("grammar_excluded", [], truth)
