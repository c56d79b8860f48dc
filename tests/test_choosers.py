"""Rules and grammars in the engine: the text is that of the plainest loop, whatever was drafted, preempted or resumed.

The cases of vLLM's issue tracker, where grammars and speculation broke each other, are here and in test_grammar.py.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain, refused
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request

from outrider.cloud.api.recent_texts import _sampling_of
from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import DraftHints, GenerateRequest
from outrider.models.errors import ModelFault, RequestError
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.chooser import TokenChooser, logprobs_of
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.processor_plan import LogitProcessor, ProcessorPlan, apply_all
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.tree_draft import ROOT, TreeDraft

KINDS = (FakeBatchRuntime, PickingRuntime)
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
RULES = {
    "penalties": ProcessorOptions(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3),
    "bias": ProcessorOptions(logit_bias=((5, 3.0), (6, -100.0), (7, 2.5)), min_tokens=20),
    "words": ProcessorOptions(bad_words=((4,), (5, 7), (7, 5, 5)), allowed_ids=(2, 4, 5, 7, 8, 9, 11), min_tokens=6),
    "narrow": ProcessorOptions(typical_p=0.8, xtc_probability=0.5, xtc_threshold=0.05, frequency_penalty=-0.5),
}


@dataclass(frozen=True)
class Case:
    """What is asked for, and of which runtime."""

    kind: type[FakeBatchRuntime]
    rules: ProcessorOptions = PLAIN
    vocab_size: int = VOCAB
    stops: frozenset[int] = frozenset({2, 9})
    count: int = 30
    wrong: tuple[int, ...] = ()
    grammar: CompiledGrammar | None = None

    def request(self, prompt: Sequence[int], **others: Any) -> GenerateRequest:
        asked = {"processors": self.rules, "grammar": self.grammar, **others}
        return flat_request(tuple(prompt), SAMPLED, self.count, self.stops, **asked)

    def truth(self, prompt: Sequence[int]) -> list[int]:
        """Target-only text by the plainest loop: states made anew for every token."""
        runtime, tokens = FakeBatchRuntime(vocab_size=self.vocab_size), list(prompt)
        for made in range(self.count):
            row = runtime.forward([SequenceSlice(tokens, 0, range(runtime.num_blocks), 1)])[0]
            plan = ProcessorPlan(self.rules, self.stops, made, self.grammar)
            changed = apply_all(plan.states(tokens, self.vocab_size), row)
            tokens.append(pick(changed, SAMPLED, len(tokens), plan.narrowing))
            if tokens[-1] in self.stops:
                break
        return tokens[len(prompt) :]

    def harness(self, form: TreeForm = TreeForm.LINE, max_running: int = 4, **options: Any) -> Harness:
        """An engine that verifies all drafts."""
        config = EngineConfig(max_running=max_running, policy=Policy.VERIFY, form=form)
        return Harness(runtime=self.kind(vocab_size=self.vocab_size, **options), config=config)

    def written(self, request: GenerateRequest) -> Collector:
        harness, found = self.harness(), Collector()
        harness.engine.submit(request, found)
        harness.run()
        return found


@pytest.fixture(scope="module", params=KINDS)
def in_json(request: pytest.FixtureRequest, compiler: GrammarCompiler, tokenizer: Tokenizer) -> Case:
    """Of a runtime that gives rows, and of one that picks. Wrong: outside the grammar, a special token, padding."""
    stops, size = frozenset(tokenizer.eos_token_ids), tokenizer.size + 33
    wrong = (tokenizer.encode("\n")[0], min(stops), size - 1)
    return Case(request.param, PLAIN, size, stops, 120, wrong, compiler.compile(GrammarSpec.json_schema(SCHEMA)))


@pytest.fixture(scope="module", params=[*RULES, "grammar", "grammar and rules"])
def case(request: pytest.FixtureRequest, in_json: Case, tokenizer: Tokenizer) -> Case:
    if request.param in RULES:
        return Case(in_json.kind, RULES[request.param])
    # Bias and penalties act inside the grammar; a minimum of tokens does not keep a complete text from ending.
    (brace,) = tokenizer.encode("{")
    rules = ProcessorOptions(frequency_penalty=1.0, min_tokens=120, logit_bias=((brace, -100.0),))
    return replace(in_json, rules=rules) if request.param == "grammar and rules" else in_json


@pytest.fixture(scope="module")
def expected(case: Case, tokenizer: Tokenizer) -> list[int]:
    """The text after PROMPT. Under the grammar it is complete JSON of the schema, and the end token is its last."""
    tokens = case.truth(PROMPT)
    if case.grammar is None:
        assert tokens != Case(case.kind).truth(PROMPT)
    else:
        assert tokens[-1] in case.stops
        found = json.loads(tokenizer.decode(tokens[:-1]))
        assert list(found) == ["id", "kind", "sizes"] and found["kind"] in ("alpha", "beta", "gamma delta")
    return tokens


PROMPT = [7, 8, 11, 16, 23, 32, 43, 56]


def test_the_text_is_that_of_the_plainest_loop_whatever_was_drafted(case: Case, expected: list[int]) -> None:
    """A right draft, wrong ones, none."""
    wrong = case.wrong or ((expected[3] + 1) % VOCAB,)
    drafts = [(expected[:8], 7), *(([*expected[:3], each, *expected[4:6]], 2) for each in wrong)]
    for draft, accepted in drafts:
        found = case.written(case.request(PROMPT, draft=tuple(draft)))
        assert (found.tokens, found.commits[1].accepted) == (expected, accepted)  # the pass after the prompt's
    assert case.written(case.request(PROMPT)).tokens == expected


def test_a_tree_changes_nothing(case: Case, expected: list[int]) -> None:
    """Branches before and after the text's own: the state follows the accepted one (vLLM 44006)."""
    harness, found = case.harness(TreeForm.TREE), Collector()
    number = harness.engine.submit(case.request(PROMPT, patience_ms=0.0), found)
    harness.engine.step()
    while found.end is None:
        base = len(found.tokens)
        here = expected[base : base + 3]
        tokens = [token for right in here for token in ((right + 1) % case.vocab_size, right)]
        parents = [ROOT if index < 2 else base * 8 + (index // 2) * 2 - 1 for index in range(len(tokens))]
        if tokens:
            harness.engine.draft_tree(number, TreeDraft(base, base * 8, tokens, parents, [0] * len(tokens)))
        harness.step()
    assert found.tokens == expected and max(commit.accepted for commit in found.commits) > 1


@pytest.mark.parametrize("cut", [1, 5])
def test_a_resumed_text_goes_on_as_if_it_had_not_stopped(case: Case, expected: list[int], cut: int) -> None:
    """With `num_generated` its first part counts as text; in the prompt alone it would not."""
    found = case.written(case.request([*PROMPT, *expected[:cut]], num_generated=cut))
    assert (expected[:cut] + found.tokens)[: len(expected)] == expected


def test_preemption_and_a_failed_step_leave_the_states_where_the_text_is(case: Case) -> None:
    """Sequences that lose their blocks run again, with drafts that contradict nothing (vLLM 31955); so do those beside
    one that fails.
    """
    prompts = [[*PROMPT, index] for index in range(4)]
    truths = [case.truth(prompt) for prompt in prompts]
    fatal = min(set(range(case.vocab_size)).difference(*prompts, *truths))
    num_blocks = 5 + max(map(len, truths)) // 4  # hardly more than for one
    harness = case.harness(max_running=5, num_blocks=num_blocks, block_size=4, fail_on_token=fatal)
    found, bad = [Collector() for _ in prompts], Collector()
    for prompt, sink, text in zip(prompts, found, truths, strict=True):
        harness.engine.submit(case.request(prompt, draft=tuple(text[:20])), sink)
    harness.run_steps(3)
    harness.engine.submit(case.request([fatal], processors=PLAIN, grammar=None), bad)
    harness.run()
    assert harness.engine.stats().totals.preempted > 0 and bad.code == "model_fault"
    assert [sink.tokens for sink in found] == truths


# -- grammars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", [0, 1, 3])
def test_a_grammar_that_ends_in_the_middle_of_drafted_tokens(beyond: int, in_json: Case) -> None:
    """The end token is the last one, whatever was drafted after it (vLLM 42619, 54437)."""
    text = in_json.truth(PROMPT)
    for cut in (4, len(text) - 3):
        request = in_json.request([*PROMPT, *text[:cut]], num_generated=cut)
        tail = (*text[cut:][:12], *text[:beyond])
        assert in_json.written(replace(request, hints=DraftHints(tail))).tokens == text[cut:]


def test_a_text_whose_grammar_fails_ends_alone(in_json: Case, compiler: GrammarCompiler) -> None:
    """One that reaches the limits, and one whose rules leave nothing: the others of the step go on."""
    costly = compiler.compile(GrammarSpec("regex", ".*[a-m].{200}[n-z].{100}"))
    harness, (bad, left, fine) = in_json.harness(), (Collector(), Collector(), Collector())
    harness.engine.submit(in_json.request(PROMPT, grammar=costly), bad)
    harness.engine.submit(in_json.request(PROMPT, processors=ProcessorOptions(allowed_ids=(3, 4))), left)
    harness.engine.submit(in_json.request(PROMPT), fine)
    harness.run()
    assert fine.tokens == in_json.truth(PROMPT) and harness.engine.health.fault is None
    assert (bad.code, left.code) == ("grammar_too_complex", "grammar_excluded")
    with refused("grammar_excluded", match="outside the grammar"):
        harness.engine.submit(in_json.request([*PROMPT, 40], num_generated=1), Collector())


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "rules", "num_generated"),
    [
        ("logit_bias has token id 64; ", ProcessorOptions(logit_bias=((VOCAB, 1.0),)), 0),
        ("bad_words has token id 64; ", ProcessorOptions(bad_words=((1,), (2, VOCAB))), 0),
        ("allowed_token_ids has token id 69; ", ProcessorOptions(allowed_ids=(1, VOCAB + 5)), 0),
        ("generated is 99", RULES["bias"], 99),  # it counts tokens of the prompt, and of a held prefix
    ],
)
def test_what_the_model_or_the_prompt_lacks_is_refused_by_the_fields_name(
    message: str, rules: ProcessorOptions, num_generated: int
) -> None:
    """As in prompts and drafts."""
    with pytest.raises(RequestError, match=f"^{message}") as error:
        Harness().submit(PROMPT, processors=rules, num_generated=num_generated)
    assert num_generated or error.value.code == "token_out_of_range"


