"""Tests of rules in the engine: the text with drafts is the text without, wherever it is begun, stopped and resumed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request
from tests.test_engine import PROMPTS

from outrider.cloud.api.recent_texts import _sampling_of
from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import GenerateRequest
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan, apply_all
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.wire.tree_draft import ROOT, TreeDraft

STOPS = frozenset({2, 9})
RULES = {
    "penalties": ProcessorOptions(repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3),
    "bias": ProcessorOptions(logit_bias=((5, 3.0), (6, -100.0), (7, 2.5)), min_tokens=20),
    "words": ProcessorOptions(bad_words=((4,), (5, 7), (7, 5, 5)), allowed_ids=(2, 4, 5, 7, 8, 9, 11), min_tokens=6),
    "narrow": ProcessorOptions(typical_p=0.8, xtc_probability=0.5, xtc_threshold=0.05, frequency_penalty=-0.5),
}
COUNT = 30
each_rule = pytest.mark.parametrize("name", RULES)
each_kind = pytest.mark.parametrize("kind", [FakeBatchRuntime, PickingRuntime])


def truth(
    prompt: Sequence[int], rules: ProcessorOptions, params: SamplingParams = SAMPLED, generated: int = 0
) -> list[int]:
    """Target-only text by the plainest loop: states made anew for every token."""
    runtime, tokens = FakeBatchRuntime(vocab_size=VOCAB), list(prompt)
    blocks = range(runtime.num_blocks)
    for made in range(COUNT):
        row = runtime.forward([SequenceSlice(tokens, 0, blocks, 1)])[0]
        plan = ProcessorPlan(rules, STOPS, generated + made)
        tokens.append(pick(apply_all(plan.states(tokens, VOCAB), row), params, len(tokens), plan.narrowing))
        if tokens[-1] in STOPS:
            break
    return tokens[len(prompt) :]


def request(rules: ProcessorOptions, prompt: Sequence[int] = PROMPTS[1], **others: object) -> GenerateRequest:
    return flat_request(tuple(prompt), SAMPLED, COUNT, STOPS, processors=rules, **others)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@each_kind
@each_rule
def test_the_text_is_that_of_the_plainest_loop_whatever_was_drafted(name: str, kind: type[FakeBatchRuntime]) -> None:
    """A right draft, a wrong one, none; also where the runtime picks by itself."""
    expected = truth(PROMPTS[1], RULES[name])
    assert expected != truth(PROMPTS[1], ProcessorOptions())
    for draft in ((), expected[:8], [*expected[:3], (expected[3] + 1) % VOCAB, *expected[4:6]]):
        engine, found = Engine(kind(vocab_size=VOCAB), EngineConfig(policy=Policy.VERIFY)), Collector()
        engine.submit(request(RULES[name], draft=tuple(draft)), found)
        run(engine)
        assert found.tokens == expected
    assert found.commits[1].accepted == 2  # the pass after the prompt's


@each_kind
@each_rule
def test_a_tree_changes_nothing(name: str, kind: type[FakeBatchRuntime]) -> None:
    """Branches of the tree before and after the text's own: the state follows the accepted one."""
    expected = truth(PROMPTS[1], RULES[name])
    harness = Harness(kind=kind, config=EngineConfig(policy=Policy.VERIFY, form=TreeForm.TREE))
    found = Collector()
    number = harness.engine.submit(request(RULES[name], patience_ms=1e6), found)
    harness.engine.step()
    while found.end is None:
        base = len(found.tokens)
        here = expected[base : base + 3]
        others = [(token + 1) % VOCAB for token in here]
        tokens = [token for pair in zip(others, here, strict=True) for token in pair]
        parents = [ROOT if index < 2 else base * 8 + (index // 2) * 2 - 1 for index in range(len(tokens))]
        if tokens:
            harness.engine.draft_tree(number, TreeDraft(base, base * 8, tokens, parents, [0] * len(tokens)))
        harness.step()
    assert found.tokens == expected
    assert max(commit.accepted for commit in found.commits) > 1


@each_kind
@each_rule
def test_a_resumed_text_goes_on_as_if_it_had_not_stopped(name: str, kind: type[FakeBatchRuntime]) -> None:
    """With `num_generated` its first part counts as text; in the prompt alone it would not."""
    expected = truth(PROMPTS[1], RULES[name])
    for cut in (1, 4):
        engine, found = Engine(kind(vocab_size=VOCAB)), Collector()
        engine.submit(request(RULES[name], [*PROMPTS[1], *expected[:cut]], num_generated=cut), found)
        run(engine)
        assert (expected[:cut] + found.tokens)[: len(expected)] == expected


@each_kind
def test_preemption_leaves_the_states_where_the_text_is(kind: type[FakeBatchRuntime]) -> None:
    """Sequences that lose their blocks to older ones run their tokens again."""
    expected = [truth(prompt, RULES["penalties"]) for prompt in PROMPTS]
    harness = Harness(kind=kind, config=EngineConfig(max_running=4), num_blocks=24)
    found = [Collector() for _ in PROMPTS]
    for prompt, sink in zip(PROMPTS, found, strict=True):
        harness.engine.submit(request(RULES["penalties"], prompt), sink)
    harness.run()
    assert harness.engine.stats().totals.preempted > 0
    assert [sink.tokens for sink in found] == expected


@each_kind
def test_a_failed_step_leaves_the_states_where_the_text_is(kind: type[FakeBatchRuntime]) -> None:
    """The others of the step run again, apart."""
    expected = [truth(prompt, RULES["penalties"]) for prompt in PROMPTS[:2]]
    fatal = min(set(range(VOCAB)).difference(*PROMPTS[:2], *expected))
    harness = Harness(kind=kind, fail_on_token=fatal)
    found = [Collector() for _ in expected]
    for prompt, sink in zip(PROMPTS, found, strict=False):
        harness.engine.submit(request(RULES["penalties"], prompt), sink)
    harness.run_steps(3)
    bad = Collector()
    harness.engine.submit(request(ProcessorOptions(), [fatal]), bad)
    harness.run()
    assert bad.ended.reason == "error"
    assert [sink.tokens for sink in found] == expected


@pytest.mark.parametrize(
    ("field", "rules"),
    [
        ("logit_bias", ProcessorOptions(logit_bias=((VOCAB, 1.0),))),
        ("bad_words", ProcessorOptions(bad_words=((1,), (2, VOCAB)))),
        ("allowed_token_ids", ProcessorOptions(allowed_ids=(1, VOCAB + 5))),
    ],
)
def test_an_id_that_the_model_lacks_is_refused_by_the_fields_name(field: str, rules: ProcessorOptions) -> None:
    """As in prompts and drafts."""
    engine = Engine(FakeBatchRuntime(vocab_size=VOCAB))
    with pytest.raises(RequestError, match=f"^{field} has token id 6[49]; ") as refusal:
        engine.submit(request(rules), Collector())
    assert refusal.value.code == "token_out_of_range"


def test_a_text_cannot_be_longer_than_what_holds_it() -> None:
    """`generated` counts tokens of the prompt, and of a held prefix."""
    engine = Engine(FakeBatchRuntime(vocab_size=VOCAB))
    with pytest.raises(RequestError, match=r"^generated is 99"):
        engine.submit(request(RULES["bias"], num_generated=99), Collector())


def test_rules_are_part_of_what_decides_a_text() -> None:
    """An earlier text of other rules is a hint only, not a repeat."""
    plain = _sampling_of(request(ProcessorOptions()))
    assert plain == _sampling_of(request(ProcessorOptions(), num_generated=1))
    found = {_sampling_of(request(rules, num_generated=count)) for rules in RULES.values() for count in (0, 1)}
    assert len(found | {plain}) == 2 * len(RULES) + 1


def test_ids_in_rules_count_toward_the_queues_bound() -> None:
    """A client cannot have more held in rules than in prompts."""
    rules = ProcessorOptions(logit_bias=((1, 1.0),), bad_words=((1, 2), (3,)), allowed_ids=(1, 2, 3))
    assert rules.num_ids == 7
    harness = Harness()
    harness.engine.submit(request(rules), Collector())
    (sequence,) = harness.engine._sequences.values()
    assert sequence.num_counted == len(PROMPTS[1]) + 7
