"""Tests the engine: exact text whatever is drafted, shared, preempted or chunked; nothing leaks; faults stay local."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Harness, calibrated, plain, refused
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime

from outrider.cloud.engine import EngineConfig, Policy
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import SequenceSlice

PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(3 + 5 * i)] for i in range(8)]


def test_drafts_never_stall_a_prompt() -> None:
    """Sixteen sequences whose drafts would fill every step still leave a share for a long prompt."""
    harness = Harness(num_blocks=1024, max_positions=1024, step_s=lambda num_tokens: 0.02)
    truths = [plain([i, 1, 2], SAMPLED, 120) for i in range(16)]
    sequences = [harness.submit([i, 1, 2], 120) for i in range(16)]
    harness.engine.step()
    prompt = [i % VOCAB for i in range(400)]
    _, late = harness.submit(prompt, 1)
    for _ in range(19):
        harness.draft_all(sequences, truths, 20)
        harness.engine.step()
    assert late.tokens == plain(prompt, SAMPLED, 1)


def test_drafts_that_come_while_a_device_runs_a_step_are_merged_then() -> None:
    """Also behind one of another text whose merging raises: that text is drafted for no more, and nothing else."""
    truth, other_truth, came = plain(PROMPTS[1], SAMPLED, 6), plain(PROMPTS[0], SAMPLED, 6), list[int]()

    def while_it_runs(batch: Sequence[SequenceSlice]) -> None:
        if text.tokens and not came:
            harness.engine._put(lambda: came.append(1 // 0), harness.engine._sequences[faulty])
            harness.engine.draft(faulty, 1, [other_truth[1:4]])
            harness.engine.draft(session, 1, [truth[1:4]])
            came.append(len(text.tokens))

    harness = Harness(kind=PickingRuntime, step_s=lambda num_tokens: 0.0, on_step=while_it_runs)
    faulty, other = harness.submit(PROMPTS[0], 6)
    session, text = harness.submit(PROMPTS[1], 6)
    harness.step()
    assert harness.engine.stats().totals.draft_nodes == 0
    harness.step()
    totals = harness.engine.stats().totals
    assert (came, totals.draft_nodes, totals.faults) == ([1], 3, 1)
    harness.run()
    assert text.tokens == truth and text.commits[2].accepted == 2
    assert other.tokens == other_truth and not any(commit.accepted for commit in other.commits)


def drafts_for(truth: Sequence[int], base: int, kind: str, length: int) -> list[list[int]]:
    """Paths of the given kind after `base` tokens of the true text."""
    right = list(truth[base : base + length])
    if not right:
        return []
    wrong = [(t + 1) % VOCAB for t in right]
    half = right[: len(right) // 2] + wrong[len(right) // 2 :]
    return {"right": [right], "wrong": [wrong], "half": [half], "both": [wrong, right], "tree": [half, right, wrong]}[
        kind
    ]


FORMS = ("none", "right", "wrong", "half", "both", "tree", "late")


@given(st.integers(0, 10**6), st.sampled_from([FakeBatchRuntime, PickingRuntime]))
@settings(max_examples=200, deadline=None)
def test_no_draft_changes_the_text(seed: int, kind: type[FakeBatchRuntime]) -> None:
    """Correct, wrong, partial, alternative, stale, repeated, reordered drafts at any time, also while a device runs a
    step: same tokens, no leak.
    """
    rng = random.Random(seed)
    params = rng.choice([SamplingParams(), SAMPLED, SamplingParams(temperature=1.2, top_p=0.9, seed=5)])
    config = EngineConfig(policy=rng.choice(list(Policy)), step_tokens=rng.choice([3, 16]), max_draft=6)
    late: list[tuple[int, int, list[list[int]]]] = []

    def send() -> None:
        for (sequence_id, collector), truth in zip(sequences, truths, strict=True):
            base, form = rng.randint(0, len(collector.tokens)), rng.choice(FORMS)
            if form == "late" and late:
                message = late.pop(rng.randrange(len(late)))
            elif form in ("none", "late") or not (paths := drafts_for(truth, base, form, rng.randint(1, 8))):
                continue
            else:
                message = (sequence_id, base, paths)
                if rng.random() < 0.5:
                    late.append(message)
            try:
                harness.engine.draft(*message)
            except RequestError as error:
                assert error.code == "unknown_session"

    is_over, num_blocks = rng.random(), rng.choice([22, 128])
    harness = Harness(kind=kind, config=config, num_blocks=num_blocks, on_step=lambda batch: send())
    if isinstance(harness.runtime, PickingRuntime):  # a device that is done sooner or later
        harness.runtime.is_over = lambda: rng.random() < is_over
    truths = [plain(prompt, params, 24) for prompt in PROMPTS[:3]]
    sequences = [harness.submit(prompt, 24, params=params) for prompt in PROMPTS[:3]]
    for _ in range(1_000):
        send()
        delay = harness.engine.step()
        if delay is None:
            break
        harness.clock.now += delay
    assert [c.tokens for _, c in sequences] == truths
    harness.assert_all_returned()


def test_correct_drafts_save_passes_and_usage_counts_them() -> None:
    """With correct drafts only, 24 tokens take far fewer passes; accepted and rejected add up."""
    harness = Harness(config=EngineConfig(max_draft=4, policy=Policy.VERIFY))
    truth, sequence = plain(PROMPTS[1], SAMPLED, 24), harness.submit(PROMPTS[1], 24)
    harness.engine.step()
    text = harness.draft_along(sequence, lambda base: [truth[base : base + 8] or [0]])
    usage = text.ended.usage
    assert text.tokens == truth and usage.target_passes <= 7
    assert (usage.accepted_tokens, usage.completion_tokens) == (24 - usage.target_passes, 24)


def costly(num_tokens: int) -> float:
    """A step in which a drafted token is never worth its time."""
    return 0.040 * num_tokens**2


@pytest.mark.parametrize("policy", list(Policy))
def test_only_the_verify_policy_verifies_drafts_that_cost_more_than_they_save(policy: Policy) -> None:
    """Also with a request queued for the only place: such drafts would keep it waiting for longer than they save."""
    harness = calibrated(config=EngineConfig(max_running=1, policy=policy), step_s=costly)
    truth = plain(PROMPTS[1], SAMPLED, 24)
    sequence_id, collector = harness.submit(PROMPTS[1], 24)
    harness.engine.step()
    harness.submit(PROMPTS[2], 4)
    harness.engine.draft(sequence_id, 1, [truth[1:6]])
    while len(collector.commits) < 2:
        harness.engine.step()
    assert (collector.commits[1].proposed > 0) is (policy is Policy.VERIFY)
    harness.run()
    assert collector.tokens == truth


def test_a_verify_item_does_not_change_what_a_session_verifies() -> None:
    """A step verifies the item's whole draft and nothing of a session's costly draft."""
    harness = calibrated(step_s=costly)
    truth = plain(PROMPTS[1], SAMPLED, 24)
    session_id, session = harness.submit(PROMPTS[1], 24)
    harness.engine.step()
    item_truth = plain([7], SAMPLED, 5)  # a prompt of one token decodes at once, like a prefix that the server holds
    _, item = harness.submit([7], 5, draft=item_truth[:4], once=True)
    harness.engine.draft(session_id, 1, [truth[1:6]])
    harness.run()
    assert session.tokens == truth and all(commit.proposed == 0 for commit in session.commits)
    assert item.tokens == item_truth


def test_an_always_wrong_draft_is_soon_not_verified() -> None:
    """After a few rejections the engine verifies no pending draft."""
    harness, truth = calibrated(), plain(PROMPTS[2], SAMPLED, 80)
    text = harness.draft_along(
        harness.submit(PROMPTS[2], 80), lambda base: [[(t + 1) % VOCAB for t in truth[base : base + 6]]]
    )
    assert text.tokens == truth and [c.proposed for c in text.commits[20:]] == [0] * 60


@pytest.mark.parametrize("reason", ["stop", "context"])
def test_a_text_ends_inside_accepted_drafts_where_it_would_without_them(reason: str) -> None:
    """At a stop token, or where the context is full: nothing after it is committed, even if correct drafts follow."""
    harness = Harness(max_positions=32, config=EngineConfig(policy=Policy.VERIFY))
    truth, stop_ids = plain(PROMPTS[1], SAMPLED, 32 - len(PROMPTS[1])), frozenset[int]()
    expected = truth
    if reason == "stop":
        expected, stop_ids = truth[: truth.index(truth[4]) + 1], frozenset({truth[4]})  # the step verifies more
    sequence_id, collector = harness.submit(PROMPTS[1], 1000, stop_ids=stop_ids)
    harness.engine.step()
    harness.engine.draft(sequence_id, 1, [truth[1:] + [0] * 10])
    harness.run()
    assert (collector.tokens, collector.ended.reason) == (expected, reason) and collector.commits[1].accepted > 2


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ([VOCAB], "token_out_of_range"),
        ([-1], "token_out_of_range"),
        ([1] * 512, "context_length_exceeded"),
    ],
)
def test_bad_prompts_are_refused_before_they_reach_the_model(prompt: list[int], code: str) -> None:
    """Each has its own code, and the engine continues."""
    harness = Harness()
    with refused(code):
        harness.submit(prompt)
    assert harness.finished(PROMPTS[0], 3).tokens == plain(PROMPTS[0], SAMPLED, 3)


def test_cancelling_frees_a_sequence_in_every_state() -> None:
    """Queued, prefilling and decoding sequences are gone after the next step; others continue."""
    harness = Harness(config=EngineConfig(max_running=2, step_tokens=8))
    decoding, c1 = harness.submit(PROMPTS[0], 50)
    harness.engine.step()
    prefilling, c2 = harness.submit(list(range(60)), 50)
    queued, c3 = harness.submit(PROMPTS[1], 5)
    _, c4 = harness.submit(PROMPTS[2], 5)
    harness.engine.step()
    for sequence_id in (decoding, prefilling, queued, queued):
        harness.engine.cancel(sequence_id)
    harness.run()
    assert [c.ended.reason for c in (c1, c2, c3)] == ["cancelled"] * 3 and c4.tokens == plain(PROMPTS[2], SAMPLED, 5)
