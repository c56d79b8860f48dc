"""Tests the server's pending trees: merging, chances by level, what is chosen, prompt lookup, whole texts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Harness, plain

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, DraftLag, StepSize
from outrider.cloud.pending.lookup import PromptLookup, kind_of
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.pending_drafts import PendingDrafts, likeliest_path
from outrider.cloud.pending.policy import NO_WAIT, plan_wait, rate_streaming, rate_waiting
from outrider.cloud.pending.selected_drafts import SelectedDrafts
from outrider.cloud.pending.sources import Sources
from outrider.cloud.pending.trie import LEVELS, MAX_NODES, MAX_NUMBERS, MAX_ORPHANS, DraftTrie, PendingNode
from outrider.models.errors import RequestError
from outrider.models.wire.tree_draft import CHANCES, MAX_MESSAGE_NODES, ROOT, TreeDraft

PROMPT = [3, 1, 4, 1, 5]


def pending(drafting: Drafting, num_committed: int = 0, *, max_new: int = 1000) -> PendingDrafts:
    """A session of `drafting`."""
    drafts = PendingDrafts(
        [],
        max_new,
        AcceptanceEstimator(32, drafting.learned(b"").acceptance),
        NodeChances(drafting.learned(b"").chances),
    )
    for _ in range(num_committed):
        drafts.committed.append(0)
        drafts.advance([0])
    return drafts


def paths_in(trie: DraftTrie) -> set[tuple[int, ...]]:
    """The path of every pending node."""
    found: set[tuple[int, ...]] = set()
    stack: list[tuple[tuple[int, ...], PendingNode]] = [((), trie.root)]
    while stack:
        path, parent = stack.pop()
        below = [((*path, child.token), child) for child in (parent.children or {}).values()]
        found.update(longer for longer, _ in below)
        stack += below
    return found


def line_message(base: int, first: int, tokens: Sequence[int], level: int = 13) -> TreeDraft:
    """A path as a tree message."""
    size = len(tokens)
    return TreeDraft(base, first, tokens, [ROOT, *range(first, first + size - 1)], [level] * size)


def commit(drafts: PendingDrafts, *tokens: int) -> int:
    """What the engine does with the tokens of a pass."""
    drafts.committed.extend(tokens)
    return drafts.advance(tokens)


# -- merging -----------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[TreeDraft], list[tuple[int, int]]]:
    """A text, a device's messages about it, and the order in which they arrive: (commits before it, which message).

    The device sends each message at a base; it arrives at that base or later, twice, or never.
    """
    text = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    messages: list[TreeDraft] = []
    number = 0
    for _ in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 4))
        parents = [draw(st.sampled_from([ROOT, *range(number + i)])) if number + i else ROOT for i in range(size)]
        tokens = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        levels = draw(st.lists(st.integers(0, 15), min_size=size, max_size=size))
        messages.append(TreeDraft(draw(st.integers(0, len(text))), number, tokens, parents, levels))
        number += size
    arrivals = [
        (draw(st.integers(messages[index].base, len(text))), index)
        for index in draw(st.lists(st.integers(0, len(messages) - 1), max_size=12))
    ]
    return text, messages, sorted(arrivals, key=lambda arrival: arrival[0])


@given(histories())
@settings(max_examples=100, deadline=None)
def test_lost_repeated_and_reordered_messages_leave_a_subset_of_the_faultless_trie(
    history: tuple[list[int], list[TreeDraft], list[tuple[int, int]]],
) -> None:
    """What is pending: the nodes all of whose ancestors arrived, as far as they go on from the commits."""
    text, messages, arrivals = history
    trie, committed = DraftTrie(), list[int]()
    nodes: dict[int, tuple[int, int, int]] = {}  # of the messages that arrived: base, parent, token
    for now in range(len(text) + 1):
        if now:
            committed.append(text[now - 1])
            trie.advance(text[now - 1])
        for message in (messages[index] for at, index in arrivals if at == now):
            trie.merge_tree(message, committed)
            for i, (token, parent) in enumerate(zip(message.tokens, message.parents, strict=True)):
                nodes[message.first + i] = message.base, parent, token
        paths: dict[int, tuple[int, ...]] = {}
        for number in sorted(nodes):
            base, parent, token = nodes[number]
            if parent == ROOT:
                paths[number] = (*text[:base], token)
            elif parent in paths:
                paths[number] = (*paths[parent], token)
        live = {path[now:] for path in paths.values() if len(path) > now and path[:now] == tuple(committed)}
        assert paths_in(trie) == live
        assert trie.num_nodes == len(live) and trie.num_looked_up == 0
        assert bool(trie) == bool(live) == trie.has_device_nodes
        for number, path in paths.items():
            position = trie.position_of(number)
            is_right = path[:now] == tuple(committed)[: len(path)]
            assert position == len(path) if is_right else position is not None and position < 0


def test_the_likeliest_path_takes_the_highest_level_and_survives_a_commit_of_an_alternative() -> None:
    """A commit of the less likely child keeps what was drafted below it."""
    trie = DraftTrie()
    message = TreeDraft(0, 0, [5, 6, 7, 8], [ROOT, ROOT, 1, 0], [6, 12, 3, 9])
    assert trie.merge_tree(message, []) == 2
    assert trie.likeliest(9) == [6, 7] == likeliest_path(message)
    trie.advance(5)
    assert trie.likeliest(9) == [8] and trie.num_nodes == 1
    trie.merge_tree(TreeDraft(0, 4, [9], [0], [2]), [5])  # below a committed node
    trie.merge_tree(TreeDraft(0, 5, [9], [1], [15]), [5])  # below a dropped one
    assert paths_in(trie) == {(8,), (9,)}


def test_no_client_makes_a_trie_large_deep_or_slow() -> None:
    """Chains, stars, orphans and endless numbers: each is bounded, and what is dropped is not counted."""
    trie, committed = DraftTrie(), list[int]()
    for start in range(0, 4 * MAX_NODES, MAX_MESSAGE_NODES):  # one chain
        parents = [start - 1 if start else ROOT, *range(start, start + MAX_MESSAGE_NODES - 1)]
        trie.merge_tree(TreeDraft(0, start, [1] * MAX_MESSAGE_NODES, parents, [9] * MAX_MESSAGE_NODES), [])
    assert trie.num_nodes == MAX_NODES == len(trie.likeliest(2 * MAX_NODES))
    trie.advance(2)
    committed.append(2)
    assert trie.num_nodes == 0 and not trie
    for start in range(10**6, 10**6 + 2 * MAX_NODES, MAX_MESSAGE_NODES):  # children of the last token
        tokens = range(start, start + MAX_MESSAGE_NODES)
        trie.merge_tree(TreeDraft(1, start, tokens, [ROOT] * MAX_MESSAGE_NODES, [9] * MAX_MESSAGE_NODES), committed)
    assert trie.num_nodes == MAX_NODES
    for start in range(2 * 10**6, 2 * 10**6 + 2048, MAX_MESSAGE_NODES):  # parents that never come
        parents = [5 * 10**6 + i for i in range(MAX_MESSAGE_NODES)]
        trie.merge_tree(TreeDraft(1, start, [1] * MAX_MESSAGE_NODES, parents, [9] * MAX_MESSAGE_NODES), committed)
    assert trie._num_orphans == sum(map(len, trie._orphans.values())) == MAX_ORPHANS
    assert len(trie._numbers) <= MAX_NUMBERS
    trie.advance(10**6)
    trie.merge([7, 8], prefer=True)
    assert trie.num_nodes == 2 and trie.likeliest(9) == [7, 8]


def test_a_tree_takes_over_what_was_looked_up() -> None:
    """An equal node becomes the device's; another of the device's is preferred."""
    trie = DraftTrie()
    trie.merge([1, 2, 3], [0, 1, 2])
    assert not trie.has_device_nodes and trie.likeliest_of_device(9) == []
    trie.merge_tree(TreeDraft(0, 0, [1], [ROOT], [0]), [])
    assert trie.has_device_nodes and (trie.num_nodes, trie.num_looked_up) == (3, 2)
    assert (trie.likeliest(9), trie.likeliest_of_device(9)) == ([1, 2, 3], [1])
    trie.merge_tree(TreeDraft(0, 1, [9], [0], [0]), [])
    assert trie.likeliest(9) == [1, 9]


# -- chances -----------------------------------------------------------------------------------------------------------


def test_levels_are_learned_where_a_device_is_honest_and_where_it_promises_too_much() -> None:
    """Rates approach what happens; kinds that were never tested follow the ratio of hits to promises."""
    rng = random.Random(1)
    for skill in (1.0, 0.5):
        drafts = pending(Drafting(32, Policy.AUTO))
        for base in range(400):
            level = rng.choice([6, 13])
            is_hit = rng.random() < skill * CHANCES[level]
            drafts.trie.merge_tree(TreeDraft(base, base, [1], [ROOT], [level]), drafts.committed)
            commit(drafts, 1 if is_hit else 2)
        rates = drafts.chances.rates()
        assert rates[LEVELS + 13] == pytest.approx(skill * CHANCES[13], abs=0.15)
        assert rates[LEVELS + 6] == pytest.approx(skill * CHANCES[6], abs=0.12)
        assert rates[LEVELS + 11] == pytest.approx(skill * CHANCES[11], abs=0.2)


@pytest.mark.parametrize("width", [1, 4])
def test_a_tree_that_is_always_wrong_is_soon_not_verified(width: int) -> None:
    """About ten tested nodes of the highest level, with a step of 40 ms and 1 ms per drafted token."""
    drafting = Drafting(32, Policy.AUTO, with_trees=True)
    for tokens in (1, 2, 4, 8, 16, 32):
        drafting.curve.observe(StepSize(tokens), 0.040 + 0.001 * tokens)
    drafts, num_tested = pending(drafting), 0
    while True:
        base = len(drafts.committed)
        guesses = [t for t in range(width) for _ in range(3)]
        parents = [ROOT if i % 3 == 0 else 3 * width * base + i - 1 for i in range(3 * width)]
        message = TreeDraft(base, 3 * width * base, guesses, parents, [15] * len(guesses))
        drafting.merge_tree(drafts, message, 0.0)
        if not drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts].tokens:
            break
        num_tested += width
        commit(drafts, 60)
    assert num_tested <= 12
    assert (
        NodeChances(drafting.learned(b"").chances).rates()[LEVELS + 15] > 0.4
    )  # a new session's hints are still believed


def test_earlier_sessions_spoil_no_estimate_of_later_ones() -> None:
    """Whatever a client did a thousand times, a new session of anybody begins within bounds."""
    drafting = Drafting(8, Policy.AUTO)
    for guess in (60, 1):
        for _ in range(1000):
            drafts = pending(drafting)
            drafting.merge_tree(drafts, line_message(0, 0, [1, 2], 15), 0.0)
            likeliest = drafts.trie.likeliest_of_device(8)
            drafting.learned(b"").acceptance.observe(likeliest, [guess, 2])
            commit(drafts, guess)
        fresh = pending(drafting)
        fresh.chances.has_hints = True
        assert 0.3 <= AcceptanceEstimator(8, drafting.learned(b"").acceptance).rate <= 0.9
        assert 0.1 <= fresh.chances.beta <= 0.9
        assert fresh.chances.rates()[LEVELS + 15] > 0.4


def test_false_hints_take_no_room_from_others() -> None:
    """Where a step has room for eight drafted tokens, an honest tree soon gets all of them."""
    drafting = Drafting(8, Policy.VERIFY)
    honest, false = pending(drafting), pending(drafting)
    for base in range(12):
        drafting.merge_tree(honest, line_message(base, 10 * base, range(base, base + 8), 13), 0.0)
        drafting.merge_tree(false, line_message(base, 10 * base, [50] * 8, 15), 0.0)
        chosen = drafting.choose([false, honest], 8, StepSize(2, 0), 0.0)
        commit(honest, base)
        commit(false, 51)
    assert (len(chosen[honest].tokens), len(chosen[false].tokens)) == (8, 0)


# -- what is chosen ----------------------------------------------------------------------------------------------------


def closed_sets(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """All sets of nodes that have the parent of each."""
    every = itertools.chain.from_iterable(
        itertools.combinations(range(len(parents)), n) for n in range(len(parents) + 1)
    )
    return [nodes for nodes in every if all(parents[i] < 0 or parents[i] in nodes for i in nodes)]


def test_what_one_client_shows_no_other_can_tell() -> None:
    """A client's sessions begin with what its own showed; of many clients the latest are remembered."""
    drafting = Drafting(8, Policy.AUTO)
    first = drafting.learned(b"one")
    for _ in range(50):
        AcceptanceEstimator(8, first.acceptance).observe([1], [2])
    fresh = AcceptanceEstimator(8).rate
    assert AcceptanceEstimator(8, drafting.learned(b"one").acceptance).rate < fresh
    assert AcceptanceEstimator(8, drafting.learned(b"two").acceptance).rate == fresh
    for number in range(256):
        drafting.learned(b"%d" % number)
    assert drafting.learned(b"one") is not first


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_chosen_part_of_a_tree_is_the_best_of_all_parts(data: st.DataObject) -> None:
    """Best-first choice equals brute force for any step-time curve that does not fall; parents come first."""
    size = data.draw(st.integers(1, 8))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(size)]
    levels = data.draw(st.lists(st.integers(6, 15), min_size=size, max_size=size))
    budget = data.draw(st.integers(0, 8))
    drafting = Drafting(8, Policy.AUTO, with_trees=True)
    step_s = 0.01
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 10):
        step_s += data.draw(st.sampled_from([0.0, 0.0005, 0.002, 0.006]))
        drafting.curve.observe(StepSize(tokens), step_s)
    drafts = pending(drafting)
    message = TreeDraft(0, 0, range(size), [ROOT if p < 0 else p for p in parents], levels)
    drafting.merge_tree(drafts, message, 0.0)
    chosen = drafting.choose([drafts], budget, StepSize(1, 0), 0.0)[drafts]
    rates = drafts.chances.rates()
    alive: list[float] = []
    for parent, level in zip(parents, levels, strict=True):
        alive.append(rates[LEVELS + level] * (alive[parent] if parent >= 0 else 1.0))
    times = drafting.curve.seconds(1 + size)

    def rate(nodes: Sequence[int]) -> float:
        return float((1.0 + sum(alive[i] for i in nodes)) / times[len(nodes)])

    best = max(rate(nodes) for nodes in closed_sets(parents) if len(nodes) <= budget)
    assert rate(chosen.tokens) == pytest.approx(best)  # a node's token is its index
    assert [chosen.tokens[p] if p >= 0 else -1 for p in chosen.parents] == [parents[i] for i in chosen.tokens]
    assert all(parent < index for index, parent in enumerate(chosen.parents))


