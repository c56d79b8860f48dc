"""Tests the engine's caches: each owner's own, prefixes that are kept between requests, sequences that are rewound."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain, prompt_of, refused
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.engine.pool import BlockPool, chain_hash
from outrider.cloud.engine.thread import EngineThread
from outrider.models.errors import RequestError
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.wire.tree_draft import ROOT, TreeDraft

ALICE, BOB = b"alice", b"bob"


@pytest.mark.parametrize(
    ("config", "of_alice", "of_bob"),
    [
        ({}, [0, 28], [0, 28]),
        ({"share_between_owners": True}, [0, 28], [28, 28]),
        ({"share_prefixes": False}, [0, 0], [0, 0]),
    ],
)
def test_cached_prompts_are_the_owners_own(config: dict[str, Any], of_alice: list[int], of_bob: list[int]) -> None:
    """Neither usage nor a shorter prefill shows what another owner has sent, unless the operator shares caches."""
    harness, prompt = Harness(config=EngineConfig(**config)), list(range(30))

    def cached(owner: bytes) -> int:
        harness.batches.clear()
        collector = harness.finished(prompt, 3, owner=owner)
        num_cached = collector.ended.usage.cached_prompt_tokens
        assert collector.tokens == plain(prompt, SAMPLED, 3) and harness.batches[0] == [30 - num_cached]
        return num_cached

    assert [cached(owner) for owner in (ALICE, ALICE, BOB, BOB)] == of_alice + of_bob


def test_a_parked_prefix_is_its_owners_and_its_name_cannot_be_computed() -> None:
    """Another owner that knows the text or even the name gets 409, and the owner's own call still finds its prefix.

    Also after one of its own that is refused for a bad token.
    """
    harness = Harness()
    prompt = prompt_of(3)
    name = harness.parked(prompt, ALICE)
    assert harness.parked(prompt, BOB) != name
    assert Harness().parked(prompt, ALICE) != name  # another server
    with refused("prefix_not_held", 409):
        harness.submit([], 1, once=True, prefix_hash=name, owner=BOB)
    with pytest.raises(RequestError, match="token id"):
        harness.submit([VOCAB + 1], once=True, prefix_hash=name, owner=ALICE)
    harness.engine.step()
    assert harness.finished([], 1, once=True, prefix_hash=name, owner=ALICE).tokens == plain(prompt, SAMPLED, 2)[1:]


def test_as_many_prefixes_are_held_as_one_call_can_have() -> None:
    """256 items leave 256 prefixes, and another owner's do not push them out."""
    harness = Harness(num_blocks=4096)
    names = [harness.parked(prompt_of(i), ALICE) for i in range(256)]
    for i in range(300):
        harness.parked(prompt_of(i), BOB)
    assert harness.engine.stats().parked == 2 * 256
    for name in names:
        harness.submit([], 1, once=True, prefix_hash=name, owner=ALICE)
    harness.run()


def test_a_sequence_that_gave_way_does_not_count_its_own_blocks_as_cached() -> None:
    """Two prompts that share nothing take turns in a small cache: nothing of them was cached when they came."""
    harness = Harness(num_blocks=20)
    texts = [harness.submit(prompt_of(i, 30), 40)[1] for i in range(2)]
    harness.run()
    totals = harness.engine.stats().totals
    assert totals.preempted > 0 and totals.prefix_hit_tokens == 0
    assert [c.ended.usage.cached_prompt_tokens for c in texts] == [0, 0]


# -- stateless verification, and prefixes that are kept ----------------------------------------------------------------
PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(3 + 5 * i)] for i in range(8)]


@pytest.mark.parametrize("ends", ["length", "stop", "verify"])
def test_a_sequence_that_is_to_be_kept_is_parked_whole(ends: str) -> None:
    """Prompt and text stand behind the hash, also a verify pass': what goes on from it runs the new tokens only, and is
    the whole's text.
    """
    harness, prompt, more = Harness(), PROMPTS[4], [7, 8, 9]
    truth = plain(prompt, SAMPLED, 9)
    ways: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": 9, "keep": True},
        "stop": {"max_tokens": 50, "keep": True, "stop_ids": frozenset(truth[-1:])},
        "verify": {"max_tokens": 9, "once": True, "draft": truth[:8]},
    }
    first = harness.finished(prompt, **ways[ends])
    assert (first.tokens, first.ended.reason) == (truth, "stop" if ends == "stop" else "length")
    begun = len(harness.batches)
    second = harness.finished(more, 6, prefix_hash=first.ended.prefix_hash)
    assert second.tokens == plain([*prompt, *truth, *more], SAMPLED, 6)
    assert harness.batches[begun] == [1 + len(more)]  # the last token of the text was never run