def test_rules_and_grammars_are_part_of_what_decides_a_text(in_json: Case, compiler: GrammarCompiler) -> None:
    """An earlier text of others is a hint only, not a repeat."""
    bare = Case(in_json.kind)
    assert _sampling_of(bare.request(PROMPT)) == _sampling_of(bare.request(PROMPT, num_generated=1))
    found = [bare.request(PROMPT, processors=rules, num_generated=n) for rules in RULES.values() for n in (0, 1)]
    other = compiler.compile(GrammarSpec.json_schema({"type": "integer"}))
    found += [bare.request(PROMPT), *(bare.request(PROMPT, grammar=each) for each in (in_json.grammar, other))]
    assert len({_sampling_of(each) for each in found}) == len(found)


def test_ids_in_rules_count_toward_the_queues_bound() -> None:
    """A client cannot have more held in rules than in prompts."""
    rules = ProcessorOptions(logit_bias=((1, 1.0),), bad_words=((1, 2), (3,)), allowed_ids=(1, 2, 3))
    harness = Harness()
    harness.submit(PROMPT, processors=rules)
    (sequence,) = harness.engine._sequences.values()
    assert (rules.num_ids, sequence.num_counted) == (7, len(PROMPT) + 7)


class NoneTwice:
    """Forbids every token that was seen."""

    def __init__(self, seen: tuple[int, ...] = ()) -> None:
        self.seen = list(seen)

    @property
    def length(self) -> int:
        return len(self.seen)

    def apply(self, row: NDArray[np.float32]) -> None:
        row[self.seen] = -np.inf

    def advance(self, token: int) -> None:
        self.seen.append(token)

    def truncate(self, length: int) -> None:
        del self.seen[length:]

    def fork(self) -> LogitProcessor:
        return NoneTwice(tuple(self.seen))