def branching(drafting: Drafting, num_sessions: int) -> list[PendingDrafts]:
    """Sessions with the same tree: a likely and an unlikely child of the last token; below the first two again."""
    sessions = [pending(drafting) for _ in range(num_sessions)]
    for drafts in sessions:
        drafting.merge_tree(drafts, TreeDraft(0, 0, [1, 2, 3, 4], [ROOT, ROOT, 0, 0], [13, 6, 13, 6]), 0.0)
    return sessions


def test_under_load_a_tree_shrinks_to_a_line_and_then_to_nothing() -> None:
    """Nothing but the step's time decides: the dearer a token, the less of the tree is verified."""
    found = []
    for extra_s in (0.0001, 0.006, 0.1):
        drafting = Drafting(32, Policy.AUTO, with_trees=True)
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            drafting.curve.observe(StepSize(tokens), 0.010 + extra_s * tokens)
        sessions = branching(drafting, 1)
        found.append(drafting.choose(sessions, 99, StepSize(1, 0), 0.0)[sessions[0]])
    whole, line, nothing = found
    assert whole == SelectedDrafts([1, 3, 2, 4], [-1, 0, -1, 0])
    assert line == SelectedDrafts.line([1, 3])
    assert nothing.tokens == ()


def test_a_tree_is_verified_only_where_its_steps_are_worth_their_time() -> None:
    """Steps with trees that take twice as long are declined, tried again at times, and taken once they are faster."""
    drafting = Drafting(32, Policy.AUTO, with_trees=True)
    for tokens in (1, 2, 4, 8, 16, 32):
        drafting.curve.observe(StepSize(tokens), 0.040)
    sessions = branching(drafting, 1)

    def step(factor: float) -> bool:
        """Whether a step is one with a tree; its time is `factor` of a line's then."""
        chosen = drafting.choose(sessions, 99, StepSize(1, 0), 0.0)[sessions[0]]
        size = StepSize(1 + len(chosen.tokens))
        drafting.stepped(size, 0.040 * (1.0 if chosen.is_line else factor), not chosen.is_line)
        return not chosen.is_line

    assert step(2.0)
    assert 1 <= sum(step(2.0) for _ in range(500)) < 12
    assert drafting.trees.ratio > 1.5
    assert sum(step(1.0) for _ in range(700)) > 100
    assert all(step(1.0) for _ in range(20))
    for _ in range(20_000):
        step(3.0)
    while not step(3.0):
        pass
    assert any(step(1.0) for _ in range(520))  # however long they were slow


