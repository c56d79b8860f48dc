"""Tests the engine: exact text whatever is drafted, shared, preempted or chunked; nothing leaks; faults stay local."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import SequenceSlice

PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(3 + 5 * i)] for i in range(8)]


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED, SamplingParams(temperature=0.8, top_p=0.9, seed=3)])
def test_concurrent_sequences_equal_the_plain_loop(params: SamplingParams) -> None:
    """Eight prompts of different lengths in one engine give the same texts as alone."""
    harness = Harness()
    collectors = [harness.submit(prompt, 25, params=params)[1] for prompt in PROMPTS]
    harness.run()
    assert [c.tokens for c in collectors] == [plain(prompt, params, 25) for prompt in PROMPTS]
    assert all(c.end is not None and c.end.reason == "length" for c in collectors)
    assert max(map(len, harness.batches)) == len(PROMPTS)
    harness.assert_all_returned()


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    """With a budget of 8 tokens per step no sequence stalls, and both texts are exact."""
    harness = Harness(config=EngineConfig(step_tokens=8))
    _, first = harness.submit(PROMPTS[0], 30)
    harness.engine.step()
    long_prompt = list(range(60))
    _, second = harness.submit(long_prompt, 5)
    harness.run()
    assert first.tokens == plain(PROMPTS[0], SAMPLED, 30)
    assert second.tokens == plain(long_prompt, SAMPLED, 5)
    assert max(sum(batch) for batch in harness.batches) <= 8
    assert len([b for b in harness.batches if len(b) == 2 and max(b) > 1]) >= 8
    harness.assert_all_returned()


def test_drafts_never_stall_a_prompt() -> None:
    """Sixteen sequences whose drafts would fill every step still leave a share for a long prompt."""
    harness = Harness(num_blocks=1024, max_positions=1024, step_s=lambda num_tokens: 0.02)
    truths = [plain([i, 1, 2], SAMPLED, 120) for i in range(16)]
    sequences = [harness.submit([i, 1, 2], 120) for i in range(16)]
    harness.engine.step()
    prompt = [i % VOCAB for i in range(400)]
    _, late = harness.submit(prompt, 1)
    num_steps = 0
    while late.end is None:
        for (sequence_id, collector), truth in zip(sequences, truths, strict=True):
            base = len(collector.tokens)
            if collector.end is None and base < 118:
                harness.engine.draft(sequence_id, base, [truth[base : base + 20]])
        harness.engine.step()
        num_steps += 1
        assert num_steps < 20
    assert late.tokens == plain(prompt, SAMPLED, 1)


def test_a_step_of_no_measured_time_is_handled() -> None:
    """A step too short for the clock causes no division by zero."""
    harness = Harness(step_s=lambda num_tokens: 0.0)
    sequence_id, collector = harness.submit(PROMPTS[1], 30)
    truth = plain(PROMPTS[1], SAMPLED, 30)
    while collector.end is None:
        base = len(collector.tokens)
        if base and base < 30:
            harness.engine.draft(sequence_id, base, [[truth[base], (truth[base] + 1) % VOCAB]])
        harness.engine.step()
    assert collector.tokens == truth


def test_a_runtime_may_pick_tokens_itself() -> None:
    """The same text, with accepted drafts; a row that is not finite ends only its own sequence."""
    engine = Engine(PickingRuntime(vocab_size=VOCAB, fail_on_token=63), EngineConfig(policy=Policy.VERIFY))
    truth = plain(PROMPTS[1], SAMPLED, 6)
    good, bad = Collector(), Collector()
    good_id = engine.submit(flat_request(tuple(PROMPTS[1]), SAMPLED, 6), good)
    engine.submit(flat_request((5, 63), SAMPLED, 6), bad)
    engine.step()
    engine.draft(good_id, 1, [[truth[1], truth[2], (truth[3] + 1) % VOCAB]])
    while engine.has_work:
        engine.step()
    assert good.tokens == truth
    assert good.commits[1].accepted == 2
    assert bad.end is not None and bad.end.error is not None and bad.end.error.code == "model_fault"


def test_common_prefixes_are_computed_once() -> None:
    """The second request with the same prompt runs only the tokens after the last full block."""
    harness, prompt = Harness(block_size=4), list(range(30))
    _, first = harness.submit(prompt, 6)
    harness.run()
    harness.batches.clear()
    _, second = harness.submit(prompt, 6)
    harness.run()
    assert second.tokens == first.tokens == plain(prompt, SAMPLED, 6)
    assert harness.batches[0] == [2]
    assert second.end is not None and second.end.usage.cached_prompt_tokens == 28
    harness.assert_all_returned()


def test_prefix_sharing_can_be_switched_off() -> None:
    """The plain twin computes every prompt in full and gives the same text."""
    harness, prompt = Harness(config=EngineConfig(share_prefixes=False)), list(range(30))
    texts = []
    for _ in range(2):
        harness.batches.clear()
        texts.append(harness.submit(prompt, 6)[1])
        harness.run()
        assert harness.batches[0] == [30]
    assert texts[0].tokens == texts[1].tokens == plain(prompt, SAMPLED, 6)


def test_without_free_blocks_the_youngest_is_preempted_and_nothing_is_lost() -> None:
    """Eight sequences that need three times the cache all end with their exact text."""
    harness = Harness(num_blocks=30, block_size=4)
    collectors = [harness.submit(prompt, 40)[1] for prompt in PROMPTS]
    harness.run()
    assert [c.tokens for c in collectors] == [plain(prompt, SAMPLED, 40) for prompt in PROMPTS]
    assert harness.engine.stats().totals.preempted > 0
    harness.assert_all_returned()


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


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_no_draft_changes_the_text(data: st.DataObject) -> None:
    """Correct, wrong, partial, alternative, stale, repeated, reordered drafts at any time: same tokens, no leak."""
    params = data.draw(st.sampled_from([SamplingParams(), SAMPLED, SamplingParams(temperature=1.2, top_p=0.9, seed=5)]))
    policy = data.draw(st.sampled_from(list(Policy)))
    num_blocks = data.draw(st.sampled_from([22, 128]))
    step_tokens = data.draw(st.sampled_from([3, 16]))
    config = EngineConfig(policy=policy, step_tokens=step_tokens, max_draft=6)
    harness = Harness(config=config, num_blocks=num_blocks)
    truths = [plain(prompt, params, 24) for prompt in PROMPTS[:3]]
    sequences = [harness.submit(prompt, 24, params=params) for prompt in PROMPTS[:3]]
    late: list[tuple[int, int, list[list[int]]]] = []
    for _ in range(1_000):
        for (sequence_id, collector), truth in zip(sequences, truths, strict=True):
            if collector.end is not None:
                continue
            base = data.draw(st.integers(0, len(collector.tokens)))
            kind = data.draw(st.sampled_from(["none", "right", "wrong", "half", "both", "tree", "late"]))
            if kind == "late" and late:
                message = late.pop(data.draw(st.integers(0, len(late) - 1)))
            elif kind in ("none", "late"):
                continue
            else:
                paths = drafts_for(truth, base, kind, data.draw(st.integers(1, 8)))
                if not paths:
                    continue
                message = (sequence_id, base, paths)
                if data.draw(st.booleans()):
                    late.append(message)
            try:
                harness.engine.draft(*message)
            except RequestError as error:
                assert error.code in ("stale_draft", "unknown_session")
        delay = harness.engine.step()
        if delay is None:
            break
        harness.clock.now += delay
    assert [c.tokens for _, c in sequences] == truths
    harness.assert_all_returned()


def test_correct_drafts_save_passes_and_usage_counts_them() -> None:
    """With correct drafts only, 24 tokens take far fewer passes; accepted and rejected add up."""
    harness = Harness(config=EngineConfig(max_draft=4, policy=Policy.VERIFY))
    truth = plain(PROMPTS[1], SAMPLED, 24)
    sequence_id, collector = harness.submit(PROMPTS[1], 24)
    harness.engine.step()
    while collector.end is None:
        base = len(collector.tokens)
        harness.engine.draft(sequence_id, base, [truth[base : base + 8] or [0]])
        harness.engine.step()
    assert collector.tokens == truth
    usage = collector.end.usage
    assert usage.target_passes <= 7
    assert usage.accepted_tokens == 24 - usage.target_passes
    assert usage.completion_tokens == 24


def costly(num_tokens: int) -> float:
    """A step in which a drafted token is never worth its time."""
    return 0.040 * num_tokens**2


@pytest.mark.parametrize("policy", list(Policy))
def test_only_the_verify_policy_verifies_drafts_that_cost_more_than_they_save(policy: Policy) -> None:
    """Also with a request queued for the only place: such drafts would keep it waiting for longer than they save."""
    harness = Harness(config=EngineConfig(max_running=1, policy=policy), step_s=costly)
    harness.engine.calibrate()
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
    harness.assert_all_returned()


def test_a_verify_item_does_not_change_what_a_session_verifies() -> None:
    """A step verifies the item's whole draft and nothing of a session's costly draft."""
    harness = Harness(step_s=costly)
    harness.engine.calibrate()
    truth = plain(PROMPTS[1], SAMPLED, 24)
    session_id, session = harness.submit(PROMPTS[1], 24)
    harness.engine.step()
    item_truth = plain([7], SAMPLED, 5)  # a prompt of one token decodes at once, like a prefix that the server holds
    _, item = harness.submit([7], 5, draft=item_truth[:4], once=True)
    harness.engine.draft(session_id, 1, [truth[1:6]])
    harness.run()
    assert session.tokens == truth and all(commit.proposed == 0 for commit in session.commits)
    assert item.tokens == item_truth
    harness.assert_all_returned()


def test_an_always_wrong_draft_is_soon_not_verified() -> None:
    """After a few rejections the engine verifies no pending draft."""
    harness = Harness()
    harness.engine.calibrate()
    truth = plain(PROMPTS[2], SAMPLED, 80)
    sequence_id, collector = harness.submit(PROMPTS[2], 80)
    while collector.end is None:
        base = len(collector.tokens)
        if base < 80:
            harness.engine.draft(sequence_id, base, [[(t + 1) % VOCAB for t in truth[base : base + 6]]])
        harness.engine.step()
    assert collector.tokens == truth
    assert [c.proposed for c in collector.commits[20:]] == [0] * 60


def test_stop_ids_end_a_sequence_even_inside_accepted_drafts() -> None:
    """Nothing after the stop token is committed, even if correct drafts follow."""
    truth = plain(PROMPTS[3], SAMPLED, 30)
    stop = truth[6]
    expected = truth[: truth.index(stop) + 1]
    harness = Harness(config=EngineConfig(policy=Policy.VERIFY))
    sequence_id, collector = harness.submit(PROMPTS[3], 30, stop_ids=frozenset({stop}))
    harness.engine.step()
    if len(expected) > 1:
        harness.engine.draft(sequence_id, 1, [truth[1:12]])
    harness.run()
    assert collector.tokens == expected
    assert collector.end is not None and collector.end.reason == "stop"
    harness.assert_all_returned()


def test_the_context_ends_a_sequence() -> None:
    """A sequence ends with reason "context" when model or cache is full."""
    harness = Harness(max_positions=32)
    truth = plain(PROMPTS[1], SAMPLED, 32 - len(PROMPTS[1]))
    sequence_id, collector = harness.submit(PROMPTS[1], 1000)
    harness.engine.step()
    harness.engine.draft(sequence_id, 1, [truth[1:] + [0] * 10])
    harness.run()
    assert collector.tokens == truth
    assert collector.end is not None and collector.end.reason == "context"


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
    assert all(c.end is not None and c.end.reason == "cancelled" for c in (c1, c2, c3))
    assert c4.tokens == plain(PROMPTS[2], SAMPLED, 5)
    harness.assert_all_returned()


def test_logits_that_are_not_finite_end_one_sequence_and_spare_the_others() -> None:
    """A model fault is its own request's error."""
    harness = Harness(fail_on_token=63)
    _, bad = harness.submit([5, 6, 63], 10)
    _, good = harness.submit(PROMPTS[1], 3)
    harness.run()
    assert bad.end is not None and bad.end.error is not None and bad.end.error.code == "model_fault"
    assert good.tokens[:1] == plain(PROMPTS[1], SAMPLED, 1)
    harness.assert_all_returned()


