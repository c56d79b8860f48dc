"""Tests of what stands between a row of logits and a commit, where a plain pick is not enough; rules in the engine."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request
from tests.test_engine import PROMPTS

from outrider.cloud.api.recent_texts import _sampling_of
from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.seam import GenerateRequest
from outrider.models.errors import ModelFault, RequestError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.chooser import TokenChooser, logprobs_of
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.processor_plan import LogitProcessor, ProcessorPlan, apply_all
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.wire.tree_draft import ROOT, TreeDraft


def run(runtime: FakeBatchRuntime, draft: tuple[int, ...]) -> Collector:
    """Six tokens with logprobs, some of them drafted."""
    engine = Engine(runtime, EngineConfig(policy=Policy.VERIFY))
    found = Collector()
    engine.submit(flat_request(tuple(PROMPTS[1]), SAMPLED, 6, draft=draft, num_logprobs=3), found)
    while engine.has_work:
        engine.step()
    return found


@pytest.mark.parametrize("kind", [FakeBatchRuntime, PickingRuntime])
def test_logprobs_come_with_their_tokens_whatever_was_drafted(kind: type[FakeBatchRuntime]) -> None:
    """The text is the same as without logprobs, and both are the same with drafts; a GPU's picks, too."""
    truth = plain(PROMPTS[1], SAMPLED, 6)
    bare, drafted = run(kind(vocab_size=VOCAB), ()), run(kind(vocab_size=VOCAB), (*truth[:3], (truth[3] + 1) % VOCAB))
    assert bare.tokens == drafted.tokens == truth
    assert drafted.commits[1].accepted == 2
    shown = [each for commit in drafted.commits for each in commit.logprobs]
    assert shown == [each for commit in bare.commits for each in commit.logprobs]
    assert [each.token for each in shown] == truth
    assert all(len(each.top) == 3 and each.top[0][1] >= each.logprob for each in shown)


def test_logprobs_are_those_of_the_model() -> None:
    """Ties by id; a masked id has no chance."""
    row = np.array([*np.log([0.1, 0.4, 0.1, 0.4]), -np.inf], dtype=np.float32)
    found = logprobs_of(row, 2, 3)
    assert found.logprob == pytest.approx(np.log(0.1))
    assert [token for token, _ in found.top] == [1, 3, 0]
    assert found.top[0][1] == pytest.approx(np.log(0.4))
    assert logprobs_of(row, 1, 0).top == ()


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
    rows = np.zeros((4, 5), dtype=np.float32)
    rows[:, 2], rows[:, 3] = 2.0, 1.0
    state = NoneTwice()
    chooser = TokenChooser(SamplingParams(), [state])
    # 2 then 3 are drafted, beside 4: 2 and 3 are accepted, and 0 follows.
    branch = chooser.choose(rows, [4, 2, 3], [-1, -1, 1], 7)
    assert (branch.tokens, branch.nodes, state.seen) == ([2, 3, 0], [1, 2], [2, 3, 0])
    rows[1] = np.nan
    with pytest.raises(ModelFault):
        chooser.choose(rows, [1], [-1], 10)
    assert state.seen == [2, 3, 0]
    assert np.isfinite(rows[0]).all()


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


def drive(engine: Engine) -> None:
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
        drive(engine)
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
        drive(engine)
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