def test_trees_keep_their_size_where_no_line_is_run() -> None:
    """Times of lines are forgotten after 256 steps; then trees tell them, and the plain step is still timed."""
    drafting = Drafting(32, Policy.AUTO, with_trees=True)
    for tokens in (1, 2, 4, 8, 16, 32):
        drafting.curve.observe(StepSize(tokens), 0.120)
    sessions, sizes = branching(drafting, 1), list[int]()
    for step in range(1_500):
        chosen = drafting.choose(sessions, 99, StepSize(1, 0), 0.0)[sessions[0]]
        sizes.append(len(chosen.tokens))
        drafting.stepped(StepSize(1 + sizes[-1]), 0.040 + 0.001 * sizes[-1], not chosen.is_line)
        if step < 600:  # else nothing plain is run but what is tried
            drafting.stepped(StepSize(1), 0.040, False)
    assert sizes[300:].count(4) > 0.97 * len(sizes[300:])
    step_s, extra_s = drafting.curve.step_and_extra()
    assert step_s == pytest.approx(0.040, rel=0.05) and extra_s == pytest.approx(0.001, rel=0.5)
    assert drafting.trees.ratio < 1.1


def test_the_line_form_is_the_likeliest_path() -> None:
    """Without trees, siblings stay pending and are not verified."""
    drafting = Drafting(32, Policy.VERIFY)
    sessions = branching(drafting, 2)
    chosen = drafting.choose(sessions, 99, StepSize(2, 0), 0.0)
    assert [chosen[drafts] for drafts in sessions] == [SelectedDrafts.line([1, 3])] * 2