def test_a_runtime_that_raises_ends_its_batch_and_not_the_engine() -> None:
    """The next request is served normally."""
    is_broken = [True]

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        if is_broken.pop() if is_broken else False:
            raise RuntimeError("out of memory")

    harness = Harness(on_step=on_step)
    _, bad = harness.submit(PROMPTS[1], 10)
    harness.run()
    assert bad.end is not None and bad.end.error is not None and "out of memory" in str(bad.end.error)
    _, good = harness.submit(PROMPTS[1], 10)
    harness.run()
    assert good.tokens == plain(PROMPTS[1], SAMPLED, 10)
    harness.assert_all_returned()


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
    with pytest.raises(RequestError) as refused:
        harness.submit(prompt)
    assert refused.value.code == code
    _, good = harness.submit(PROMPTS[0], 3)
    harness.run()
    assert good.tokens == plain(PROMPTS[0], SAMPLED, 3)


def test_bad_drafts_are_refused_by_code() -> None:
    """Unknown, ahead, out of range, stale: each has its own code; the text does not change."""
    harness = Harness()
    truth = plain(PROMPTS[0], SAMPLED, 12)
    sequence_id, collector = harness.submit(PROMPTS[0], 12)
    for _ in range(4):
        harness.engine.step()
    cases = [
        (999, 0, [[1]], "unknown_session"),
        (sequence_id, 99, [[1]], "draft_ahead"),
        (sequence_id, 4, [[VOCAB]], "token_out_of_range"),
        (sequence_id, 0, [[(truth[0] + 1) % VOCAB, 1, 2, 3, 4, 5]], "stale_draft"),
        (sequence_id, 0, [truth[:4]], "stale_draft"),
    ]
    for target, base, paths, code in cases:
        with pytest.raises(RequestError) as refused:
            harness.engine.draft(target, base, paths)
        assert refused.value.code == code
    harness.run()
    assert collector.tokens == truth