def test_what_is_cut_or_was_not_asked_for_is_not_parked() -> None:
    """A cancelled sequence, one that fills the context, and one without `keep` leave no parked prefix."""
    harness = Harness(max_positions=40)
    sequence_id, cut = harness.submit(PROMPTS[4], 30, keep=True)
    harness.run_steps(3)
    harness.engine.cancel(sequence_id)
    full, silent = harness.finished(PROMPTS[4], 500, keep=True), harness.finished(PROMPTS[4], 5)
    ends = [(each.ended.reason, each.ended.prefix_hash) for each in (cut, full, silent)]
    assert ends == [("cancelled", None), ("context", None), ("length", None)] and harness.engine.stats().parked == 0


@pytest.mark.parametrize("once", [True, False], ids=["verify", "session"])
def test_a_parked_prefix_is_kept_for_a_bounded_time(once: bool) -> None:
    """Then it is not held, and its blocks are free at the next step; a refused request does not renew it."""
    harness = Harness(config=EngineConfig(max_parked_s=60.0))
    name = harness.finished(PROMPTS[2], 5, once=once, keep=not once).ended.prefix_hash
    for passed_s, token, refusal, num_parked in ((40.0, -1, "token id", 1), (20.0, 1, "not held", 0)):
        harness.clock.now += passed_s
        with pytest.raises(RequestError, match=refusal):
            harness.submit([token], prefix_hash=name)
        harness.engine.step()
        stats = harness.engine.stats()
        assert stats.parked == num_parked
    assert (stats.parked_blocks, stats.free_blocks) == (0, stats.num_blocks)


def test_sessions_share_the_limit_of_parked_prefixes() -> None:
    """An owner's oldest gives way, whether a verify call or a session left it; nobody else's hash is taken."""
    harness = Harness(config=EngineConfig(max_parked=3))
    names = [
        harness.finished([n] * 9, 1, once=n % 2 == 0, keep=n % 2 == 1, owner=ALICE).ended.prefix_hash for n in range(6)
    ]
    assert harness.engine.stats().parked == 3
    for owner, name in ((BOB, names[-1]), (ALICE, names[0])):
        with pytest.raises(RequestError, match="not held"):
            harness.submit([1], prefix_hash=name, owner=owner)
    for name in names[3:]:
        harness.submit([1], 1, prefix_hash=name, owner=ALICE)
    harness.run()
    assert harness.engine.stats().parked == 0


def test_parked_prefixes_are_evicted_for_running_sequences() -> None:
    """A cache full of parked prefixes still serves a long request."""
    harness = Harness(num_blocks=16, block_size=4)
    for start in range(6):
        harness.finished([start] * 9, 1, once=True)
    assert harness.engine.stats().parked > 0
    assert harness.finished(PROMPTS[0], 50).tokens == plain(PROMPTS[0], SAMPLED, 50)


# -- sequences that are rewound go on as ones that had the other tokens from their start -------------------------------
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.mark.parametrize("base", range(0, 14))
@pytest.mark.parametrize("looks_up", [False, True])
def test_the_text_after_a_rewind_is_that_of_the_other_tokens(base: int, looks_up: bool) -> None:
    """Wherever it goes back to: within a block, to a block's edge, into blocks that are shared by hash."""
    harness = Harness(config=EngineConfig(looks_up=looks_up))
    number, before = harness.submit(PROMPT, 40)
    while len(before.tokens) < 14:
        harness.step()
    harness.engine.draft(number, len(before.tokens), [[1, 2, 3]])
    other = [(before.tokens[base] + 1) % VOCAB, 7]
    text = [*before.tokens[:base], *other]
    after = Collector(text)
    assert harness.engine.rewind(number, base, other, after)
    # The old text, whose blocks are shared: the rewind must not have changed them.
    _, twin = harness.submit([*PROMPT, *before.tokens[:13]], 8)
    truth = [*text, *plain([*PROMPT, *text], SAMPLED, 40 - len(text))]
    harness.step()
    harness.engine.draft_tree(number, TreeDraft(len(text), 0, truth[len(text) : len(text) + 3], [ROOT, 0, 1], [15] * 3))
    harness.work_off()
    assert after.tokens == truth and after.end is not None
    assert twin.tokens == plain([*PROMPT, *before.tokens[:13]], SAMPLED, 8)
    stats = harness.engine.stats()
    assert stats.free_blocks == stats.num_blocks