def test_no_more_is_verified_than_may_be_committed() -> None:
    """The last token needs no draft."""
    drafting = Drafting(32, Policy.VERIFY, with_trees=True)
    drafts = pending(drafting, max_new=3)
    drafting.merge_tree(drafts, line_message(0, 0, range(9), 15), 0.0)
    assert drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts] == SelectedDrafts.line([0, 1])


# -- waiting -----------------------------------------------------------------------------------------------------------


class Stream:
    """A target that never waits, or always waits, for a device whose alternatives cover misses; event by event."""

    def __init__(self, alpha: float, beta: float, k: int, lag_s: float, *, waits: bool) -> None:
        self._alpha, self._beta, self._k, self._lag_s, self._waits = alpha, beta, k, lag_s, waits
        self._rng = random.Random(7)

    def _is_pending(self) -> bool:
        """Whether the next pick is the device's own, or an alternative that it has drafted below."""
        return self._rng.random() < self._alpha or self._rng.random() < self._beta

    def tokens_per_s(self, num_tokens: int = 60_000) -> float:
        """With a step of 40 ms, 1 ms per drafted token."""
        now, committed, in_sync_at = 0.0, 0, 0.0
        while committed < num_tokens:
            if now < in_sync_at and not self._waits:  # a blind step: it must be covered by what is on its way
                now, committed = now + 0.040, committed + 1
                if not self._is_pending():
                    in_sync_at = now + self._lag_s
                continue
            now = max(now, in_sync_at) + 0.040 + 0.001 * self._k
            accepted = 0
            while accepted < self._k and self._rng.random() < self._alpha:
                accepted += 1
            committed += accepted + 1
            is_pending = self._is_pending() if accepted == self._k else self._rng.random() < self._beta
            in_sync_at = now if is_pending else now + self._lag_s
        return committed / now