def test_a_full_queue_is_refused() -> None:
    """Beyond max_queue a request is refused and may be retried."""
    harness = Harness(config=EngineConfig(max_queue=1, max_running=1))
    harness.submit(PROMPTS[0], 50)
    harness.engine.step()
    harness.submit(PROMPTS[1])
    harness.engine.step()
    with pytest.raises(RequestError) as refused:
        harness.submit(PROMPTS[2])
    assert (refused.value.code, refused.value.status) == ("overloaded", 503)


# -- stateless verification ---------------------------------------------------------------------------------------


def verify_all(harness: Harness, prompt: list[int], count: int, guess: Sequence[int]) -> list[int]:
    """Stop-and-wait as an agent does it: four drafts per call, the prefix by its hash after the first."""
    text: list[int] = []
    name: str | None = None
    while len(text) < count:
        draft = list(guess[len(text) : len(text) + 4])
        most = min(len(draft) + 1, count - len(text))
        _, collector = harness.submit([] if name else [*prompt, *text], most, draft=draft, once=True, prefix_hash=name)
        harness.run()
        assert collector.end is not None and collector.end.usage.target_passes == 1
        text += collector.tokens
        name = collector.end.prefix_hash
    return text


@pytest.mark.parametrize("error_every", [1, 3, 1000])
def test_verifying_call_by_call_gives_the_same_text(error_every: int) -> None:
    """Stateless verification with parked prefixes equals the plain loop, whatever share of the drafts is correct."""
    harness, prompt = Harness(), PROMPTS[4]
    truth = plain(prompt, SAMPLED, 30)
    guess = [t if i % error_every else (t + 1) % VOCAB for i, t in enumerate(truth, start=1)]
    assert verify_all(harness, prompt, 30, guess) == truth
    harness.assert_all_returned()


