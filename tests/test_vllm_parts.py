"""Tests what the vLLM engine consists of besides vLLM: options, kept ids, checks, and its engine process's book."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine_harness import Clock
from tests.requests import flat_request

from outrider.cloud.distributions import Distributions
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize
from outrider.cloud.pending.policy import Policy, Wait
from outrider.cloud.pending.trie import DraftTrie
from outrider.cloud.seam import DraftHints
from outrider.cloud.vllm.book import Book, Served, seconds_to_wait
from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.models.picks.sampling import MAX_SEED, SamplingParams
from outrider.models.wire.tree_draft import ROOT, TreeDraft

SAMPLED = SamplingParams(0.8, 40, 0.9, 0.05, MAX_SEED)


# -- the book --------------------------------------------------------------------------------------------------------


def book(**changes: Any) -> tuple[Book, Clock]:
    settings: dict[str, Any] = {"max_draft": 4, "policy": Policy.VERIFY, "looks_up": False}
    return Book(clock=(clock := Clock()), **(settings | changes)), clock


def verified(on: Book, served: Served) -> list[int]:
    """What the next step verifies of one sequence."""
    return on.choose([served], 64, StepSize(1, 3), 3.0)[served]


def timed(on: Book, *steps: tuple[int, float]) -> None:
    """Steps of so many tokens and seconds."""
    for size, seconds in steps:
        on.stepped(StepSize(size, 3 * size), seconds, 0.0)
    on.learn()


def commit(on: Book, served: Served, *tokens: int) -> tuple[int, int, int]:
    """Books a pass, and learns from it while the next one runs; base, accepted, proposed."""
    served.proposed = verified(on, served)
    done = on.committed(served, list(tokens), False)
    on.learn()
    return done.base, done.accepted, done.proposed


def test_terms_survive_the_way_through_vllm() -> None:
    """As plain types; requests of others have none."""
    terms = Terms(7, SAMPLED, 20, DraftHints((1, 2), patience_ms=5.0, lag_ms=3.0), True, None)
    assert terms_of(json.loads(json.dumps(terms.extra_args()))) == terms
    assert terms_of(None) is None and terms_of({}) is None


def test_drafts_become_a_path_and_alternatives_stay() -> None:
    """The likeliest path is verified; after a commit that took the other branch, that branch is."""
    on, clock = book()
    served = on.open(Terms(1, SAMPLED, 20), [9, 9, 9])
    on.take_tree(1, TreeDraft(0, 0, [5, 6, 7, 8], [ROOT, 0, 0, 2], [15, 15, 13, 15]), clock.now)
    assert verified(on, served) == [5, 6]
    assert commit(on, served, 5, 7) == (0, 1, 2)
    assert verified(on, served) == [8] and served.tokens == [9, 9, 9, 5, 7]
    assert (served.usage.accepted_tokens, served.usage.rejected_tokens, served.usage.target_passes) == (1, 1, 1)
    on.take_paths(1, 2, [[1, 2, 3, 4, 5, 6]], clock.now)
    assert verified(on, served) == [1, 2, 3, 4]  # max_draft
    on.close(served)
    assert (on.totals.finished, on.totals.committed) == (1, 2)


def test_the_book_counts_what_metrics_show() -> None:
    """Queue time, prompts, cache hits, acceptance by position and steps; nothing of probes. It crosses as numbers."""
    on, clock = book()
    served = on.open(Terms(1, SAMPLED, 20), [9, 9, 9])
    probe = on.open(Terms(2, SAMPLED, 20, probe=3), [1, 2, 3])
    clock.now += 0.5
    for each in (served, served, probe):  # the second time after it gave way
        on.left_queue(each, 2)
    on.take_paths(1, 0, [[5, 6, 7]], clock.now)
    assert verified(on, served) == [5, 6, 7]
    commit(on, served, 5, 8)
    on.stepped(StepSize(4, 10), 0.02, 0.001, num_sequences=1)
    on.stepped(StepSize(4, 10), 0.02, 0.001, is_probe=True)
    found, totals, shown = on.drafting.distributions, on.totals, Distributions()
    assert (totals.prompt_tokens, totals.prefix_queried_tokens, totals.prefix_hit_tokens) == (3, 6, 4)
    assert (totals.proposed, totals.accepted, totals.tested, totals.wasted, totals.draft_nodes) == (3, 1, 2, 2, 3)
    assert found.accepted_by_position[:2] == [1, 0] and found.tested_by_position[:3] == [1, 1, 0]
    assert (found.queue_s.count, found.step_s.count) == (1, 1)
    assert (found.queue_s.total, found.step_s.total) == pytest.approx((0.5, 0.021))
    shown.load(found.numbers())
    assert shown.numbers() == found.numbers()


def test_a_draft_may_come_before_its_sequence() -> None:
    """It is kept, within a bound that drops the oldest."""
    on, clock = book()
    for number in range(2000):
        on.take_paths(number, 0, [[5, 6]], clock.now)
    early, dropped = (on.open(Terms(number, SAMPLED, 20), [9]) for number in (1999, 3))
    assert (verified(on, early), verified(on, dropped)) == ([5, 6], [])
    # V2 pads a request with tokens of its own: where one is accepted no counter goes below zero.
    assert commit(on, dropped, 0, 7) == (0, 1, 1) and dropped.usage.rejected_tokens == 0


@pytest.mark.parametrize(
    ("passes", "is_answered"),
    [
        ([[1], [2, 3, 4]], [False, True]),
        ([[1, 2, 9]], [True]),
        ([[9]], [True]),
        ([[1, 2], [3], [4]], [False, False, True]),
    ],
)
def test_an_item_has_its_answer_after_its_draft(passes: list[list[int]], is_answered: list[bool]) -> None:
    """With the first token that was not drafted, or the one after the draft, in however many passes."""
    on, _ = book()
    served = on.open(Terms(1, SAMPLED, 20, hints=DraftHints((1, 2, 3)), once=True), [9])
    assert verified(on, served) == [1, 2, 3]
    for tokens, expected in zip(passes, is_answered, strict=True):
        commit(on, served, *tokens)
        assert served.is_answered == expected


def test_a_probe_verifies_what_it_is_told_and_teaches_nothing_else() -> None:
    """The step curve learns; totals and acceptance do not."""
    on, _ = book(max_draft=8)
    served = on.open(Terms(1, SamplingParams(), 5, probe=3), [9])
    assert verified(on, served) == [0, 0, 0]
    commit(on, served, 4)
    on.stepped(StepSize(4, 10), 0.02, 0.001, is_probe=True)
    on.learn()
    on.close(served)
    assert on.totals.steps == on.totals.finished == on.totals.passes == 0
    assert on.drafting.curve.is_known and verified(on, on.open(Terms(2, SAMPLED, 5, probe=0), [9])) == []


def test_a_sequence_sits_out_until_its_draft_is_here() -> None:
    """The policy's wait, with a device that answers at once; the wait ends with the draft, or when it is late."""
    on, clock = book()
    timed(on, (1, 0.050), (4, 0.052))
    served = on.open(Terms(1, SAMPLED, 50, DraftHints(lag_ms=5.0)), [9, 9])
    commit(on, served, 1)
    assert on.waiting([served], clock.now, 1) == {served}
    assert 0.0 < seconds_to_wait([served], clock.now) < 0.1 and on.patience_ms() > 0.0
    on.take_paths(1, 1, [[2, 3, 4, 5]], clock.now)
    assert on.waiting([served], clock.now, 1) == set() and verified(on, served) == [2, 3, 4, 5]
    commit(on, served, 7)
    clock.now += 1.0
    assert on.waiting([served], clock.now, 1) == set()
    waited_s = served.usage.waited_s
    assert on.drafting.distributions.wait_s.total == pytest.approx(waited_s) and waited_s > 0.9