@pytest.mark.parametrize("beta", [0.0, 0.4, 0.7])
@pytest.mark.parametrize("lag_s", [0.010, 0.050, 0.130])
def test_the_closed_form_equals_the_simulation_of_a_tree(beta: float, lag_s: float) -> None:
    """To 2 %; without alternatives it is exactly that of paths."""
    for alpha, k in ((0.75, 4), (0.9, 10)):
        streaming = rate_streaming(alpha, k, 0.040, 0.001, lag_s, beta=beta)
        waiting = rate_waiting(alpha, k, 0.040, 0.001, lag_s, beta=beta)
        assert Stream(alpha, beta, k, lag_s, waits=False).tokens_per_s() == pytest.approx(streaming, rel=0.02)
        assert Stream(alpha, beta, k, lag_s, waits=True).tokens_per_s() == pytest.approx(waiting, rel=0.02)
        if beta == 0.0:
            assert streaming == rate_streaming(alpha, k, 0.040, 0.001, lag_s)
            assert waiting == rate_waiting(alpha, k, 0.040, 0.001, lag_s)


def test_alternatives_are_part_of_the_decision_to_wait() -> None:
    """A device that is soon out of sync again is not worth a wait of a step; one whose alternatives prevent that is."""
    lags = [0.041] * 8
    assert plan_wait(0.6, 0.040, 0.001, lags, 1.0, saves_passes=False) == NO_WAIT
    assert plan_wait(0.6, 0.040, 0.001, lags, 1.0, saves_passes=False, beta=0.9) != NO_WAIT


def test_misses_that_alternatives_cover_are_measured() -> None:
    """Three in four: beta approaches it. A session of paths without alternatives has none."""
    drafting = Drafting(32, Policy.AUTO)
    drafts = pending(drafting)
    drafts.chances.has_hints = True
    for base in range(200):
        drafting.merge_tree(drafts, TreeDraft(base, 2 * base, [1, 2], [ROOT, ROOT], [12, 6]), 0.0)
        commit(drafts, 3 if base % 4 == 0 else 2)
    assert drafts.chances.beta == pytest.approx(0.75, abs=0.1)
    assert NodeChances(drafting.learned(b"").chances).beta == 0.0
    paths = pending(drafting)
    for base in range(50):
        drafting.merge(paths, base, [[1]], 0.0)
        commit(paths, 2)
    assert paths.chances.beta == 0.0


