"""vLLM's engine behind the seam: kept prefixes, owners, cancellation, a full queue, and that nothing is left behind.

Owners share its steps evenly, as they share those of the embedded engine (tests/test_engine_fairness.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from tests.engine_harness import Collector, refused
from tests.requests import flat_request
from tests.vllm.serving import FAULTY_TOKEN, SharedEngine, running_engine
from tests.vllm.test_equality import NUM_TOKENS, Text, mixed, nothing, right, run_all, wrong
from tests.waiting import wait_until

from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = tuple(range(20, 20 + 150))  # more than one of vLLM's blocks


def run(engine: VllmEngine, prompt: Sequence[int], count: int, owner: bytes = b"", keep: bool = False) -> Text:
    """A whole text."""
    (found,) = run_all(
        engine, [(flat_request(tuple(prompt), SamplingParams(), count, owner=owner, keep=keep), [], nothing)]
    )
    return found


def test_the_cache_is_shared_within_an_owner_only(vllm: SharedEngine) -> None:
    """A prompt that was read before is found by its owner, and by nobody else; the text is the same."""
    texts = [run(vllm.engine, PROMPT, 4, owner) for owner in (b"a", b"b", b"a")]
    first, others, again = (text.wait().usage.cached_prompt_tokens for text in texts)
    assert first == others == 0 and again >= 100
    assert [text.tokens for text in texts] == [vllm.target_tokens(PROMPT, 4)] * 3


def test_a_cancelled_sequence_ends_wherever_it_is(vllm: SharedEngine) -> None:
    """Before vLLM knows of it, and while it runs, with a reason; nothing stays open or kept, no task is left."""
    gate = vllm.gate()
    early, late = Collector(), Collector()
    request, num_kept = flat_request(PROMPT, SamplingParams(), 3000, keep=True), vllm.engine.stats().parked
    vllm.engine.cancel(vllm.engine.submit(request, early))
    number = vllm.engine.submit(request, late)
    gate.allow(30)
    wait_until(lambda: bool(late.tokens))
    vllm.engine.cancel(number, "stop")
    vllm.engine.cancel(number)
    gate.open()
    assert (early.wait().reason, late.wait().reason) == ("cancelled", "stop")
    assert late.tokens == vllm.target_tokens(PROMPT, len(late.tokens)) and len(late.tokens) < 100
    assert is_at_rest(vllm.engine) and vllm.engine.stats().parked == num_kept
    run(vllm.engine, PROMPT, 1)  # tasks of the first two have ended by now; two are the engine's own
    assert len(vllm.engine._processes._works) <= 3


def test_drafts_that_the_engine_process_cannot_take_are_refused(
    vllm: SharedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device sends such a message again, and what hangs on it is found."""
    gate = vllm.gate()
    engine, expected, found = vllm.engine, vllm.target_tokens(PROMPT, 20), Collector()
    number = engine.submit(flat_request(PROMPT, SamplingParams(), 20, patience_ms=0.0), found)
    first = TreeDraft(0, 0, expected[:5], [ROOT, 0, 1, 2, 3], [15] * 5)
    second = TreeDraft(0, 5, expected[5:10], [4, 5, 6, 7, 8], [15] * 5)
    with zmq.Context() as context, context.socket(zmq.PUSH) as unread, monkeypatch.context() as patch:
        patch.setattr(engine._processes, "_orders", unread)
        with refused("draft_not_taken", 503, "send this one again"):
            engine.draft_tree(number, first)
        with refused("draft_not_taken", 503, "send this one again"):
            engine.draft(number, 0, [expected[:10]])
    for message in (first, second):
        engine.draft_tree(number, message)
    gate.open()
    assert found.wait().usage.target_passes < 20 and found.tokens == expected


