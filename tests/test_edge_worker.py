"""Tests the worker that drives a drafter: when it wakes the sender, what it expands, when it ends."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Sequence

import pytest
from tests.test_edge_drafters import SAMPLED, VOCAB, branched

from outrider.edge.drafting.ahead import DraftAhead
from outrider.edge.drafting.belief import Belief
from outrider.edge.drafting.calibration import LOOKUP_RANK, Guess, model_guesses
from outrider.edge.drafting.depth import DepthController, DraftPlan, FixedDepth
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import CallTimes, Estimates
from outrider.edge.drafting.price import SendPrice
from outrider.edge.drafting.scheduler import DraftScheduler
from outrider.edge.drafting.tree import GuessNode
from outrider.edge.drafting.worker import Drafting, DraftWorker, TreeLimits
from outrider.edge.results import GenerationRequest
from outrider.models.picks.sampling import Candidates


class Driven:
    """A worker whose loop is not asked: what it wakes for is noted in its own thread, and taken as sent."""

    def __init__(
        self,
        drafter: Drafter,
        plan: DraftPlan,
        limits: TreeLimits,
        clock: Callable[[], float] = lambda: 0.0,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:
        estimates = Estimates()
        self.belief = Belief(estimates.calibration.chance)
        self.woken, self._on_wake = list[int](), on_wake
        self.worker = DraftWorker(
            GenerationRequest((1, 2, 3), SAMPLED, 1001),
            Drafting(drafter, DepthController(plan), estimates, limits, DraftScheduler(clock)),
            self.belief,
        )
        self.worker._loop = types.SimpleNamespace(call_soon_threadsafe=self._sent)  # type: ignore[assignment]

    async def run(self) -> None:
        """One run of the draft, to its end."""
        await self.worker.run()
        self.worker.close()

    def _sent(self, _: Callable[[], None]) -> None:
        with self.worker.lock:
            self.woken.append(len(self.belief.tree.likeliest()))
            self.belief.tree.take_unsent(0.0, 1000)
            self.worker._unsent_since = None
        self._on_wake()

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes a commit, as the loop does."""
        with self.worker.lock:
            self.belief.on_commit(len(self.belief.known), tokens)
            self.belief.tree.replant()


class Acting(ModelDrafter):
    """Calls `act` with the branches before each call."""

    def __init__(self, act: Callable[[Sequence[Sequence[int]]], None]) -> None:
        super().__init__(branched(8))
        self._act = act

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        self._act([[*self._text.tokens[3:], *branch] for branch in branches])
        return super().guess(branches, width)


@pytest.mark.parametrize(
    ("token_ms", "answer", "woken_at"),
    [(0.0, 3, [3]), (2.0, 3, [3]), (6.0, 0, [1, 3, 5]), (6.0, 3, [2, 4, 6]), (2.0, 0, [2]), (3.0, 0, [2, 6])],
)
async def test_a_run_sends_its_answer_whole_and_lets_no_guess_wait_long(
    token_ms: float, answer: int, woken_at: list[int]
) -> None:
    """Wakes when the answer is complete, else after 4 ms unless it will soon be complete; then every 10 ms.

    Each call takes `token_ms`, which the first, with the prompt, does not tell. What comes after the last wake is sent
    when the run ends.
    """
    now = [0.0]

    def tick(_: object) -> None:
        now[0] += token_ms / 1e3

    driven = Driven(Acting(tick), DraftPlan(6, answer=answer), TreeLimits(width=1), lambda: round(now[0], 6))
    await driven.run()
    assert driven.worker.num_drafted == driven.belief.tree.num_nodes == 6 and driven.woken == woken_at
    assert not driven.worker.has_work()  # else it would start run after run


class Unsure(NgramDrafter):
    """Four guesses after every branch, each about as likely as the next. Each call takes a millisecond of `now`."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self._now = now

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        self._now[0] += 1e-3
        return [model_guesses(Candidates([11, 12, 13, 14], [0.1] * 4), 4) for _ in branches]


async def test_an_answer_that_does_not_become_whole_is_sent_all_the_same() -> None:
    """Where alternatives are likelier than the path's next token, the path hardly grows; what there is goes out."""
    now, times = [0.0], list[float]()
    plan, limits = DraftPlan(9, answer=5), TreeLimits(width=4, max_nodes=300)
    await Driven(Unsure(now), plan, limits, lambda: round(now[0], 6), lambda: times.append(now[0])).run()
    assert times[0] <= 0.008


async def test_an_answer_to_a_commit_waits_from_its_own_first_guess() -> None:
    """Not from a guess that the commit has removed: then one guess would go out, and the next ones 10 ms later."""
    now = [0.0]

    def tick(texts: Sequence[Sequence[int]]) -> None:
        now[0] += 2e-3
        if now[0] == 4e-3:
            driven.commit([VOCAB - 1])

    driven = Driven(Acting(tick), DraftPlan(6), TreeLimits(width=1), lambda: round(now[0], 6))
    await driven.run()
    assert driven.woken == [2]