def test_devices_without_alternatives_say_nothing_of_those_with_them() -> None:
    """A new session of trees starts as if there had been no sessions of paths."""
    drafting = Drafting(32, Policy.AUTO)
    paths = pending(drafting)
    for base in range(50):
        drafting.merge(paths, base, [[1]], 0.0)
        commit(paths, 2)
    trees = pending(drafting)
    drafting.merge_tree(trees, line_message(0, 0, [1]), 0.0)
    assert trees.chances.beta == pytest.approx(0.3)


def test_a_first_tree_message_answers_its_commit_with_its_deepest_node() -> None:
    """Lag and size come from it; what is looked up is no answer."""
    drafting = Drafting(32, Policy.AUTO)
    drafting.curve.observe(StepSize(1), 0.040)
    drafts = pending(drafting)
    drafts.sources = Sources([PromptLookup([1, 2, 3, 1, 2, 3, 1, 2])])
    now = 0.0
    for base in range(1, 6):
        commit(drafts, 9)
        drafting.committed(drafts, [], [9], now, crowding=1.0)
        drafting.merge_tree(
            drafts, TreeDraft(base, 3 * base, [4, 5, 6], [ROOT, 3 * base, ROOT], [9, 9, 3]), now + 0.005
        )
        now += 1.0
    assert drafts.lag.seconds_until(3) == [pytest.approx(0.005), pytest.approx(0.005), None]
    commit(drafts, 9)
    drafting.committed(drafts, [4, 5], [9], now, crowding=1.0)
    drafting.choose([drafts], 99, StepSize(1, 0), 0.0)
    assert drafts.trie and drafts.trie.num_looked_up == drafts.trie.num_nodes


def test_a_tree_that_is_always_late_is_learned_from() -> None:
    """Each answer comes when the commits have passed it by; all it guessed was right, so it is worth a wait."""
    drafting = Drafting(8, Policy.VERIFY)
    drafting.learned(b"").acceptance.observe([1], [2])
    drafting.curve.observe(StepSize(1), 0.020)
    drafts = pending(drafting)
    for base in range(1, 40):
        commit(drafts, base)
        drafting.committed(drafts, [], [base], 0.020 * base, crowding=1.0)
        if base > 5:
            late = line_message(base - 5, 10 * base, range(base - 4, base + 1))
            drafting.merge_tree(drafts, late, 0.020 * base + 0.001)
    assert drafts.acceptance.rate > 0.9 and drafts.wait != NO_WAIT
    assert not drafts.trie


def test_sure_drafts_are_verified_and_waited_for_beyond_eight() -> None:
    """Forty tokens that have always been right: a pass verifies 32, and a wait is for more than 8."""
    drafting = Drafting(32, Policy.AUTO)
    for tokens in (1, 2, 4, 8, 16, 32, 40):
        drafting.curve.observe(StepSize(tokens), 0.030 + 0.0002 * tokens)
    drafts, text = pending(drafting), list(range(1000))
    now = 0.0
    for base in range(0, 400, 40):
        drafting.merge_tree(drafts, line_message(base, base, text[base : base + 40], 15), now + 0.004)
        chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts]
        line = drafts.trie.likeliest_of_device(32)
        commit(drafts, *text[base : base + 40])
        now += 1.0
        drafting.committed(drafts, line, text[base : base + 40], now, crowding=1.0)
    assert len(chosen.tokens) == 32
    assert drafts.wait.want > 16


@pytest.mark.parametrize(("level", "waits"), [(0, True), (6, True), (15, False)], ids=["hopeless", "unlikely", "sure"])
def test_an_unlikely_guess_does_not_rule_out_a_wait(level: int, waits: bool) -> None:
    """What is pending is weighed against what would come in 4 ms; a sure path is verified at once."""
    drafting = Drafting(8, Policy.AUTO)
    for tokens in range(1, 10):
        drafting.curve.observe(StepSize(tokens), 0.039 + 0.001 * tokens)
    drafts = pending(drafting)
    drafts.lag = DraftLag(4.0)
    commit(drafts, 1)
    drafting.merge_tree(drafts, line_message(1, 0, [2] * (1 if waits else 6), level), 0.001)
    drafting.committed(drafts, [], [1], 0.001, crowding=1.0)
    assert (drafts.wait != NO_WAIT) == waits
    if not waits:
        return
    assert drafting.is_waiting(drafts, 0.002)  # the guess was here before
    drafting.merge_tree(drafts, line_message(1, 1, [3], 13), 0.003)
    assert drafting.is_waiting(drafts, 0.003)  # not all that is waited for
    drafting.merge_tree(drafts, line_message(1, 2, [3] * 8, 13), 0.004)
    assert not drafting.is_waiting(drafts, 0.004) and drafts.lag.answer_rate == 1.0