@pytest.mark.parametrize(
    ("once", "keep", "ends"),
    [(True, False, {"once", "length"}), (False, True, {"stop", "length"}), (False, False, set())],
)
def test_what_continues_a_sequence_is_kept_after_these_ends(once: bool, keep: bool, ends: set[str]) -> None:
    """The same for both engines."""
    request = flat_request((1,), SAMPLED, 1, once=once, keep=keep)
    every = ("stop", "length", "context", "once", "cancelled", "shutdown", "error")
    assert {reason for reason in every if request.is_parked_after(reason)} == ends  # type: ignore[arg-type]


# -- nothing that a client sends may end the engine process ----------------------------------------------------------

BAD = 13
"""A token that makes the code which is patched raise."""


def with_text(on: Book, number: int, *draft: int) -> Served:
    return on.open(Terms(number, SAMPLED, 20, DraftHints(draft)), [9, 9])


def failing(patch: pytest.MonkeyPatch, kind: type, name: str, is_bad: Callable[[Any], bool], words: str = "") -> None:
    """Makes a method raise where its first argument is bad."""
    right = getattr(kind, name)

    def faulty(self: Any, first: Any, *more: Any, **named: Any) -> Any:
        if is_bad(first):
            raise ZeroDivisionError(f"{words} {first}")
        return right(self, first, *more, **named)

    patch.setattr(kind, name, faulty)


