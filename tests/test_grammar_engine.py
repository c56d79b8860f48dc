"""Grammars in the engine: the text with drafts is the text without, and is always one that the grammar allows.

The cases of vLLM's issue tracker, where grammars and speculation broke each other, are here and in test_grammar.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.engine_harness import SAMPLED, Clock, Collector, refused
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request

from outrider.cloud.api.recent_texts import _sampling_of
from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import DraftHints, GenerateRequest
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import pick
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan, apply_all
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.tree_draft import ROOT, TreeDraft
from outrider.reference import target_dir

PROMPT = [5, 9, 40]
COUNT = 120
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "kind": {"enum": ["alpha", "beta", "gamma delta"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["id", "kind", "sizes"],
    "additionalProperties": False,
}


@dataclass
class World:
    """A vocabulary with its end token, and what a target writes under a grammar."""

    tokenizer: Tokenizer
    compiler: GrammarCompiler
    kind: type[FakeBatchRuntime]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.size + 7

    @property
    def stops(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids)

    def grammar(self, schema: Any = SCHEMA) -> CompiledGrammar:
        return self.compiler.compile(GrammarSpec.json_schema(schema))

    def runtime(self) -> FakeBatchRuntime:
        return self.kind(vocab_size=self.vocab_size)

    def request(self, grammar: CompiledGrammar, prompt: Sequence[int] = PROMPT, **others: Any) -> GenerateRequest:
        return flat_request(tuple(prompt), SAMPLED, COUNT, self.stops, grammar=grammar, **others)

    def truth(
        self, grammar: CompiledGrammar, prompt: Sequence[int] = PROMPT, rules: ProcessorOptions = PLAIN
    ) -> list[int]:
        """Target-only text by the plainest loop: states made anew for every token."""
        runtime, tokens = self.runtime(), list(prompt)
        blocks = range(runtime.num_blocks)
        for made in range(COUNT):
            row = runtime.forward([SequenceSlice(tokens, 0, blocks, 1)])[0]
            states = ProcessorPlan(rules, self.stops, made, grammar).states(tokens, self.vocab_size)
            tokens.append(pick(apply_all(states, row), SAMPLED, len(tokens)))
            if tokens[-1] in self.stops:
                break
        return tokens[len(prompt) :]

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def verified(self, request: GenerateRequest) -> Collector:
        """What an engine that verifies all drafts makes of the request."""
        engine, found = Engine(self.runtime(), EngineConfig(policy=Policy.VERIFY)), Collector()
        engine.submit(request, found)
        run(engine)
        return found


@pytest.fixture(scope="module", params=[FakeBatchRuntime, PickingRuntime])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """With a runtime that gives rows, and with one that picks."""
    tokenizer = Tokenizer.from_dir(target_dir())
    compiler = GrammarCompiler(tokenizer, tokenizer.size + 7, tokenizer.eos_token_ids)
    yield World(tokenizer, compiler, request.param)
    compiler.close()


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def check(tokens: Sequence[int], world: World) -> None:
    """The text is complete JSON of the schema, and the end token is its last."""
    assert tokens[-1] in world.stops
    found = json.loads(world.text(tokens[:-1]))
    assert list(found) == ["id", "kind", "sizes"]
    assert found["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]


def test_the_text_is_that_of_the_plainest_loop_whatever_was_drafted(world: World) -> None:
    """A right draft, one that leaves the grammar, one with a special token inside, one with padding, none."""
    grammar = world.grammar()
    expected = world.truth(grammar)
    check(expected, world)
    outside = [*expected[:3], *world.tokenizer.encode("\n"), *expected[4:6]]
    special = [*expected[:3], min(world.stops), *expected[3:6]]
    padding = [*expected[:3], world.vocab_size - 1, *expected[4:6]]
    for draft, least in (((), 0), (expected[:8], 7), (outside, 2), (special, 2), (padding, 2)):
        found = world.verified(world.request(grammar, draft=tuple(draft)))
        assert found.tokens == expected
        assert found.ended.reason == "stop"
        assert found.commits[1].accepted >= least or not draft


@pytest.mark.parametrize("beyond", [0, 1, 3])
def test_a_grammar_that_ends_in_the_middle_of_drafted_tokens(beyond: int, world: World) -> None:
    """The end token is the last one, whatever was drafted after it (vLLM 42619, 54437)."""
    grammar = world.grammar()
    expected = world.truth(grammar)
    for cut in (4, len(expected) - 3):
        request = world.request(grammar, [*PROMPT, *expected[:cut]], num_generated=cut)
        tail = [*expected[cut:][:12], *expected[:beyond]]
        assert world.verified(replace(request, hints=DraftHints(tuple(tail)))).tokens == expected[cut:]


def test_branches_of_a_tree_do_not_move_the_state(world: World) -> None:
    """Wrong branches stand before and after the text's own: a rejected draft advances nothing (vLLM 44006)."""
    grammar = world.grammar()
    expected = world.truth(grammar)
    config = EngineConfig(policy=Policy.VERIFY, form=TreeForm.TREE)
    engine, found = Engine(world.runtime(), config, clock=Clock()), Collector()
    number = engine.submit(world.request(grammar, patience_ms=0.0), found)
    engine.step()
    while found.end is None:
        base = len(found.tokens)
        here = expected[base : base + 3]
        others = [(token + 1) % world.vocab_size for token in here]
        tokens = [token for pair in zip(others, here, strict=True) for token in pair]
        parents = [ROOT if index < 2 else base * 8 + (index // 2) * 2 - 1 for index in range(len(tokens))]
        if tokens:
            engine.draft_tree(number, TreeDraft(base, base * 8, tokens, parents, [0] * len(tokens)))
        engine.step()
    assert found.tokens == expected
    assert max(commit.accepted for commit in found.commits) > 1


def test_preempted_texts_go_on_where_they_were(world: World) -> None:
    """Sequences that lose their blocks run again; pending drafts of theirs contradict nothing (vLLM 31955)."""
    grammar = world.grammar()
    prompts = [[*PROMPT, index] for index in range(4)]
    expected = [world.truth(grammar, prompt) for prompt in prompts]
    runtime = world.kind(vocab_size=world.vocab_size, num_blocks=16, block_size=4)
    engine, found = Engine(runtime, EngineConfig(max_running=4, policy=Policy.VERIFY)), [Collector() for _ in prompts]
    for prompt, sink, text in zip(prompts, found, expected, strict=True):
        engine.submit(world.request(grammar, prompt, draft=tuple(text[:20])), sink)
    run(engine)
    assert engine.stats().totals.preempted > 0
    assert [sink.tokens for sink in found] == expected


def test_a_resumed_text_goes_on_inside_its_grammar(world: World) -> None:
    """A text that another server began; one that is outside the grammar is refused."""
    grammar = world.grammar()
    expected = world.truth(grammar)
    for cut in (1, 5):
        found = world.verified(world.request(grammar, [*PROMPT, *expected[:cut]], num_generated=cut))
        assert expected[:cut] + found.tokens == expected
    with refused("grammar_excluded", match="outside the grammar"):
        world.verified(world.request(grammar, [*PROMPT, 40], num_generated=1))


def test_a_grammar_goes_together_with_other_rules(world: World) -> None:
    """Bias and penalties act inside the grammar; a minimum of tokens does not keep a complete text from ending."""
    grammar = world.grammar()
    (brace,) = world.tokenizer.encode("{")
    rules = ProcessorOptions(frequency_penalty=1.0, min_tokens=COUNT, logit_bias=((brace, -100.0),))
    expected = world.truth(grammar, rules=rules)
    check(expected, world)
    assert world.verified(world.request(grammar, processors=rules, draft=tuple(expected[:5]))).tokens == expected


def test_a_text_whose_grammar_fails_ends_alone(world: World) -> None:
    """One that reaches the limits, and one whose rules leave nothing: the others of the step go on."""
    costly = world.compiler.compile(GrammarSpec("regex", ".*[a-m].{200}[n-z].{100}"))
    good = world.grammar()
    expected = world.truth(good)
    engine = Engine(world.runtime(), EngineConfig(max_running=4))
    bad, left, fine = Collector(), Collector(), Collector()
    engine.submit(world.request(costly), bad)
    engine.submit(world.request(good, processors=ProcessorOptions(allowed_ids=(3, 4))), left)
    engine.submit(world.request(good), fine)
    run(engine)
    assert fine.tokens == expected
    codes = [sink.ended.error.code for sink in (bad, left) if sink.ended.error is not None]
    assert codes == ["grammar_too_complex", "grammar_excluded"]
    assert engine.health.fault is None


def test_a_grammar_is_part_of_what_decides_a_text(world: World) -> None:
    """An earlier text of another grammar is a hint only, not a repeat."""
    grammar = world.grammar()
    found = {_sampling_of(world.request(each)) for each in (grammar, world.grammar({"type": "integer"}))}
    request = world.request(grammar)
    assert len(found | {_sampling_of(replace(request, pick=replace(request.pick, grammar=None)))}) == 3