def test_a_parked_prefix_leaves_only_new_tokens_to_run() -> None:
    """The call that continues a parked prefix runs one token and its drafts."""
    harness, prompt = Harness(), PROMPTS[4]
    truth = plain(prompt, SAMPLED, 9)
    _, first = harness.submit(prompt, 5, draft=truth[:4], once=True)
    harness.run()
    assert first.tokens == truth[:5] and first.end is not None
    _, second = harness.submit([], 4, draft=truth[5:8], once=True, prefix_hash=first.end.prefix_hash)
    harness.run()
    assert second.tokens == truth[5:9]
    assert harness.batches[-1] == [4]


def test_an_unknown_prefix_hash_is_a_409() -> None:
    """The error asks for the tokens; using a prefix twice gives the same error."""
    harness = Harness()
    with pytest.raises(RequestError) as refused:
        harness.submit([1], once=True, prefix_hash="0" * 32)
    assert (refused.value.code, refused.value.status) == ("prefix_not_held", 409)


def test_a_refused_item_leaves_its_prefix_parked() -> None:
    """A bad token after a good hash does not release the prefix."""
    harness = Harness()
    _, first = harness.submit(PROMPTS[2], 1, once=True)
    harness.run()
    assert first.end is not None
    with pytest.raises(RequestError, match="token id"):
        harness.submit([VOCAB + 1], once=True, prefix_hash=first.end.prefix_hash)
    harness.engine.step()
    _, again = harness.submit([], 1, once=True, prefix_hash=first.end.prefix_hash)
    harness.run()
    assert [*first.tokens, *again.tokens] == plain(PROMPTS[2], SAMPLED, 2)


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_sequence_that_is_to_be_kept_is_parked_whole(ends: str) -> None:
    """Prompt and text stand behind the hash: what goes on from it runs the new tokens only, and is the whole's text."""
    harness, prompt, more = Harness(), PROMPTS[4], [7, 8, 9]
    truth = plain(prompt, SAMPLED, 9)
    stop_ids = frozenset({truth[-1]}) if ends == "stop" else frozenset[int]()
    _, first = harness.submit(prompt, 9 if ends == "length" else 50, stop_ids=stop_ids, keep=True)
    harness.run()
    assert first.end is not None and first.end.reason == ends and first.end.prefix_hash is not None
    begun = len(harness.batches)
    _, second = harness.submit(more, 6, prefix_hash=first.end.prefix_hash)
    harness.run()
    assert second.tokens == plain([*prompt, *first.tokens, *more], SAMPLED, 6)
    assert harness.batches[begun] == [1 + len(more)]  # the last token of the text was never run
    harness.assert_all_returned()


