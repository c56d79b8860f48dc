"""Tests device and target that wait for each other: stop-and-wait, and turns, for those that share cores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from tests.agents import (
    SURE,
    VOCAB,
    Clock,
    Older,
    Spying,
    asking,
    drafter,
    generate,
    scripted_client,
    slow,
    truth,
    whole,
)
from tests.always_wrong import AlwaysWrongDrafter
from tests.pending_drafts import commit, learn_and_wait, pending
from tests.serving import serve_fake, target_tokens
from tests.waiting import run

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.edge.drafting.ahead import DraftAhead
from outrider.edge.drafting.depth import CostModelDepth, DepthController, DraftPlan, FixedDepth
from outrider.edge.drafting.drafter import Drafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.price import SendPrice
from outrider.edge.drafting.scheduler import DraftScheduler
from outrider.edge.drafting.tree import GuessNode
from outrider.edge.drafting.turns import Turns
from outrider.edge.drafting.worker import Drafting as DeviceDrafting
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.lab.cores import CorePlan, Cores
from outrider.edge.lab.laboratory import connected
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import why_no_turns
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.client.client import VerifierClient
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.protocol import TURNS_SINCE, SessionOpen
from outrider.models.wire.steady import SteadyPace
from outrider.models.wire.tree_draft import TreeDraft
from outrider.models.wire.verify import VerifyAnswer, VerifyResult


def blocks(cloud: str | VerifierClient, request: GenerationRequest, draft: Drafter) -> GenerationResult:
    """One text, eight drafted tokens per block."""
    return run(generate([cloud], request, draft, mode=Mode.STOP_AND_WAIT, depth=FixedDepth(8)))


async def test_the_time_of_a_step_is_learned_from_the_answers() -> None:
    """It was 40 ms for ever. What a call takes beyond its step and its drafted tokens is the round trip."""
    estimates, clock = Estimates(), Clock()

    def verify(request: httpx.Request) -> httpx.Response:
        clock.now += 0.030
        answer = VerifyAnswer(results=[VerifyResult(tokens=[1])], step_ms=8.0, draft_token_ms=0.5)
        return httpx.Response(200, text=answer.model_dump_json())

    async with scripted_client(verify) as client:
        agent = StopAndWaitAgent(Endpoints([client]), None, FixedDepth(0), estimates, clock)
        await agent.generate(GenerationRequest((1, 2), max_tokens=2))
    found = estimates.step_ms, estimates.extra_ms, estimates.round_trip_ms
    assert found == pytest.approx((8.0, 0.5, 22.0))


@pytest.mark.parametrize("step_tokens", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", ["perfect", "good", "wrong", "ngram"])
def test_a_server_with_small_steps_commits_the_same_text(kind: str, step_tokens: int) -> None:
    """A real engine whose step budget is smaller than a block."""
    prompt = (5, 6, 7, 5, 6, 7, 5, 6)
    drafts: dict[str, Drafter] = {
        "perfect": drafter(1.0),
        "good": drafter(0.8),
        "wrong": AlwaysWrongDrafter(drafter(1.0), VOCAB),
        "ngram": NgramDrafter(),
    }
    request = whole(prompt, SamplingParams(), 30)
    with serve_fake(config=EngineConfig(step_tokens=step_tokens)) as server:
        result = blocks(server.url, request, drafts[kind])
    assert result.tokens == tuple(target_tokens(prompt, 30))
    assert kind != "perfect" or result.num_tested == result.num_accepted


def test_a_prompt_that_leaves_no_room_for_its_draft_loses_no_pass() -> None:
    """A prompt of almost a whole step shortens the first block's draft; later blocks are full."""
    prompt = tuple(1 + i % (VOCAB - 1) for i in range(250))
    request = whole(prompt, SamplingParams(), 28)
    with serve_fake(config=EngineConfig(step_tokens=256)) as server:
        result = blocks(server.url, request, drafter(1.0))
    assert result.tokens == tuple(target_tokens(prompt, 28))
    assert result.num_passes == 4  # 7, 9, 9 and the 3 that are left


STEP_S = 0.040


def live(turns: Turns, num_commits: int, ms: Sequence[float], rest_ms: float = 10.0) -> float:
    """Commits of some tokens. ms: of one without and with turns. Returns the share in turns."""
    in_turns = 0
    for index in range(num_commits):
        in_turns += turns.now
        turns.on_commit(1 + index % 7, ms[turns.now], rest_ms, 40.0)
    return in_turns / max(1, num_commits)