@pytest.mark.parametrize("once", [False, True])
def test_drafts_that_cannot_be_merged_are_dropped(
    once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, with and after the request; each sequence logs once, without its tokens, and goes on without drafts."""
    failing(monkeypatch, DraftTrie, "merge", lambda path: BAD in path, "quotes")
    on, clock = book()
    on.take_paths(1, 0, [[BAD]], clock.now)
    early, at_once, late = with_text(on, 1), with_text(on, 2, BAD), on.open(Terms(3, SAMPLED, 20, once=once), [9])
    on.take_paths(3, 0, [[BAD]], clock.now)
    fine = with_text(on, 4, 5, 6)
    for _ in range(20):
        on.take_paths(1, 0, [[BAD]], clock.now)
        on.take_tree(3, TreeDraft(0, 0, [5], [ROOT], [15]), clock.now)
    everyone = [early, at_once, late, fine]
    assert on.waiting(everyone, clock.now, 4) == set()
    assert on.choose(everyone, 64, StepSize(4, 8), 2.0) == {early: [], at_once: [], late: [], fine: [5, 6]}
    assert commit(on, late, 7) == (0, 0, 0) and late.tokens[-1] == 7 and late.usage.target_passes == 1
    assert on.totals.faults == 3 and len(caplog.records) == 3 and f"quotes [{BAD}" not in caplog.text


def test_a_sequence_that_the_policy_cannot_handle_loses_its_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sequences beside it keep theirs; where none is to blame alone, a step goes on without drafts."""
    on, clock = book()
    bad, fine = with_text(on, 1, 5, 6), with_text(on, 2, 5, 6)
    blame = [bad.drafts]
    with monkeypatch.context() as patch:
        failing(patch, Drafting, "choose", lambda decoding: any(drafts in blame for drafts in decoding))
        assert on.choose([bad, fine], 64, StepSize(2, 4), 2.0) == {bad: [], fine: [5, 6]} and on.totals.faults == 1
    with monkeypatch.context() as patch:
        failing(patch, Drafting, "choose", lambda decoding: len(decoding) > 1)
        for _ in range(3):
            assert on.choose([bad, fine], 64, StepSize(2, 4), 2.0) == {bad: [], fine: []}
    assert not fine.is_muted and on.totals.faults == 4 and len(caplog.records) == 2
    failing(monkeypatch, Drafting, "is_waiting", lambda drafts: drafts in blame)
    waits = with_text(on, 3, 5, 6)
    for drafts in (waits.drafts, fine.drafts):
        drafts.wait, drafts.wait_nodes, drafts.wait_deadline = Wait(3, 1.0), 2, clock.now + 1.0
    blame.append(waits.drafts)
    assert on.waiting([fine, waits], clock.now, 2) == {fine} and waits.is_muted
    with monkeypatch.context() as patch:
        failing(patch, AcceptanceEstimator, "observe", lambda what: True)
        assert commit(on, fine, 5, 6, 7) == (0, 2, 2) and fine.is_muted and fine.tokens == [9, 9, 5, 6, 7]
    assert commit(on, fine, 8) == (3, 0, 0)
    on.close(fine)
    assert with_text(on, 4, 5).drafts.trie.num_nodes == 1


def test_an_item_takes_no_more_of_a_step_than_it_verifies() -> None:
    """The budget is shared by what runs, not by what waits for a later pass."""
    on, _ = book(max_draft=4)
    hints = DraftHints(tuple(range(1, 40)))
    everyone = [on.open(Terms(n, SAMPLED, 60, hints=hints, once=True), [9]) for n in range(1, 4)]
    everyone.append(on.open(Terms(4, SAMPLED, 60, DraftHints((1, 2, 3, 4))), [9]))
    assert [len(tokens) for tokens in on.choose(everyone, 16, StepSize(4, 8), 2.0).values()] == [4, 4, 4, 4]


def test_drafts_of_sequences_that_are_over_are_not_kept() -> None:
    """Nor those of a sequence that never comes."""
    on, clock = book()
    on.close(with_text(on, 1))
    for _ in range(500):
        on.take_paths(1, 0, [[5]], clock.now)
    assert on._num_early == len(on._early) == 0
    for number in (7, 7, 8):
        on.take_paths(number, 0, [[5]], clock.now)
    for token, num_early in ((5, 4), (6, 2)):
        clock.now += 30.0
        on.take_paths(9, 0, [[token]], clock.now)
        assert on._num_early == num_early
    assert list(on._early) == [9]