def test_what_is_cut_or_was_not_asked_for_is_not_parked() -> None:
    """A cancelled sequence, one that fills the context, and one without `keep` leave no parked prefix."""
    harness = Harness(max_positions=40)
    sequence_id, cut = harness.submit(PROMPTS[4], 30, keep=True)
    harness.run_steps(3)
    harness.engine.cancel(sequence_id)
    _, full = harness.submit(PROMPTS[4], 500, keep=True)
    _, silent = harness.submit(PROMPTS[4], 5)
    harness.run()
    ends = [collector.end for collector in (cut, full, silent)]
    assert [end and end.reason for end in ends] == ["cancelled", "context", "length"]
    assert [end and end.prefix_hash for end in ends] == [None] * 3 and harness.engine.stats().parked == 0


@pytest.mark.parametrize("once", [True, False], ids=["verify", "session"])
def test_a_parked_prefix_is_kept_for_a_bounded_time(once: bool) -> None:
    """Then it is not held, and its blocks are free at the next step; a refused request does not renew it."""
    harness = Harness(config=EngineConfig(max_parked_s=60.0))
    _, first = harness.submit(PROMPTS[2], 5, once=once, keep=not once)
    harness.run()
    assert first.end is not None and first.end.prefix_hash is not None
    harness.clock.now += 40.0
    with pytest.raises(RequestError, match="token id"):
        harness.submit([VOCAB + 1], prefix_hash=first.end.prefix_hash)
    harness.engine.step()
    assert harness.engine.stats().parked == 1
    harness.clock.now += 20.0
    with pytest.raises(RequestError, match="not held"):
        harness.submit([1], prefix_hash=first.end.prefix_hash)
    harness.engine.step()
    stats = harness.engine.stats()
    assert (stats.parked, stats.parked_blocks, stats.free_blocks) == (0, 0, stats.num_blocks)


def test_sessions_share_the_limit_of_parked_prefixes() -> None:
    """An owner's oldest gives way, whether a verify call or a session left it; nobody else's hash is taken."""
    harness = Harness(config=EngineConfig(max_parked=3))
    names = []
    for start in range(6):
        _, collector = harness.submit([start] * 9, 1, once=start % 2 == 0, keep=start % 2 == 1, owner=b"a")
        harness.run()
        assert collector.end is not None and collector.end.prefix_hash is not None
        names.append(collector.end.prefix_hash)
    assert harness.engine.stats().parked == 3
    for owner, name in ((b"b", names[-1]), (b"a", names[0])):
        with pytest.raises(RequestError, match="not held"):
            harness.submit([1], prefix_hash=name, owner=owner)
    for name in names[3:]:
        harness.submit([1], 1, prefix_hash=name, owner=b"a")
    harness.run()
    assert harness.engine.stats().parked == 0


def test_parked_prefixes_are_evicted_for_running_sequences() -> None:
    """A cache full of parked prefixes still serves a long request."""
    harness = Harness(num_blocks=16, block_size=4)
    for start in range(6):
        harness.submit([start] * 9, 1, once=True)
        harness.run()
    assert harness.engine.stats().parked > 0
    _, collector = harness.submit(PROMPTS[0], 50)
    harness.run()
    assert collector.tokens == plain(PROMPTS[0], SAMPLED, 50)
    harness.assert_all_returned()


# -- waiting for drafts -------------------------------------------------------------------------------------------