def possible() -> Turns:
    """With a server on this machine that waits."""
    turns = Turns()
    turns.obstacle = None
    return turns


@pytest.mark.parametrize("rest_ms", [10.0, 30.0])
def test_the_faster_way_is_found_soon_and_the_other_tried_at_growing_intervals(rest_ms: float) -> None:
    """From either beginning; a machine that changes is noticed."""
    turns = possible()
    assert live(turns, 2, [80.0, 60.0], rest_ms) <= 0.5 and turns.now == (rest_ms < 16.0)
    live(turns, 30, [80.0, 60.0], rest_ms)
    assert live(turns, 600, [80.0, 60.0], rest_ms) > 0.9 and turns.rate(True) > 1.2 * turns.rate(False)
    live(turns, 1000, [50.0, 60.0], rest_ms)
    assert live(turns, 600, [50.0, 60.0], rest_ms) < 0.1


@pytest.mark.parametrize(("together_ms", "num_tried"), [(80.0, 6), (61.0, 10)])
def test_a_trial_that_is_clearly_slower_ends_half_way(together_ms: float, num_tried: int) -> None:
    """With the two commits that still show the way before."""
    turns = possible()
    live(turns, 200, [together_ms, 60.0])
    while turns.now:
        turns.on_commit(4, 60.0, 10.0, 40.0)
    for _ in range(num_tried):
        assert not turns.now
        turns.on_commit(4, together_ms, 10.0, 40.0)
    assert turns.now


def test_turns_are_not_tried_where_they_cannot_be_faster() -> None:
    """A long way: commits come more often than a turn could. Or the server does not wait."""
    far = possible()
    assert live(far, 600, [45.0, 100.0], rest_ms=60.0) == 0.0
    assert live(Turns(), 100, [80.0, 60.0]) == 0.0


SLOW = "drafting and the way take over 0.4 of a step"
NEAR = "drafting and the way take at most 0.4 of a step"


@pytest.mark.parametrize(
    ("num_commits", "ms", "rest_ms", "words"),
    [
        (0, (80.0, 60.0), 10.0, "not measured yet"),
        (18, (80.0, 60.0), 10.0, f"turns first: {NEAR}; both at once not compared yet"),
        (18, (80.0, 60.0), 30.0, f"both at once first: {SLOW}; turns not compared yet"),
        (18, (45.0, 99.0), 60.0, "both at once: commits come in under 0.8 of the time of a turn"),
        (100, (80.0, 60.0), 10.0, "turns, measured faster: 64.5 tokens/s, both at once 44.1"),
        (100, (50.0, 60.0), 10.0, "both at once, measured faster: 78.4 tokens/s, turns 64.0"),
        (100, (60.0, 61.0), 10.0, "turns, as the other was not 3 % faster: 63.8 tokens/s, both at once 65.4"),
    ],
)
def test_which_way_was_chosen_is_said_with_the_reason(
    num_commits: int, ms: Sequence[float], rest_ms: float, words: str
) -> None:
    """The rates are those of both ways. A draft that is shared takes no turns, whatever was measured."""
    turns = possible()
    live(turns, num_commits, ms, rest_ms)
    assert turns.words() == words
    turns.is_shared = True
    assert turns.words() == "no turns: several texts share the draft"


@pytest.mark.parametrize(
    ("fields", "is_fixed", "obstacle"),
    [
        ({}, False, None),
        ({}, True, "the depth is fixed"),
        ({"steady": SteadyPace(every_ms=15.0, up=192, down=192)}, False, "the session is steady"),
        ({"mid": "a"}, False, "the server is a cascade"),
        ({"protocol": TURNS_SINCE - 1}, False, "the server is too old"),
    ],
)
def test_what_stands_in_the_way_of_turns_is_said(fields: dict[str, Any], is_fixed: bool, obstacle: str | None) -> None:
    """Of a server on this machine. Of another nothing is said: nobody expects turns there."""
    turns = Turns()
    assert turns.words() == ""
    turns.obstacle = why_no_turns(SessionOpen(session="a", model="b", **fields), is_fixed=is_fixed)
    assert turns.obstacle == obstacle and turns.words() == (f"no turns: {obstacle}" if obstacle else "not measured yet")


