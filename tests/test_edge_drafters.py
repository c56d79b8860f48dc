"""Compares drafters with fresh ones after any course of a text; and drafting inside a grammar."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_runtime import FakeSequenceRuntime

from outrider.edge.drafting.calibration import LOOKUP_RANK, Calibration, forced_guess, shared_guess
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.results import GenerationRequest
from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.runtimes.base import BranchingRuntime, SequenceRuntime
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import SessionRequest

VOCAB = 30
SAMPLED = SamplingParams(0.8, seed=4)


class Unbranched(FakeSequenceRuntime):
    """Takes no branches."""

    extend_branches = extend_branches_of = open_sequence = None  # type: ignore[assignment]


HOW: dict[str, Any] = {"vocab_size": VOCAB, "max_positions": 64, "agreement": 0.7}


def branched(max_branches: int, max_positions: int = 64) -> FakeSequenceRuntime:
    """The same language, with branches."""
    return FakeSequenceRuntime(max_branches=max_branches, **HOW | {"max_positions": max_positions})


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "one sequence": lambda: ModelDrafter(Unbranched(**HOW)),
    "branches": lambda: ModelDrafter(branched(3)),
    "lookup": NgramDrafter,
    "mixed": lambda: ModelDrafter(branched(8)).with_lookup(),
    "mixed, one sequence": lambda: ModelDrafter(Unbranched(**HOW)).with_lookup(),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1 << 32))
def test_guesses_are_those_of_a_fresh_drafter(kind: str, seed: int) -> None:
    """After any branches, commits along them or across them, new texts, and at the longest sequence too."""
    chance, drafter = random.Random(seed), DRAFTERS[kind]()
    num_ids = 4 if "lookup" in kind or "mixed" in kind else VOCAB  # few ids repeat themselves

    def tokens(most: int) -> list[int]:
        return [chance.randrange(num_ids) for _ in range(chance.randint(0, most))]

    prompt = [1, *tokens(40)]
    text, known = list(prompt), [list[int]()]
    drafter.begin(prompt, SAMPLED)
    for _ in range(14):
        what = chance.random()
        if what < 0.1:
            prompt = [*text[: chance.randint(1, len(text))], *tokens(3)]
            text, known = list(prompt), [[]]
            drafter.begin(prompt, SAMPLED)
        elif what < 0.4:
            new = [*chance.choice(known), *tokens(1)][:3]
            known = [[], *(branch[len(new) :] for branch in known if branch[: len(new)] == new)]
            text += new
            drafter.extend(new)
        assert drafter.length == len(text)
        branches = [[*chance.choice(known), *tokens(2)] for _ in range(chance.randint(1, 5))]
        known += branches
        width, fresh = chance.choice([1, 2, 4]), DRAFTERS[kind]()
        fresh.begin(text, SAMPLED)
        found = drafter.guess(branches, width)
        assert found == [fresh.guess([branch], width)[0] for branch in branches]
        assert kind == "lookup" or list(map(bool, found)) == [len(text) + len(branch) < 64 for branch in branches]
        assert drafter.continuation(5) == fresh.continuation(5)
    drafter.close()
    drafter.close()


def test_the_first_guess_is_what_pick_takes() -> None:
    """With the target's own noise at that position, best first."""
    drafter, truth = ModelDrafter(branched(8)), branched(8)
    drafter.begin([1, 2, 3], SAMPLED)
    row = truth.extend([1, 2, 3]).copy()
    (guesses,) = drafter.guess([[]], 4)
    assert [guess.rank for guess in guesses] == [0, 1, 2, 3] and guesses[0].token == pick(row, SAMPLED, 3)
    (after,) = drafter.guess([[7, 8]], 1)
    assert after[0].token == pick(truth.extend([7, 8]), SAMPLED, 5)


def test_a_fork_costs_only_its_own_tokens() -> None:
    """One sequence is cut back to the fork; several branches are one call."""
    run = list[int]()
    runtime = Unbranched(on_step=run.extend, **HOW)
    drafter = ModelDrafter(runtime)
    assert isinstance(runtime, SequenceRuntime) and not isinstance(runtime, BranchingRuntime)
    drafter.begin([1] * 20, SAMPLED)
    for branch in ([], [2], [2, 3]):
        drafter.guess([branch], 2)
    assert (len(run), drafter.max_branches) == (22, 1)
    drafter.guess([[2, 4]], 2)
    drafter.extend([2, 4])
    drafter.guess([[5]], 2)
    assert len(run) == 24
    calls = list[int]()
    together = FakeSequenceRuntime(vocab_size=VOCAB, on_branches=lambda each: calls.append(len(each)), max_branches=4)
    several = ModelDrafter(together)
    several.begin([1] * 20, SAMPLED)
    several.guess([[2], [3], [2, 4], [5], [6]], 2)
    assert (calls, several.max_branches) == ([4, 1], 4)