def test_a_wait_ends_where_its_path_is_unlikely_to_go_on() -> None:
    """The device would draft other guesses first; a wait that ends with nothing new was not answered."""
    drafting = Drafting(8, Policy.AUTO)
    for tokens in range(1, 10):
        drafting.curve.observe(StepSize(tokens), 0.039 + 0.001 * tokens)
    drafts = pending(drafting)
    drafts.lag = DraftLag(4.0)
    commit(drafts, 1)
    drafting.merge_tree(drafts, line_message(1, 0, [2], 0), 0.001)
    drafting.committed(drafts, [], [1], 0.001, crowding=1.0)
    assert drafts.wait.want > 2
    drafting.merge_tree(drafts, line_message(1, 1, [3, 4], 8), 0.002)
    assert not drafting.is_waiting(drafts, 0.002)
    commit(drafts, 9)
    drafting.committed(drafts, [], [9], 0.003, crowding=1.0)
    assert drafting.is_waiting(drafts, 0.004) and not drafting.is_waiting(drafts, 1.0)
    assert drafts.lag.answer_rate < 1.0


# -- prompt lookup -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_a_lookup_finds_the_newest_longest_match(text: list[int], most: int) -> None:
    """As the plain search does; the array grows with the text."""
    lookup = PromptLookup(growing := text[: len(text) // 2])
    lookup.propose(most)
    growing.extend(text[len(text) // 2 :])
    tokens, kinds = lookup.propose(most)
    expected, matched = [], 0
    for size in (4, 3, 2):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if ends:
            copy = list(text)
            while len(copy) < len(text) + most:
                copy.append(copy[ends[-1] + len(copy) - len(text)])
            expected, matched = copy[len(text) :], size
            break
    assert tokens == expected
    assert kinds == [kind_of(matched + i) for i in range(len(tokens))]


def test_a_long_prompt_is_copied_in_pieces() -> None:
    """Nothing is proposed until the whole text is there."""
    text = [*range(20_000), 5, 6, 7]
    lookup = PromptLookup(text)
    answers = [lookup.propose(2)[0] for _ in range(3)]
    assert answers == [[], [], [8, 9]]


def test_lookups_are_counted_and_change_no_text() -> None:
    """In usage, commits and totals, apart from a device's drafts."""
    harness = Harness(config=EngineConfig(looks_up=True, policy=Policy.VERIFY))
    truth = plain(PROMPT, SAMPLED, 40)
    prompt = [*PROMPT, *truth, *PROMPT]  # the truth after PROMPT is in the prompt, but its context differs
    _, collector = harness.submit(prompt, 60)
    harness.run()
    assert collector.tokens == plain(prompt, SAMPLED, 60)
    looked_up = sum(commit.looked_up for commit in collector.commits)
    assert collector.end is not None and collector.end.usage.looked_up_tokens == looked_up
    totals = harness.engine.stats().totals
    assert totals.lookup_accepted == looked_up <= totals.lookup_proposed == totals.proposed
    harness.assert_all_returned()


@pytest.mark.parametrize(("period", "most_passes", "least_speed"), [(12, 0.4, 2.0), (None, 1.0, 0.98)])
def test_lookups_pay_where_a_text_repeats_itself_and_cost_nothing_elsewhere(
    period: int | None, most_passes: float, least_speed: float
) -> None:
    """A text with a period, and one of 20 tokens in no order, where two tokens often recur: steps of 10 + 2 ms."""
    rng = random.Random(3)
    truth = [rng.randrange(20) for _ in range(period or 600)] * (600 // (period or 600))
    drafting = Drafting(32, Policy.AUTO)
    for tokens in (1, 2, 4, 8, 16, 32):
        drafting.curve.observe(StepSize(tokens), 0.008 + 0.002 * tokens)
    drafts, text = pending(drafting, max_new=len(truth)), list[int]()
    drafts.sources = Sources([PromptLookup(text)])
    took_s, num_passes, num_looked_up = 0.0, 0, 0
    while len(text) < len(truth):
        chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts].tokens
        assert drafts.num_lookup_chosen == len(chosen)
        base, accepted = len(text), 0
        while accepted < len(chosen) and chosen[accepted] == truth[base + accepted]:
            accepted += 1
        committed = truth[base : base + accepted + 1]
        text.extend(committed)
        num_looked_up += (found := commit(drafts, *committed))
        assert found == accepted
        drafting.committed(drafts, [], committed, 0.0, crowding=1.0)
        took_s, num_passes = took_s + 0.010 + 0.002 * len(chosen), num_passes + 1
    assert num_passes + num_looked_up == len(truth)
    assert num_passes <= most_passes * len(truth)
    assert 0.010 * len(truth) / took_s >= least_speed


# -- whole texts -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_no_tree_changes_the_text(seed: int) -> None:
    """Right and wrong nodes, lost, repeated and late messages, lookups: same tokens, no leak."""
    rng = random.Random(seed)
    policy = rng.choice(list(Policy))
    config = EngineConfig(policy=policy, step_tokens=rng.choice([3, 16]), max_draft=6, looks_up=True)
    harness = Harness(config=config, num_blocks=rng.choice([22, 128]))
    prompts = [PROMPT, [1, 2, 1, 2]]
    truths = [plain(prompt, SAMPLED, 16) for prompt in prompts]
    sequences = [harness.submit(prompt, 16) for prompt in prompts]
    numbers, late = [0, 0], list[tuple[int, TreeDraft]]()
    for _ in range(1_000):
        for which, ((sequence_id, collector), truth) in enumerate(zip(sequences, truths, strict=True)):
            if collector.end is not None or rng.random() < 0.5:
                continue
            base = rng.randint(0, len(collector.tokens))
            first, size = numbers[which], rng.randint(1, 6)
            numbers[which] += size
            parents = [rng.choice([ROOT, *range(max(0, first - 4), first + i)]) for i in range(size)]
            tokens = [truth[min(15, base + i)] if rng.random() < 0.5 else rng.randrange(VOCAB) for i in range(size)]
            message = TreeDraft(base, first, tokens, parents, [rng.randrange(16) for _ in range(size)])
            late.append((sequence_id, message))
            for each in rng.choices(late[-4:], k=rng.randrange(3)):
                try:
                    harness.engine.draft_tree(*each)
                except RequestError as error:
                    assert error.code in ("stale_draft", "unknown_session")
        delay = harness.engine.step()
        if delay is None:
            break
        harness.clock.now += delay
    assert [c.tokens for _, c in sequences] == truths
    harness.assert_all_returned()


@pytest.mark.parametrize(("form", "sizes"), [(TreeForm.LINE, [1, 1]), (TreeForm.TREE, [1, 12])])
def test_a_tree_saves_passes_where_the_target_picks_an_alternative(form: TreeForm, sizes: list[int]) -> None:
    """The likeliest guess is wrong at its first place, its alternative right, and what follows that is pending.

    A line misses once and goes on below the alternative; a tree has verified it.
    """
    harness = Harness(config=EngineConfig(policy=Policy.VERIFY, form=form))
    truth = plain(PROMPT, SAMPLED, 24)
    sequence_id, collector = harness.submit(PROMPT, 24, patience_ms=0)
    harness.engine.step()
    tokens = [(truth[1] + 1) % VOCAB, *truth[1:12]]
    message = TreeDraft(1, 0, tokens, [ROOT, ROOT, *range(1, 11)], [13, 9, *[13] * 10])
    harness.engine.draft_tree(sequence_id, message)
    harness.run()
    assert collector.tokens == truth
    assert [len(c.tokens) for c in collector.commits[:2]] == sizes
    assert max(len(c.tokens) for c in collector.commits) > 4 and len(collector.commits) < 18


def test_bad_trees_are_refused_by_code() -> None:
    """As paths are; a tree below a node that the commits contradict is stale, one below an unknown node is not."""
    harness = Harness()
    truth = plain(PROMPT, SAMPLED, 12)
    wrong = (truth[0] + 1) % VOCAB
    sequence_id, collector = harness.submit(PROMPT, 12)
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 0, [wrong, truth[0]], [ROOT, ROOT], [9, 9]))
    for _ in range(4):
        harness.engine.step()
    num = len(collector.tokens)
    for target, message, code in (
        (999, line_message(0, 0, [1]), "unknown_session"),
        (sequence_id, line_message(99, 0, [1]), "draft_ahead"),
        (sequence_id, line_message(num, 0, [VOCAB]), "token_out_of_range"),
        (sequence_id, line_message(0, 9, [wrong, 1, 2]), "stale_draft"),
        (sequence_id, line_message(0, 9, truth[:num]), "stale_draft"),
        (sequence_id, TreeDraft(0, 5, [1, 2], [0, 5], [9, 9]), "stale_draft"),
        (sequence_id, TreeDraft(0, 5, [truth[1]], [1], [9]), "stale_draft"),
    ):
        with pytest.raises(RequestError) as refused:
            harness.engine.draft_tree(target, message)
        assert refused.value.code == code, message
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 50, [1], [40], [9]))
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 60, truth[1 : num + 1], [1, *range(60, 59 + num)], [9] * num))
    harness.run()
    assert collector.tokens == truth
