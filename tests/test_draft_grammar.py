"""Drafting inside a grammar: masked rows, forced tokens for nothing, and nothing beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.fake_runtime import FakeSequenceRuntime

from outrider.edge.drafting.calibration import Calibration, forced_guess, shared_guess
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.results import GenerationRequest
from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.grammar.state import GrammarState
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import SessionRequest

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
PROMPT = [5, 9, 40]
PARAMS = SamplingParams(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(tokenizer, tokenizer.size, tokenizer.eos_token_ids)) as made:
        yield made


class CountingRuntime(FakeSequenceRuntime):
    """Counts calls of the model."""

    calls = 0

    def extend(self, tokens):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().extend(tokens)


def make(tokenizer: Tokenizer, compiler: GrammarCompiler) -> tuple[ModelDrafter, CountingRuntime]:
    runtime = CountingRuntime(vocab_size=tokenizer.size)
    drafter = ModelDrafter(runtime, tokenizer.size)
    drafter.begin(PROMPT, PARAMS, ProcessorPlan(grammar=compiler.compile(GrammarSpec.json_schema(SCHEMA))))
    return drafter, runtime


def test_forced_tokens_are_drafted_for_nothing(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """A path before anything is read, and a guess for each forced node of the tree, without a call of the model."""
    drafter, runtime = make(tokenizer, compiler)
    path = [guess.token for guess in drafter.continuation(16)]
    assert tokenizer.decode(path).startswith('{"colour":')
    assert drafter.continuation(2) == [forced_guess(token) for token in path[:2]]
    assert drafter.guess([path[:index] for index in range(len(path))], 4) == [[forced_guess(token)] for token in path]
    assert runtime.calls == 0


@pytest.mark.parametrize("method", ["apply", "accept", "validate", "forced"])
def test_a_grammar_beyond_its_limits_is_no_fault_of_the_device(
    method: str, tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft goes on without it. As a fault it would take the device away from all other texts, too."""
    drafter, runtime = make(tokenizer, compiler)

    def fail(*given: object) -> None:
        raise RequestError("grammar_too_complex", "the grammar is too costly")

    monkeypatch.setattr(GrammarState, method, fail)
    drafter.extend(tokenizer.encode('{"colour":"'))
    assert drafter.guess([[]], 4)[0] or method == "apply"  # no token is known to be allowed
    assert drafter.guess([[7]], 4)[0] or method == "apply"
    assert drafter._processors.allows([], 7) or method == "apply"
    assert runtime.calls > 0


def test_guesses_are_inside_the_grammar(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """Every guess may follow its branch; a branch that has left the grammar gets none."""
    drafter, runtime = make(tokenizer, compiler)
    start = [guess.token for guess in drafter.continuation(16)]
    drafter.extend(start)
    state = compiler.compile(GrammarSpec.json_schema(SCHEMA)).state()
    assert all(map(state.accept, start))
    (guesses,) = drafter.guess([()], 8)
    assert guesses and runtime.calls
    assert all(state.validate([guess.token]) == 1 for guess in guesses)
    assert drafter.guess([tokenizer.encode("\n\n")], 4) == [[]]
    assert drafter.guess([()], 8) == [guesses]  # and it changed nothing


def test_a_whole_text_can_be_drafted(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """To its end token, which is forced too."""
    drafter, runtime = make(tokenizer, compiler)
    text: list[int] = []
    while not text or text[-1] not in tokenizer.eos_token_ids:
        (guesses,) = drafter.guess([()], 1)
        text.append(guesses[0].token)
        drafter.extend(text[-1:])
        assert len(text) < 60
    assert tokenizer.decode(text).endswith("}")
    assert runtime.calls < len(text) / 2


def test_lookup_stays_inside_too(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """What followed the same tokens before is no guess where the grammar forbids it."""
    runtime = CountingRuntime(vocab_size=tokenizer.size)
    mixed = ModelDrafter(runtime, tokenizer.size).with_lookup()
    repeated = tokenizer.encode("one two three one two")
    mixed.begin(repeated, PARAMS, ProcessorPlan(grammar=compiler.compile(GrammarSpec("regex", "( [0-9]){9}"))))
    (guesses,) = mixed.guess([()], 4)
    assert guesses and all(tokenizer.decode([guess.token]) not in (" three", "one") for guess in guesses)


def test_a_forced_guess_that_lookup_makes_too_is_learned_from(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    """It stays a forced one: it has no cell for two sources."""
    repeated, calibration = tokenizer.encode("one two three one two"), Calibration()
    mixed = ModelDrafter(CountingRuntime(vocab_size=tokenizer.size), tokenizer.size).with_lookup()
    mixed.begin(repeated, PARAMS, ProcessorPlan(grammar=compiler.compile(GrammarSpec("choice", '[" three four"]'))))
    (guesses,) = mixed.guess([()], 4)
    assert [tokenizer.decode([guess.token]) for guess in guesses] == [tokenizer.decode([repeated[-3]])] or guesses
    calibration.observe(guesses, guesses[0].token)
    assert calibration.chance(guesses[0].cell) > 0.9


def test_a_target_that_leaves_the_grammar_is_drafted_for_without(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """A server that knows no grammars, or another vocabulary's: drafting goes on."""
    drafter, _ = make(tokenizer, compiler)
    drafter.extend(tokenizer.encode("class Free"))
    (guesses,) = drafter.guess([()], 4)
    assert guesses and drafter.continuation(4) == []
    begun = ModelDrafter(CountingRuntime(vocab_size=tokenizer.size), tokenizer.size)
    plan = ProcessorPlan(num_generated=1, grammar=compiler.compile(GrammarSpec("regex", "[0-9]+")))
    begun.begin(tokenizer.encode("x class"), PARAMS, plan)
    assert begun.guess([()], 4)[0]


def test_forced_guesses_are_likely_and_learned() -> None:
    calibration, guess = Calibration(), forced_guess(5)
    assert calibration.chance(guess.cell) > 0.9
    assert shared_guess(guess) == guess  # made by lookup too
    for _ in range(40):
        calibration.observe([guess], 6)
    assert calibration.chance(guess.cell) < 0.5


def test_a_request_takes_its_grammar_to_the_server(compiler: GrammarCompiler) -> None:
    """Spec on the wire with the tokens that belong to the text; compiled for the draft."""
    spec = GrammarSpec("regex", "[0-9]+")
    request = GenerationRequest((1, 2), grammar=spec, draft_grammar=compiler.compile(spec))
    asked = SessionRequest(prompt=[1, 2, 7], max_tokens=4, **request.wire_fields(1))
    assert GrammarSpec.of_wire(asked.grammar) == spec
    assert asked.generated == 1
    assert request.plan.grammar is request.draft_grammar