@pytest.mark.parametrize(("is_local", "words"), [(True, "no turns: the depth is fixed"), (False, "")])
def test_a_text_has_the_words_where_its_target_is_on_this_machine(is_local: bool, words: str) -> None:
    """And where it was drafted."""
    with serve_fake() as server:
        client = VerifierClient(server.url)
        client.is_local = is_local
        drafted = run(generate([client], asking(), drafter(), depth=FixedDepth(4)))
        assert drafted.num_drafted and drafted.turns == words
        assert run(generate([server.url], asking(), depth=FixedDepth(0))).turns == ""


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("cores", [None, frozenset({0})])
def test_a_core_each_may_stand_for_two_machines(cores: Cores, is_far: bool) -> None:
    """A bench that emulates round trips measures no turns then, though both have a loopback address."""

    async def found() -> bool:
        async with connected("http://127.0.0.1:1", CorePlan(cores, cores, ""), is_far=is_far) as endpoints:
            return endpoints._clients[0].is_local

    assert run(found()) is (cores is None or not is_far)


def waiting(*, patience_ms: float | None = None) -> tuple[Drafting, PendingDrafts]:
    """A session in turns whose newest commit is the second, at 1 s."""
    drafting = Drafting(8, Policy.AUTO)
    drafting.curve.observe(StepSize(1), STEP_S)
    drafts = pending(drafting)
    drafts.patience_ms = patience_ms
    commit(drafts, 1)
    learn_and_wait(drafting, drafts, [], [1], 0.5)
    drafting.merge_tree(drafts, TreeDraft(1, 0, [2, 3], [-1, 0], [13, 13], is_turn=True), 0.6)
    for token in (2, 3):
        commit(drafts, token)
    learn_and_wait(drafting, drafts, [2, 3], [2, 3], 1.0)
    return drafting, drafts


def test_a_turn_that_does_not_come_is_waited_for_once() -> None:
    """For some steps; then the device must ask again. An empty message ends the wait and the turns at once."""
    drafting, drafts = waiting()
    assert [drafting.is_waiting(drafts, 1.0 + num_steps * STEP_S) for num_steps in (3.9, 4.1)] == [True, False]
    commit(drafts, 4)
    learn_and_wait(drafting, drafts, [], [4], 2.0)
    assert not drafts.in_turns and not drafting.is_waiting(drafts, 2.0)
    drafting, drafts = waiting()
    drafting.merge_tree(drafts, TreeDraft(3, 2, [], [], []), 1.01)
    assert not drafting.is_waiting(drafts, 1.01) and not drafts.in_turns


def test_a_client_cannot_make_the_target_wait_for_nothing() -> None:
    """One that asks each time and answers too late is soon not waited for; nor is one whose patience is 0."""
    drafting, drafts = waiting(patience_ms=0.0)
    assert drafts.in_turns and not drafting.is_waiting(drafts, 1.0)
    drafting, drafts = waiting()
    now, waited = 1.0, 0
    for base in range(4, 40):
        waited += drafting.is_waiting(drafts, now)
        assert not drafting.is_waiting(drafts, now + 10 * STEP_S)
        drafting.merge_tree(drafts, TreeDraft(base - 1, base, [9], [-1], [9], is_turn=True), now + 11 * STEP_S)
        commit(drafts, 5)
        now += 1.0
        learn_and_wait(drafting, drafts, [], [5], now)
    assert waited <= 4


class Always(DepthController):
    """Eight tokens ahead, in turns."""

    def __init__(self) -> None:
        super().__init__(DraftPlan(8), DraftPlan(8, in_turns=True))


@pytest.mark.parametrize("agreement", [0.9, 0.0])
def test_a_text_in_turns_is_the_targets(agreement: float) -> None:
    """One message for each commit, with a path; the target waits for it, so none comes late."""
    spy, request = Spying(), asking(seed=5, max_tokens=60)
    with serve_fake(runtime=slow(0.008), config=SURE) as server:
        result = run(generate([server.url], request, drafter(agreement), depth=Always(), wrap=spy.wrap, width=1))
    assert result.tokens == truth(request)
    assert all(tree.is_turn and len(set(tree.parents)) == len(tree.parents) <= 8 for tree in spy.trees)
    assert len({tree.base for tree in spy.trees}) == len(spy.trees) >= result.num_turns
    assert result.num_turns >= 0.5 * result.num_passes  # a machine that hangs for four steps lets some pass by