def test_a_state_follows_the_tokens_that_are_chosen_and_no_others() -> None:
    """Along an accepted branch, not a rejected one; back where a row is not finite."""
    rows, state = np.tile(np.array([0, 0, 2, 1, 0], np.float32), (4, 1)), NoneTwice()
    chooser = TokenChooser(SamplingParams(), [state])
    # 2 then 3 are drafted, beside 4: 2 and 3 are accepted, and 0 follows.
    branch = chooser.choose(rows, [4, 2, 3], [-1, -1, 1], 7)
    assert (branch.tokens, branch.nodes, state.seen) == ([2, 3, 0], [1, 2], [2, 3, 0])
    rows[1] = np.nan
    with pytest.raises(ModelFault):
        chooser.choose(rows, [1], [-1], 10)
    assert state.seen == [2, 3, 0] and np.isfinite(rows[0]).all()


# -- logprobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_come_with_their_tokens_whatever_was_drafted(kind: type[FakeBatchRuntime]) -> None:
    """The text is the same as without logprobs, and both are the same with drafts; a GPU's picks, too."""
    case, truth = Case(kind, stops=frozenset(), count=6), plain(PROMPT, SAMPLED, 6)
    drafts = (), (*truth[:3], (truth[3] + 1) % VOCAB)
    bare, drafted = (case.written(case.request(PROMPT, draft=draft, num_logprobs=3)) for draft in drafts)
    assert bare.tokens == drafted.tokens == truth and drafted.commits[1].accepted == 2
    shown, of_bare = ([each for commit in found.commits for each in commit.logprobs] for found in (drafted, bare))
    assert shown == of_bare and [each.token for each in shown] == truth
    assert all(len(each.top) == 3 and each.top[0][1] >= each.logprob for each in shown)