def test_drafts_that_are_sent_behind_a_rewind_are_of_the_text_after_it() -> None:
    """Also where both come while a device runs a step: such drafts are merged then, others not before the rewind."""
    text = [*plain(PROMPT, SAMPLED, 5), 7, 7]
    truth = [*text, *plain([*PROMPT, *text], SAMPLED, 33)]
    after = Collector(text)

    def while_it_runs(batch: Sequence[SequenceSlice]) -> None:
        if len(before.tokens) == 13:
            harness.engine.rewind(number, 5, text[5:], after)
            harness.engine.draft_tree(number, TreeDraft(7, 0, truth[7:10], [ROOT, 0, 1], [15] * 3))

    config = EngineConfig(policy=Policy.VERIFY)
    harness = Harness(kind=PickingRuntime, config=config, step_s=lambda num_tokens: 0.0, on_step=while_it_runs)
    number, before = harness.submit(PROMPT, 40)
    harness.work_off()
    assert after.tokens == truth and after.commits[1].accepted == 2  # the pass before picked the first


def test_a_sequence_that_has_ended_is_not_rewound() -> None:
    """False where it is over; where it ends before its turn comes, the new sink gets an end."""
    assert not EngineThread(FakeBatchRuntime(vocab_size=64)).rewind(1, 0, [1], Collector())
    harness, late = Harness(), Collector()
    number, first = harness.submit(PROMPT, 4)
    harness.engine.cancel(number)
    assert harness.engine.rewind(number, 0, [1], late)
    harness.step()
    assert first.end is not None and late.ended.reason == "cancelled" and not harness.engine.has_work


def test_a_reset_tells_whoever_has_asked_for_a_rewind() -> None:
    """The newest sink hears of the end, whether the rewind has had its turn or not: a cascade goes on from there."""
    harness, done, newest = Harness(), Collector([1]), Collector()
    (number, first), (other, _) = harness.submit(PROMPT, 40), harness.submit([*PROMPT, 2], 40)
    harness.step()
    assert harness.engine.rewind(other, 0, [1], done)
    harness.step()
    for sink in (Collector(), newest):
        assert harness.engine.rewind(number, 0, [1], sink)
    harness.engine.reset(ValueError("a bug"))
    assert newest.code == done.code == "internal_error" and first.end is None
    harness.step()
    assert not harness.engine.rewind(number, 0, [1], Collector()) and not harness.engine.has_work


# -- blocks ------------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_pool_never_hands_out_a_block_twice_and_loses_none(data: st.DataObject) -> None:
    """Random allocation, release, registration and matching: references and availability always add up."""
    pool = BlockPool(12, 4)
    held: list[list[int]] = []
    contents = [chain_hash(b"", [i]) for i in range(6)]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "release", "register", "match"]))
        if action == "allocate":
            count = data.draw(st.integers(1, 5))
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > pool.num_available + (count if blocks else 0))
            if blocks:
                assert not set(blocks) & set(itertools.chain(*held))
                held.append(blocks)
        elif action == "match":
            matched = pool.match(data.draw(st.lists(st.sampled_from(contents), max_size=3)))
            if matched:
                held.append(matched)
        elif held:
            index = data.draw(st.integers(0, len(held) - 1))
            if action == "release":
                pool.release(held.pop(index))
            else:
                pool.register(held[index][0], data.draw(st.sampled_from(contents)))
        assert pool.num_blocks - pool.num_available == len(set(itertools.chain(*held)))
    for blocks in held:
        pool.release(blocks)
    assert pool.num_available == 12 and pool.allocate(12) is not None


def test_pool_evicts_the_least_recently_used_content() -> None:
    """Content stays known until its block is needed; the longest unused goes first."""
    pool = BlockPool(2, 4)
    names = [chain_hash(b"", [i]) for i in range(2)]
    for name in names:
        [block] = pool.allocate(1) or []
        pool.register(block, name)
        pool.release([block])
    pool.release(pool.match([names[0]]))  # now names[1] is the older one
    assert pool.allocate(1) is not None and pool.match([names[1]]) == [] and len(pool.match([names[0]])) == 1