def test_a_draft_has_no_guess_after_a_token_that_it_does_not_have() -> None:
    """A target that is padded further may pick one; another text goes on, and so does a branch without it."""
    for runtime in (FakeSequenceRuntime(vocab_size=VOCAB), Unbranched(**HOW)):
        drafter = ModelDrafter(runtime, 12)
        drafter.begin([1, 2, 3], SamplingParams())
        first, second, third = drafter.guess([[], [4], [VOCAB]], 2)
        assert first and second and not third
        drafter.extend([VOCAB])
        assert drafter.guess([[], [1]], 2) == [[], []] and drafter.length == 4
        drafter.extend([4])
        assert drafter.guess([[]], 2) == [[]]
        for text, has_guess in (([1, 2, 3, 4], True), ([1, VOCAB + 10, 3], False)):
            drafter.begin(text, SamplingParams())
            assert (drafter.guess([[]], 2) != [[]]) == has_guess


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_drafts_embedding_is_never_proposed(temperature: float) -> None:
    """Draft and target may be padded differently: the target may not have an id that no tokenizer knows."""
    for num_ids in (None, 12):
        drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=300), num_ids)
        drafter.begin([1, 2, 3], SamplingParams(temperature=temperature, seed=3))
        branch, proposed = list[int](), list[int]()
        for _ in range(40):
            (guesses,) = drafter.guess([branch], 4)
            assert len(guesses) == 4
            proposed += [guess.token for guess in guesses]
            branch.append(guesses[0].token)
        assert (max(proposed) < 12) == (num_ids == 12)  # without num_ids it proposes padding


def test_lookup_and_model_guess_into_one_tree() -> None:
    """What both guess counts as the model's and as surer; what only lookup guesses is beside it. Lookup alone does not
    go on where the model ends: it would, token by token, beyond the model's longest sequence.
    """
    model, lookup = ModelDrafter(branched(8)), NgramDrafter()
    mixed = ModelDrafter(branched(8)).with_lookup()
    text = [1, 2, 3, 4, 9, 9, 1, 2, 3, 4]
    for drafter in (model, lookup, mixed):
        drafter.begin(text, SAMPLED)
    assert [guess.token for guess in mixed.continuation(4)] == [9, 9, 1, 2]
    assert mixed.continuation(4) == lookup.continuation(4) and model.continuation(4) == []
    assert [guess.rank for guess in mixed.continuation(4)] == [LOOKUP_RANK] * 4
    for width in (2, VOCAB):
        (guesses,), (own,), (looked_up,) = (each.guess([[]], width) for each in (mixed, model, lookup))
        (found,) = looked_up
        if found.token in [guess.token for guess in own]:
            assert guesses == [shared_guess(guess) if guess.token == found.token else guess for guess in own]
        else:
            assert guesses == [*own, found]
    assert mixed.guess([[5]], 2) == model.guess([[5]], 2)  # nothing repeats there
    assert (mixed.length, mixed.max_branches) == (10, 8)
    for num, has_guess in ((31, True), (32, False)):
        mixed.begin([1, 2] * num, SAMPLED)
        assert list(map(bool, mixed.guess([[], [1]], 4))) == [has_guess] * 2


# -- inside a grammar --------------------------------------------------------------------------------------------------

COLOURS = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
)


Make = Callable[..., tuple[ModelDrafter, list[Sequence[int]]]]


@pytest.fixture
def make(tokenizer: Tokenizer, compiler: GrammarCompiler) -> Make:
    """`make(spec, prompt)`: a drafter in the grammar, and the tokens of each call of its model."""

    def begin(
        spec: GrammarSpec = COLOURS, prompt: Sequence[int] = (5, 9, 40), *, is_looked_up: bool = False, **plan: Any
    ) -> tuple[ModelDrafter, list[Sequence[int]]]:
        calls = list[Sequence[int]]()
        drafter = ModelDrafter(
            FakeSequenceRuntime(vocab_size=tokenizer.size + 33, on_step=calls.append), tokenizer.size
        )
        drafter = drafter.with_lookup() if is_looked_up else drafter
        drafter.begin(prompt, SAMPLED, ProcessorPlan(grammar=compiler.compile(spec), **plan))
        return drafter, calls

    return begin