class Device:
    """Answers every commit after `lag_s` with six guesses of what follows, every `error_every`-th of them wrong."""

    def __init__(self, lag_s: float, *, policy: Policy = Policy.AUTO, error_every: int = 3) -> None:
        self.lag_s, self.error_every = lag_s, error_every
        self.due: list[tuple[float, int]] = []
        self.answered = 0
        self.sequence_id = -1
        self.guess: list[int] = []
        self.harness = Harness(config=EngineConfig(policy=policy), on_step=lambda batch: self.deliver())
        self.harness.engine.calibrate()

    def deliver(self) -> None:
        """Delivers the answers due by now, with the times at which they were due."""
        now = self.harness.clock.now
        while self.due and self.due[0][0] <= now:
            self.harness.clock.now, base = self.due.pop(0)
            try:
                self.harness.engine.draft(self.sequence_id, base, [self.guess[base : base + 6] or [0]])
            except RequestError as error:
                assert error.code == "stale_draft"
        self.harness.clock.now = now

    def waited_s(
        self, *, patience_ms: float | None = None, count: int = 60, draft_lag_ms: float | None = None
    ) -> float:
        """Generates `count` tokens, checks them, and returns how long the engine waited for drafts."""
        truth = plain(PROMPTS[2], SAMPLED, count)
        self.guess = [t if i % self.error_every else (t + 1) % VOCAB for i, t in enumerate(truth, start=1)]
        self.sequence_id, collector = self.harness.submit(
            PROMPTS[2], count, patience_ms=patience_ms, lag_ms=draft_lag_ms
        )
        while collector.end is None:
            delay = self.harness.engine.step()
            base = len(collector.tokens)
            if base > self.answered:
                self.answered = base
                self.due.append((self.harness.clock.now + self.lag_s, base))
            if delay:
                wakes = [self.harness.clock.now + delay, *(due for due, _ in self.due)]
                self.harness.clock.now = min(wakes)
                self.deliver()
        assert collector.tokens == truth
        return collector.end.usage.waited_s


def test_the_engine_waits_for_a_fast_device_and_not_for_a_slow_one() -> None:
    """With 40 ms steps a device 2 ms away is worth a wait, one 100 ms away is not; patience 0 never waits."""
    assert Device(0.002).waited_s() > 0.01
    assert Device(0.100).waited_s() == 0.0
    assert Device(0.002).waited_s(patience_ms=0.0) == 0.0


def test_with_a_lag_hint_the_engine_waits_from_the_first_token() -> None:
    """The engine waits after the first commits only with the hint; measurements soon outweigh a wrong hint."""
    with_hint, without_hint = Device(0.004), Device(0.004)
    assert with_hint.waited_s(count=6, draft_lag_ms=4.0) > without_hint.waited_s(count=6)
    assert Device(0.100).waited_s(draft_lag_ms=1.0) < 0.03


def test_patience_ms_bounds_the_wait() -> None:
    """A wait longer than the session allows does not begin."""
    assert Device(0.006).waited_s(patience_ms=2.0) == 0.0
    assert Device(0.006).waited_s(patience_ms=50.0) > 0.0


def test_the_verify_policy_waits_longer_than_latency_alone_allows() -> None:
    """When passes are scarce a wait of one step is allowed, and passes per token fall."""
    device = Device(0.030, policy=Policy.VERIFY)
    assert device.waited_s() > 0.05
    assert device.harness.engine.stats().totals.passes < 27
    assert Device(0.030).waited_s() == 0.0


def test_the_engine_soon_stops_waiting_for_a_silent_device() -> None:
    """After a few useless waits the engine goes on without."""
    harness = Harness()
    truth = plain(PROMPTS[2], SAMPLED, 200)
    sequence_id, collector = harness.submit(PROMPTS[2], 200)
    while collector.end is None:
        base = len(collector.tokens)
        if base < 60 and base:
            harness.engine.draft(sequence_id, base, [[truth[base], (truth[base + 1] + 1) % VOCAB]])
        delay = harness.engine.step()
        if delay:
            harness.clock.now += 0.002 if base < 60 else delay
    assert collector.tokens == truth
    assert collector.end.usage.waited_s < 0.5


def test_calibration_measures_the_curve_and_frees_its_blocks() -> None:
    """Afterwards the step time and the cost of a drafted token are known."""
    harness = Harness()
    harness.engine.calibrate(max_tokens=8)
    stats = harness.engine.stats()
    assert stats.step_ms == pytest.approx(41.0)
    assert stats.draft_token_ms == pytest.approx(1.0)
    assert stats.free_blocks == stats.num_blocks