def test_logprobs_are_those_of_the_model() -> None:
    """Ties by id; a masked id has no chance."""
    row = np.array([*np.log([0.1, 0.4, 0.1, 0.4]), -np.inf], dtype=np.float32)
    found = logprobs_of(row, 2, 3)
    assert [token for token, _ in found.top] == [1, 3, 0] and logprobs_of(row, 1, 0).top == ()
    assert (found.logprob, found.top[0][1]) == pytest.approx((np.log(0.1), np.log(0.4)))


@pytest.mark.parametrize("scale", [0.01, 3.0, 1000.0])
def test_logprobs_of_a_large_vocabulary_are_exact_and_cheap(scale: float) -> None:
    """The error of float32 stays under 1e-5, and no row becomes float64: that took 6.9 ms a token."""
    row = ((np.random.default_rng(0).standard_normal(151_936) + 1.0) * scale).astype(np.float32)
    before = row.copy()
    tracemalloc.start()
    try:
        found = logprobs_of(row, 5, 0)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1.5 * row.nbytes and np.array_equal(row, before)
    wide = row.astype(np.float64) - row.max()
    wide -= np.log(np.exp(wide).sum())
    assert found.logprob == pytest.approx(wide[5], abs=1e-5)
    top = logprobs_of(row, 5, 20).top
    assert [token for token, _ in top] == np.argsort(-wide, kind="stable")[:20].tolist()
    assert all(value == pytest.approx(wide[token], abs=1e-5) for token, value in top)
