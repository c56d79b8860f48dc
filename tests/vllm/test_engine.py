"""vLLM's engine behind the seam: kept prefixes, owners, cancellation, a full queue, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import zmq
from tests.engine_harness import Collector
from tests.requests import flat_request
from tests.vllm.serving import FAULTY_TOKEN, SharedEngine
from tests.waiting import wait_until

from outrider.cloud.seam import CommitEvent, Event
from outrider.cloud.vllm.engine import VllmEngine
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = tuple(range(20, 20 + 150))  # more than one of vLLM's blocks


def run(engine: VllmEngine, prompt: Sequence[int], count: int, owner: bytes = b"", keep: bool = False) -> Collector:
    """A whole text."""
    found = Collector()
    engine.submit(flat_request(tuple(prompt), SamplingParams(), count, owner=owner, keep=keep), found)
    found.wait()
    return found


def test_the_cache_is_shared_within_an_owner_only(vllm: SharedEngine) -> None:
    """A prompt that was read before is found by its owner, and by nobody else; the text is the same."""
    ends = [run(vllm.engine, PROMPT, 4, owner).wait() for owner in (b"a", b"b", b"a")]
    cached = [end.usage.cached_prompt_tokens for end in ends]
    assert cached[0] == cached[1] == 0 and cached[2] >= 100
    assert run(vllm.engine, PROMPT, 4, b"b").tokens == vllm.target_tokens(PROMPT, 4)


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
    stats = vllm.engine.stats()
    assert stats.running == stats.queued == 0 and stats.free_blocks == stats.num_blocks and stats.parked == num_kept
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
        with pytest.raises(RequestError, match="send this one again") as refused:
            engine.draft_tree(number, first)
        assert (refused.value.code, refused.value.status) == ("draft_not_taken", 503)
        with pytest.raises(RequestError, match="send this one again"):
            engine.draft(number, 0, [expected[:10]])
    engine.draft_tree(number, first)
    engine.draft_tree(number, second)
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
    for right in (0, 3, 10):
        found = Collector()
        draft = (*truth[:right], FAULTY_TOKEN, 1)
        vllm.engine.submit(flat_request(prompt, SamplingParams(), 30, patience_ms=0.0, draft=draft), found)
        assert found.wait().reason == "length" and found.tokens == truth
    assert run(vllm.engine, (*prompt, *truth[:20]), 10).tokens == truth[20:]


def test_drafts_that_the_commits_contradict_are_dropped(vllm: SharedEngine) -> None:
    """Also below a node of an earlier message: nothing is pending, and the text is the same."""
    gate, found = vllm.gate(), Collector()
    truth = vllm.target_tokens(PROMPT, 40)
    wrong = 7 if truth[0] != 7 else 8
    number = vllm.engine.submit(flat_request(PROMPT, SamplingParams(), 40, patience_ms=0.0), found)
    gate.allow(2)
    wait_until(lambda: bool(found.tokens))
    num_before = vllm.engine.stats().totals.draft_nodes
    vllm.engine.draft(number, 0, [[wrong, *truth[1:5]]])
    vllm.engine.draft_tree(number, TreeDraft(0, 3, [wrong], [ROOT], [15]))
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
    passes: list[tuple[int, int, int]] = []

    def sink(event: Event) -> None:
        found(event)
        if isinstance(event, CommitEvent):
            passes.append((event.base, event.proposed, event.accepted))

    first = 1  # the step of the prompt commits a token, and verifies nothing
    wrong = [7 if token != 7 else 8 for token in truth[first + num_right : first + num_right + 3]]
    tail = truth[first + num_right : first + num_right + 9]
    chain = truth[: first + num_right]
    end = len(chain) - 1
    tokens = [*chain, *wrong, *tail]
    parents = [ROOT, *range(end)]
    parents += [end, *range(len(chain), len(chain) + len(wrong) - 1)]
    parents += [end, *range(len(chain) + len(wrong), len(tokens) - 1)]
    levels = [15] * len(chain) + [14] * len(wrong) + [13] + [15] * (len(tail) - 1)
    number = vllm.engine.submit(flat_request(PROMPT, SamplingParams(), 30, patience_ms=0.0), sink)
    vllm.engine.draft_tree(number, TreeDraft(0, 0, tokens, parents, levels))
    gate.open()
    assert found.wait().reason == "length" and found.tokens == truth
    (_, _, none), (base, proposed, accepted), (then, proposed_then, accepted_then), *_ = passes
    assert (none, base, accepted) == (0, first, num_right) and proposed > num_right
    assert then == first + num_right + 1  # the pick in the place of the wrong token is the alternative's first
    assert accepted_then == proposed_then == len(tail) - 1
