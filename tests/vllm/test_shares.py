"""Owners share vLLM's steps evenly, as they share those of the embedded engine (tests/test_engine_fairness.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.engine_harness import Collector
from tests.requests import flat_request
from tests.vllm.serving import FAULTY_TOKEN, SharedEngine, running_engine
from tests.vllm.test_equality import NUM_TOKENS, mixed, nothing, right, run_all, wrong
from tests.waiting import wait_until

from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.picks.sampling import SamplingParams

ALICE, BOB = b"alice", b"bob"
PLACES = 16
"""Of `tests.vllm.serving.start_engine`; four times as many sequences may have blocks, and a step runs 512 tokens."""


def prompt_of(index: int, length: int = 6) -> list[int]:
    """A prompt that no other index has."""
    return [1 + index % 250, 1 + index // 250, *(1 + (index * 5 + i * i) % 250 for i in range(length - 2))]


class Crowd:
    """Texts of a shared vLLM whose steps the test counts."""

    def __init__(self, vllm: SharedEngine) -> None:
        self.engine: VllmEngine = vllm.engine
        self._gate = vllm.gate()
        self._ids: list[int] = []

    def submit(self, prompt: Sequence[int], count: int, owner: bytes) -> Collector:
        """Begins a text that never waits for a draft."""
        sink = Collector()
        request = flat_request(tuple(prompt), SamplingParams(), count, patience_ms=0.0, owner=owner)
        self._ids.append(self.engine.submit(request, sink))
        return sink

    def run(self, num_steps: int) -> None:
        """Runs as many steps of the engine; all texts have to be long enough."""
        expected = self.engine.stats().totals.steps + num_steps
        self._gate.allow(num_steps)
        wait_until(lambda: self.engine.stats().totals.steps >= expected)

    def close(self) -> None:
        """Ends all texts; nothing is left behind."""
        self.engine.end(self._ids, "cancelled")
        self._gate.open()
        wait_until(lambda: not self.engine._sequences)
        stats = self.engine.stats()
        assert stats.running == stats.queued == 0 and stats.free_blocks == stats.num_blocks


def test_places_are_shared_between_owners_and_between_the_sessions_of_one(vllm: SharedEngine) -> None:
    """40 sessions against 2: the two run in every step, the forty take turns; a newcomer begins within three steps."""
    crowd = Crowd(vllm)
    many = [crowd.submit(prompt_of(i), 1000, ALICE) for i in range(40)]
    crowd.run(12)
    few = [crowd.submit(prompt_of(60 + i), 1000, BOB) for i in range(2)]
    crowd.run(8)
    before_few, before = [len(c.tokens) for c in few], [len(c.tokens) for c in many]
    crowd.run(60)
    assert [len(c.tokens) - b for c, b in zip(few, before_few, strict=True)] == [60, 60]
    gained = [len(c.tokens) - b for c, b in zip(many, before, strict=True)]
    assert max(gained) - min(gained) <= 2 and sum(gained) == (PLACES - 2) * 60
    for owner in (ALICE, BOB):
        newcomer = crowd.submit(prompt_of(90 + len(owner)), 1000, owner)
        crowd.run(6)
        assert newcomer.tokens
    assert many[0].tokens == vllm.target_tokens(prompt_of(0), len(many[0].tokens))
    crowd.close()


def test_a_newcomer_gets_the_blocks_of_a_session_that_had_its_turn(vllm: SharedEngine) -> None:
    """All 64 slots are taken by one owner's long texts: another still gets its first token, and no text changes."""
    crowd = Crowd(vllm)
    many = [crowd.submit(prompt_of(i), 1000, ALICE) for i in range(4 * PLACES)]
    crowd.run(50)
    preempted = crowd.engine.stats().totals.preempted
    newcomer = crowd.submit(prompt_of(99), 1000, BOB)
    crowd.run(4)
    assert newcomer.tokens and crowd.engine.stats().totals.preempted > preempted
    before = [len(c.tokens) for c in many]
    crowd.run(40)
    gained = [len(c.tokens) - b for c, b in zip(many, before, strict=True)]
    assert len(newcomer.tokens) >= 40 and min(gained) > 0
    for index in (0, 7, 63):
        assert many[index].tokens == vllm.target_tokens(prompt_of(index), len(many[index].tokens))
    crowd.close()


def test_a_short_prompt_does_not_wait_behind_another_owners_long_ones(vllm: SharedEngine) -> None:
    """Six prompts of 2,000 tokens, of which a step runs 512: the short one's first token comes within three steps. Then
    they have at most one more step's time, until its text has ended.
    """
    crowd = Crowd(vllm)
    long = [crowd.submit(prompt_of(i, 2000), 1000, ALICE) for i in range(6)]
    crowd.run(2)
    short = crowd.submit(prompt_of(99, 20), 1000, BOB)
    crowd.run(3)
    assert short.tokens and not any(c.tokens for c in long)
    before = crowd.engine.stats().totals.step_tokens
    crowd.run(4)
    assert crowd.engine.stats().totals.step_tokens - before < 4 * 512
    crowd.engine.end([crowd._ids[-1]], "cancelled")
    crowd.run(24)
    assert all(c.tokens == vllm.target_tokens(prompt_of(i, 2000), len(c.tokens)) for i, c in enumerate(long))
    assert all(c.tokens for c in long)
    crowd.close()


def test_an_item_is_verified_in_one_pass(vllm: SharedEngine) -> None:
    """Its draft runs with the end of its prompt: new, in parts, or cached; also beside running sessions."""
    crowd = Crowd(vllm)
    crowd.submit(prompt_of(1), 1000, BOB)
    crowd._gate.open()
    for length in (2, 40, 700, 700):
        prompt = prompt_of(5, length)
        truth = vllm.target_tokens(prompt, 12)
        for draft in (truth[:10], [*truth[:4], 7 if truth[4] != 7 else 8, *truth[5:8]], []):
            found = Collector()
            request = flat_request(tuple(prompt), SamplingParams(), len(draft) + 1, draft=tuple(draft), once=True)
            crowd.engine.submit(request, found)
            usage = found.wait().usage
            expected = next((i for i, (a, b) in enumerate(zip(draft, truth, strict=False)) if a != b), len(draft)) + 1
            assert found.tokens == truth[:expected]
            assert usage.target_passes == 1, (length, len(draft))
    crowd.close()


def test_a_wrong_guess_that_is_not_finite_ends_no_item(vllm: SharedEngine) -> None:
    """Its pass is run again without the draft, which it shares with the prompt."""
    prompt = prompt_of(5, 100)
    truth = vllm.target_tokens(prompt, 12)
    for num_right in (0, 3):
        found, draft = Collector(), (*truth[:num_right], FAULTY_TOKEN, 1)
        vllm.engine.submit(flat_request(tuple(prompt), SamplingParams(), 9, draft=draft, once=True), found)
        assert found.wait().error is None and found.tokens == truth[: num_right + 1]


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
        texts = run_all(engine, asked)
        assert [text.tokens for text in texts] == truths
        assert not any(text.end.error for text in texts if text.end)
        stats = engine.stats()
        assert stats.totals.preempted > 0 and stats.totals.accepted > 0
        assert stats.running == stats.queued == 0 and stats.free_blocks == stats.num_blocks