def test_a_queue_full_of_long_prompts_refuses_work(vllm: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens, also where they came by a hash; an owner that has none of them is let in."""
    long = tuple(range(1, 250)) * 16
    name = run(vllm.engine, long, 2, b"a", keep=True).wait().prefix_hash
    gauges = vllm.engine._sequences.gauges
    assert gauges.block_size
    monkeypatch.setattr("outrider.cloud.engine.request_checks._MIN_QUEUED_TOKENS", 0)
    monkeypatch.setattr("outrider.cloud.engine.request_checks._CACHES_QUEUED", 1)
    small = msgspec.structs.replace(gauges, num_blocks=1, block_size=3 * len(long))
    vllm.engine._sequences.gauges = small  # until the next report
    monkeypatch.setattr(vllm.engine, "_config", replace(vllm.engine._config, max_running=1))
    gate = vllm.gate()
    sinks = [Collector() for _ in range(4)]
    for sink in sinks[:3]:
        vllm.engine.submit(flat_request((5,), SamplingParams(), 2, owner=b"a", prefix_hash=name), sink)
    with pytest.raises(RequestError, match="queued already"):
        vllm.engine.submit(flat_request((5,), SamplingParams(), 2, owner=b"a"), Collector())
    vllm.engine.submit(flat_request((5,), SamplingParams(), 2, owner=b"b"), sinks[3])
    gate.open()
    assert [sink.wait().reason for sink in sinks] == ["length"] * 4


def test_a_guess_that_is_not_finite_ends_no_sequence(vllm: SharedEngine) -> None:
    """Its step is run again without drafts; the cache of what it touched is used by nobody."""
    prompt = tuple(range(30, 130))
    truth = vllm.target_tokens(prompt, 30)
    for num_right in (0, 3, 10):
        draft = (*truth[:num_right], FAULTY_TOKEN, 1)
        request = flat_request(prompt, SamplingParams(), 30, patience_ms=0.0, draft=draft)
        (found,) = run_all(vllm.engine, [(request, truth, nothing)])
        assert (found.wait().reason, found.tokens) == ("length", truth)
    assert run(vllm.engine, (*prompt, *truth[:20]), 10).tokens == truth[20:]


def test_drafts_that_the_commits_contradict_are_dropped(vllm: SharedEngine) -> None:
    """Also below a node of an earlier message: nothing is pending, and the text is the same."""
    gate, found = vllm.gate(), Collector()
    truth = vllm.target_tokens(PROMPT, 40)
    other = 7 if truth[0] != 7 else 8
    number = vllm.engine.submit(flat_request(PROMPT, SamplingParams(), 40, patience_ms=0.0), found)
    gate.allow(2)
    wait_until(lambda: bool(found.tokens))
    num_before = vllm.engine.stats().totals.draft_nodes
    vllm.engine.draft(number, 0, [[other, *truth[1:5]]])
    vllm.engine.draft_tree(number, TreeDraft(0, 3, [other], [ROOT], [15]))
    vllm.engine.draft_tree(number, TreeDraft(0, 4, [truth[1], truth[2]], [3, 4], [15, 15]))
    gate.open()
    assert found.wait().reason == "length" and found.tokens == truth
    assert vllm.engine.stats().totals.draft_nodes == num_before


@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_alternatives_stay_pending_after_the_chosen_path(vllm: SharedEngine, num_right: int) -> None:
    """A step verifies the likeliest path. Where it fails at once, or after some tokens, the alternative below the last
    token that was accepted is verified next; what was accepted is not verified again.
    """
    gate, found = vllm.gate(), Collector()
    truth = vllm.target_tokens(PROMPT, 30)
    first = 1  # the step of the prompt commits a token, and verifies nothing
    others = [7 if token != 7 else 8 for token in truth[first + num_right : first + num_right + 3]]
    tail = truth[first + num_right : first + num_right + 9]
    chain = truth[: first + num_right]
    end = len(chain) - 1
    tokens = [*chain, *others, *tail]
    after = end + 1 + len(others)
    parents = [ROOT, *range(end), end, *range(end + 1, after - 1), end, *range(after, len(tokens) - 1)]
    levels = [15] * len(chain) + [14] * len(others) + [13] + [15] * (len(tail) - 1)
    number = vllm.engine.submit(flat_request(PROMPT, SamplingParams(), 30, patience_ms=0.0), found)
    vllm.engine.draft_tree(number, TreeDraft(0, 0, tokens, parents, levels))
    gate.open()
    assert found.wait().reason == "length" and found.tokens == truth
    none, one, then, *_ = found.commits
    assert (none.accepted, one.base, one.accepted) == (0, first, num_right) and one.proposed > num_right
    assert then.base == first + num_right + 1  # the pick in the place of the wrong token is the alternative's first
    assert then.accepted == then.proposed == len(tail) - 1


# -- owners share its steps --------------------------------------------------------------------------------------------

ALICE, BOB = b"alice", b"bob"
PLACES = 16
"""Of `tests.vllm.serving.start_engine`; four times as many sequences may have blocks, and a step runs 512 tokens."""


def prompt_of(index: int, length: int = 6) -> list[int]:
    """A prompt that no other index has."""
    return [1 + index % 250, 1 + index // 250, *(1 + (index * 5 + i * i) % 250 for i in range(length - 2))]


def is_at_rest(engine: VllmEngine) -> bool:
    """Whether nothing runs or waits, and every block is free."""
    stats = engine.stats()
    return stats.running == stats.queued == 0 and stats.free_blocks == stats.num_blocks


class Crowd:
    """Texts of a shared vLLM whose steps the test counts."""

    def __init__(self, vllm: SharedEngine) -> None:
        self.engine: VllmEngine = vllm.engine
        self._gate, self._texts = vllm.gate(), list[Text]()

    def submit(self, prompt: Sequence[int], owner: bytes) -> Text:
        """Begins a text that never waits for a draft."""
        request = flat_request(tuple(prompt), SamplingParams(), 1000, patience_ms=0.0, owner=owner)
        self._texts.append(Text(self.engine, [], nothing).submit(request))
        return self._texts[-1]

    def run(self, num_steps: int) -> list[int]:
        """Runs as many steps of the engine; all texts have to be long enough. Returns how many tokens each gained."""
        expected, before = self.engine.stats().totals.steps + num_steps, [len(text.tokens) for text in self._texts]
        self._gate.allow(num_steps)
        wait_until(lambda: self.engine.stats().totals.steps >= expected)
        return [len(text.tokens) - count for text, count in zip(self._texts, before, strict=True)]

    def close(self) -> None:
        """Ends all texts; nothing is left behind."""
        self.engine.end([text.number for text in self._texts], "cancelled")
        self._gate.open()
        wait_until(lambda: not self.engine._sequences)
        assert is_at_rest(self.engine)


def test_places_are_shared_between_owners_and_between_the_sessions_of_one(vllm: SharedEngine) -> None:
    """40 sessions against 2: the two run in every step, the forty take turns; a newcomer begins within three steps."""
    crowd = Crowd(vllm)
    many = [crowd.submit(prompt_of(i), ALICE) for i in range(40)]
    crowd.run(12)
    for i in range(2):
        crowd.submit(prompt_of(60 + i), BOB)
    crowd.run(8)
    *gained, one, other = crowd.run(60)
    assert one == other == 60
    assert max(gained) - min(gained) <= 2 and sum(gained) == (PLACES - 2) * 60
    for owner in (ALICE, BOB):
        newcomer = crowd.submit(prompt_of(90 + len(owner)), owner)
        crowd.run(6)
        assert newcomer.tokens
    assert many[0].tokens == vllm.target_tokens(prompt_of(0), len(many[0].tokens))
    crowd.close()


def test_a_newcomer_gets_the_blocks_of_a_session_that_had_its_turn(vllm: SharedEngine) -> None:
    """All 64 slots are taken by one owner's long texts: another still gets its first token, and no text changes."""
    crowd = Crowd(vllm)
    many = [crowd.submit(prompt_of(i), ALICE) for i in range(4 * PLACES)]
    crowd.run(50)
    preempted = crowd.engine.stats().totals.preempted
    newcomer = crowd.submit(prompt_of(99), BOB)
    crowd.run(4)
    assert newcomer.tokens and crowd.engine.stats().totals.preempted > preempted
    assert min(crowd.run(40)[: len(many)]) > 0 and len(newcomer.tokens) >= 40
    for index in (0, 7, 63):
        assert many[index].tokens == vllm.target_tokens(prompt_of(index), len(many[index].tokens))
    crowd.close()


def test_a_short_prompt_does_not_wait_behind_another_owners_long_ones(vllm: SharedEngine) -> None:
    """Six prompts of 2,000 tokens, of which a step runs 512: the short one's first token comes within three steps. Then
    they have at most one more step's time, until its text has ended.
    """
    crowd = Crowd(vllm)
    long = [crowd.submit(prompt_of(i, 2000), ALICE) for i in range(6)]
    crowd.run(2)
    short = crowd.submit(prompt_of(99, 20), BOB)
    crowd.run(3)
    assert short.tokens and not any(c.tokens for c in long)
    before = crowd.engine.stats().totals.step_tokens
    crowd.run(4)
    assert crowd.engine.stats().totals.step_tokens - before < 4 * 512
    crowd.engine.end([short.number], "cancelled")
    crowd.run(24)
    assert all(c.tokens == vllm.target_tokens(prompt_of(i, 2000), len(c.tokens)) != [] for i, c in enumerate(long))
    crowd.close()


def test_an_item_is_verified_in_one_pass(vllm: SharedEngine) -> None:
    """Its draft runs with the end of its prompt: new, in parts, or cached; also beside running sessions."""
    crowd = Crowd(vllm)
    crowd.submit(prompt_of(1), BOB)
    crowd._gate.open()
    for length in (2, 40, 700, 700):
        prompt = prompt_of(5, length)
        truth = vllm.target_tokens(prompt, 12)
        for draft in (truth[:10], [*truth[:4], 7 if truth[4] != 7 else 8, *truth[5:8]], []):
            request = flat_request(tuple(prompt), SamplingParams(), len(draft) + 1, draft=tuple(draft), once=True)
            (found,) = run_all(crowd.engine, [(request, truth, nothing)])
            expected = next((i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b), len(draft)) + 1
            assert (found.tokens, found.wait().usage.target_passes) == (truth[:expected], 1), (length, len(draft))
    crowd.close()


def test_a_wrong_guess_that_is_not_finite_ends_no_item(vllm: SharedEngine) -> None:
    """Its pass is run again without the draft, which it shares with the prompt."""
    prompt = prompt_of(5, 100)
    truth = vllm.target_tokens(prompt, 12)
    for num_right in (0, 3):
        draft = (*truth[:num_right], FAULTY_TOKEN, 1)
        request = flat_request(tuple(prompt), SamplingParams(), 9, draft=draft, once=True)
        (found,) = run_all(vllm.engine, [(request, truth, nothing)])
        assert (found.code, found.tokens) == (None, truth[: num_right + 1])


def test_a_small_cache_changes_no_text(vllm: SharedEngine) -> None:
    """A cache for three of eight texts, right, wrong and mixed drafts, some wait: sequences give way, and go on."""
    prompts = [prompt_of(index, 120) for index in range(8)]
    truths = [vllm.target_tokens(prompt, NUM_TOKENS) for prompt in prompts]  # before: all texts begin together
    with running_engine(vllm.root, "max_model_len=512", "block_size=32", kv_cache_bytes=700 << 10) as engine:
        asked = []
        for index, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
            hints: dict[str, Any] = {"lag_ms": 5.0} if index < 4 else {"patience_ms": 0.0}
            owner = (ALICE, BOB)[index == 7]
            request = flat_request(tuple(prompt), SamplingParams(), NUM_TOKENS, owner=owner, **hints)
            asked.append((request, truth, (right, wrong, mixed, nothing)[index % 4]))
        assert [(text.tokens, text.code) for text in run_all(engine, asked)] == [(truth, None) for truth in truths]
        totals = engine.stats().totals
        assert is_at_rest(engine) and totals.preempted > 0 and totals.accepted > 0