def test_turns_end_with_the_drafting() -> None:
    """A draft that is found to be useless in turns: the target is told to go on, and the text goes on as usual."""
    spy, request, estimates = Spying(), asking(seed=6, max_tokens=200), Estimates()

    class Here(CostModelDepth):
        """As on one machine."""

        def plan(self, can_take_turns: bool = False) -> DraftPlan:
            estimates.turns._are_on = True
            return super().plan(can_take_turns)

    with serve_fake(runtime=slow(0.008), config=SURE) as server:
        result = run(
            generate([server.url], request, drafter(0.0), depth=Here(estimates), estimates=estimates, wrap=spy.wrap)
        )
    assert result.tokens == truth(request) and 0 < result.num_turns < result.num_passes / 2
    assert any(not tree.is_turn and not tree.tokens for tree in spy.trees)


def test_turns_end_where_another_text_joins_the_draft() -> None:
    """At once, before the answer is whole: the draft may be busy with the other's prompt, and the server waits."""
    joined, sent = threading.Event(), list[tuple[int, bool]]()

    async def scenario() -> None:
        scheduler, estimates = DraftScheduler(), Estimates()
        estimates.turns.obstacle = None

        def hold(_: object) -> None:
            if len(sent) == 1:  # drafts its second turn
                assert joined.wait(30.0)

        def send(num_known: int, nodes: Sequence[GuessNode], is_turn: bool) -> int:
            sent.append((num_known, is_turn))
            return 9

        drafting = DeviceDrafting(drafter(0.9, hold), Always(), estimates, TreeLimits(), scheduler)
        request = GenerationRequest((5, 6, 7), max_tokens=50, stop_ids=frozenset())
        ahead, text = DraftAhead(request, drafting, SendPrice(), send, lambda: True), truth(request)
        for base in (0, 1):
            ahead.on_commit(base, text[base : base + 1], None)
            ahead.pump()
            while base == 0 and not sent:
                await asyncio.sleep(0.001)
        scheduler.enter()
        joined.set()
        while len(sent) < 2:
            await asyncio.sleep(0.001)
        scheduler.leave()
        ahead.close()
        await asyncio.to_thread(scheduler.join)

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
    assert sent[:2] == [(1, True), (2, False)]


async def test_texts_that_share_a_draft_stream_and_measure_no_way() -> None:
    """From when the other joins until it leaves; two commits more still show it."""
    scheduler, estimates = DraftScheduler(), Estimates()
    estimates.on_open(0.1, 40.0, 1.0, no_turns=None)
    drafting = DeviceDrafting(drafter(), CostModelDepth(estimates), estimates, TreeLimits(), scheduler)
    ahead = DraftAhead(asking(max_tokens=99), drafting, SendPrice(), lambda *_: 0, lambda: False)

    def rate_after(num_commits: int, ms: float) -> float:
        for _ in range(num_commits):
            ahead.on_commit(len(ahead.known), [5], ms)
        return estimates.turns.rate(True)

    alone_ms = pytest.approx(1.0 / 60.0)
    assert not ahead.in_turns and rate_after(10, 60.0) == alone_ms and ahead.in_turns
    turn = ahead.plan
    scheduler.enter()
    assert not ahead.in_turns and ahead.width > 1 and ahead.plan.answer > 0
    assert ahead.plan == CostModelDepth(estimates).plan() != turn
    assert rate_after(30, 90.0) == alone_ms and not estimates.turns.rate(False)
    scheduler.leave()
    assert ahead.in_turns and ahead.width == 1 and rate_after(2, 90.0) == alone_ms and rate_after(1, 90.0) < 1.0 / 61.0
    ahead.close()


def test_a_server_from_before_them_is_not_asked_for_turns() -> None:
    """It would refuse the message."""

    spy, request = Spying(), asking(seed=7, max_tokens=40)
    with serve_fake(runtime=slow(0.008), config=SURE) as server:
        before = Older(server.url)
        before.protocol = TURNS_SINCE - 1
        result = run(generate([before], request, drafter(), depth=Always(), wrap=spy.wrap))
    assert result.tokens == truth(request) and result.num_turns == 0
    assert spy.trees and not any(tree.is_turn for tree in spy.trees)