async def test_a_run_takes_commits_between_calls() -> None:
    """A commit that contradicts the tree while a call runs: the next call goes on from the committed tokens."""
    calls: list[list[list[int]]] = []

    def act(texts: Sequence[Sequence[int]]) -> None:
        calls.append([list(text) for text in texts])
        if len(calls) == 3:
            driven.commit([VOCAB - 1, VOCAB - 2])
        elif len(calls) == 5:
            driven.commit([driven.belief.tree.likeliest()[0].token])

    driven = Driven(Acting(act), DraftPlan(4), TreeLimits(width=1))
    await driven.run()
    assert list(driven.belief.known[:2]) == [VOCAB - 1, VOCAB - 2] and driven.belief.tree.num_nodes == 4
    assert [len(text) for (text,) in calls] == [0, 1, 2, 2, 3, 4, 5, 6]
    assert all(text[:2] == [VOCAB - 1, VOCAB - 2] for (text,) in calls[3:])


async def test_a_tree_is_expanded_as_wide_as_the_limits_say() -> None:
    """Until it has its most nodes; each call runs several of them."""
    sizes: list[int] = []
    driven = Driven(Acting(lambda texts: sizes.append(len(texts))), DraftPlan(20), TreeLimits(width=4, max_nodes=60))
    await driven.run()
    tree = driven.belief.tree
    assert 60 <= tree.num_nodes <= 60 + 4 * 8 and driven.worker.num_drafted == sum(sizes) and max(sizes) > 1
    assert len(tree.root.children) <= 4 and not driven.worker.has_work()


async def test_the_guesses_of_a_lost_message_are_sent_again() -> None:
    """With the next message and not before, under new numbers, parents first; delivered ones are not."""
    sent: list[list[tuple[GuessNode, int | None]]] = []

    def send(num_known: int, nodes: Sequence[GuessNode], is_turn: bool) -> int:
        sent.append([(node, node.number) for node in nodes])
        return 4 * len(nodes)

    is_free = False
    ahead = DraftAhead(
        GenerationRequest((1, 2, 3), SAMPLED, 50),
        Drafting(ModelDrafter(branched(8)), FixedDepth(3), Estimates(), TreeLimits(width=2), DraftScheduler()),
        SendPrice(),
        send,
        lambda: is_free,
    )
    ahead.pump()
    while ahead._running is not None:
        await asyncio.sleep(0.001)
    is_free = True
    ahead.pump()
    (first,) = sent
    (root, number), *rest = first
    assert number == 0 and len(first) > 4
    below = {root}
    for node, _ in rest:
        below |= {node} if node.parent in below else set()
    ahead.lost([root])
    assert len(sent) == 1
    ahead.pump()
    (again,) = sent[1:]
    assert {node for node, _ in again} == below
    assert [number for _, number in again] == [*range(len(first), len(first) + len(again))]
    arrived = {node for node, _ in first} - below
    for node, _ in again:
        assert node.parent is not None and (node.parent.parent is None or node.parent in arrived)
        arrived.add(node)
    ahead.pump()
    assert len(sent) == 2 and ahead.num_sent == len(first) + len(again)
    ahead.resend()
    ahead.pump()
    assert [number for _, number in sent[2]] == [*range(len(first))]
    ahead.close()


@pytest.mark.parametrize(("node_ms", "fullest"), [(0.0, 4), (20.0, 1)])
async def test_a_call_is_filled_where_further_nodes_cost_nothing(node_ms: float, fullest: int) -> None:
    """The floor is for the first node of a call; the others are priced by what they add to it."""
    now, sizes = [0.0], list[int]()

    def tick(branches: Sequence[Sequence[int]]) -> None:
        sizes.append(len(branches))
        now[0] += (20.0 + node_ms * (len(branches) - 1)) / 1e3

    driven = Driven(Acting(tick), DraftPlan(6, floor=0.2), TreeLimits(), lambda: now[0])
    for size in (1, 4, 8) * 8:
        driven.worker._estimates.on_drafted(20.0 + node_ms * (size - 1), size)
    await driven.run()
    assert max(sizes) == fullest


async def test_lookups_are_tested_where_the_model_ends_and_its_empty_calls_are_not_timed() -> None:
    """Else nothing would be learned of them, and the next text's calls would be expected to take no time."""
    driven = Driven(ModelDrafter(branched(8, max_positions=6)).with_lookup(), DraftPlan(4), TreeLimits())
    driven.commit([1, 2, 3, 1])
    await driven.run()
    outcome = driven.belief.on_commit(4, [2])
    assert [[guess.rank for guess in guesses] for guesses, _ in outcome.tested] == [[LOOKUP_RANK]]
    assert driven.worker.num_drafted == 0 and driven.worker._estimates.draft_ms == CallTimes().ms(1)