def test_forced_tokens_are_drafted_for_nothing(tokenizer: Tokenizer, make: Make) -> None:
    """A path before anything is read, and a guess for each forced node of the tree, without a call of the model."""
    drafter, calls = make()
    path = [guess.token for guess in drafter.continuation(16)]
    assert tokenizer.decode(path).startswith('{"colour":')
    assert drafter.continuation(2) == [forced_guess(token) for token in path[:2]]
    assert drafter.guess([path[:index] for index in range(len(path))], 4) == [[forced_guess(token)] for token in path]
    assert not calls


@pytest.mark.parametrize("method", ["apply", "accept", "validate", "forced"])
def test_a_grammar_beyond_its_limits_is_no_fault_of_the_device(
    method: str, tokenizer: Tokenizer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft goes on without it. As a fault it would take the device away from all other texts, too."""
    drafter, calls = make()
    too_costly = RequestError("grammar_too_complex", "the grammar is too costly")
    monkeypatch.setattr(f"outrider.models.grammar.state.GrammarState.{method}", Mock(side_effect=too_costly))
    drafter.extend(tokenizer.encode('{"colour":"'))
    for branch in ([], [7]):  # with "apply" no token is known to be allowed
        assert drafter.guess([branch], 4)[0] or method == "apply"
    assert drafter._processors.allows([], 7) or method == "apply"
    assert calls


def test_guesses_are_inside_the_grammar(tokenizer: Tokenizer, compiler: GrammarCompiler, make: Make) -> None:
    """Every guess may follow its branch; a branch that has left the grammar gets none."""
    (drafter, calls), state = make(), compiler.compile(COLOURS).state()
    start = [guess.token for guess in drafter.continuation(16)]
    drafter.extend(start)
    assert all(map(state.accept, start))
    (guesses,) = drafter.guess([()], 8)
    assert guesses and calls and all(state.validate([guess.token]) == 1 for guess in guesses)
    assert drafter.guess([tokenizer.encode("\n\n")], 4) == [[]]
    assert drafter.guess([()], 8) == [guesses]  # and it changed nothing


def test_a_whole_text_can_be_drafted(tokenizer: Tokenizer, make: Make) -> None:
    """To its end token, which is forced too."""
    (drafter, calls), text = make(), list[int]()
    while not text or text[-1] not in tokenizer.eos_token_ids:
        ((guess, *_),) = drafter.guess([()], 1)
        text.append(guess.token)
        drafter.extend(text[-1:])
        assert len(text) < 60
    assert tokenizer.decode(text).endswith("}") and len(calls) < len(text) / 2


def test_lookup_stays_inside_too(tokenizer: Tokenizer, make: Make) -> None:
    """What followed the same tokens before is no guess where the grammar forbids it. A forced guess that lookup makes
    too stays a forced one, and is learned from: it has no cell for two sources.
    """
    repeated, calibration = tokenizer.encode("one two three one two"), Calibration()
    (guesses,) = make(GrammarSpec("regex", "( [0-9]){9}"), repeated, is_looked_up=True)[0].guess([()], 4)
    assert guesses and all(tokenizer.decode([guess.token]) not in (" three", "one") for guess in guesses)
    (guesses,) = make(GrammarSpec("choice", '[" three four"]'), repeated, is_looked_up=True)[0].guess([()], 4)
    calibration.observe(guesses, guesses[0].token)
    assert calibration.chance(guesses[0].cell) > 0.9


def test_a_target_that_leaves_the_grammar_is_drafted_for_without(tokenizer: Tokenizer, make: Make) -> None:
    """A server that knows no grammars, or another vocabulary's: drafting goes on."""
    drafter, _ = make()
    drafter.extend(tokenizer.encode("class Free"))
    assert drafter.guess([()], 4)[0] and drafter.continuation(4) == []
    begun, _ = make(GrammarSpec("regex", "[0-9]+"), tokenizer.encode("x class"), num_generated=1)
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
    assert (GrammarSpec.of_wire(asked.grammar), asked.generated) == (spec, 1)
    assert request.plan.grammar is request.draft_grammar
