"""Tests the server's pending trees: merging, chances by level, what is chosen, prompt lookup, whole texts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pending_drafts import commit, line_message, move_root, nodes_below, pending, position_of, timed

from outrider.cloud.engine import Policy
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.pending_drafts import PendingDrafts, likeliest_path
from outrider.cloud.pending.selected_drafts import SelectedDrafts
from outrider.cloud.pending.trie import LEVELS, MAX_NODES, MAX_NUMBERS, MAX_ORPHANS, DraftTrie
from outrider.models.wire.tree_draft import CHANCES, MAX_MESSAGE_NODES, ROOT, TreeDraft


def paths_in(trie: DraftTrie) -> set[tuple[int, ...]]:
    """The path of every pending node."""
    return {path for path, _ in nodes_below(trie.root)}


# -- merging -----------------------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[TreeDraft], list[tuple[int, int]]]:
    """A text, a device's messages about it, and the order in which they arrive: (commits before it, which message).

    The device sends each message at a base; it arrives at that base or later, twice, or never.
    """
    text = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    messages, number = list[TreeDraft](), 0
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
    trie = DraftTrie()
    nodes: dict[int, tuple[int, int, int]] = {}  # of the messages that arrived: base, parent, token
    for now in range(len(text) + 1):
        committed = tuple(text[:now])
        trie.follow(committed[-1:])
        trie.settle()
        for message in (messages[index] for at, index in arrivals if at == now):
            trie.merge_tree(message, committed)
            for i, (token, parent) in enumerate(zip(message.tokens, message.parents, strict=True)):
                nodes[message.first + i] = message.base, parent, token
        paths: dict[int, tuple[int, ...]] = {}
        for number, (base, parent, token) in sorted(nodes.items()):
            if parent == ROOT or parent in paths:
                paths[number] = (*(text[:base] if parent == ROOT else paths[parent]), token)
        live = {path[now:] for path in paths.values() if len(path) > now and path[:now] == committed}
        assert paths_in(trie) == live
        assert (trie.num_nodes, trie.num_looked_up) == (len(live), 0)
        assert bool(trie) == bool(live) == trie.has_device_nodes
        for number, path in paths.items():
            position, is_right = position_of(trie, number), path[:now] == committed[: len(path)]
            assert position == len(path) if is_right else position is not None and position < 0


def test_the_likeliest_path_takes_the_highest_level_and_survives_a_commit_of_an_alternative() -> None:
    """A commit of the less likely child keeps what was drafted below it."""
    trie, message = DraftTrie(), TreeDraft(0, 0, [5, 6, 7, 8], [ROOT, ROOT, 1, 0], [6, 12, 3, 9])
    assert trie.merge_tree(message, []) == 2 and trie.likeliest(9) == [6, 7] == likeliest_path(message)
    move_root(trie, 5)
    assert trie.likeliest(9) == [8] and trie.num_nodes == 1
    trie.merge_tree(TreeDraft(0, 4, [9], [0], [2]), [5])  # below a committed node
    trie.merge_tree(TreeDraft(0, 5, [9], [1], [15]), [5])  # below a dropped one
    assert paths_in(trie) == {(8,), (9,)}


def test_no_client_makes_a_trie_large_deep_or_slow() -> None:
    """Chains, stars, orphans and endless numbers: each is bounded, and what is dropped is not counted."""
    trie, ones, levels = DraftTrie(), [1] * MAX_MESSAGE_NODES, [9] * MAX_MESSAGE_NODES
    for start in range(0, 4 * MAX_NODES, MAX_MESSAGE_NODES):  # one chain
        parents = [start - 1 if start else ROOT, *range(start, start + MAX_MESSAGE_NODES - 1)]
        trie.merge_tree(TreeDraft(0, start, ones, parents, levels), [])
    assert trie.num_nodes == MAX_NODES == len(trie.likeliest(2 * MAX_NODES))
    move_root(trie, 2)
    assert trie.num_nodes == 0 and not trie
    for start in range(10**6, 10**6 + 2 * MAX_NODES, MAX_MESSAGE_NODES):  # children of the last token
        tokens = range(start, start + MAX_MESSAGE_NODES)
        trie.merge_tree(TreeDraft(1, start, tokens, [ROOT] * MAX_MESSAGE_NODES, levels), [2])
    assert trie.num_nodes == MAX_NODES
    absent = range(5 * 10**6, 5 * 10**6 + MAX_MESSAGE_NODES)
    for start in range(2 * 10**6, 2 * 10**6 + 2048, MAX_MESSAGE_NODES):  # parents that never come
        trie.merge_tree(TreeDraft(1, start, ones, absent, levels), [2])
    trie.clear()
    for token in range(MAX_NODES):  # paths of a flood
        trie.merge([token, 1, 2], prefer=True)
    assert trie.num_nodes == MAX_NODES and trie.likeliest(9) == [MAX_NODES // 3]
    assert trie._num_orphans == sum(map(len, trie._orphans.values())) == MAX_ORPHANS
    assert len(trie._numbers) <= MAX_NUMBERS
    move_root(trie, 10**6)
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


@pytest.mark.parametrize("skill", [1.0, 0.5])
def test_levels_are_learned_where_a_device_is_honest_and_where_it_promises_too_much(skill: float) -> None:
    """Rates approach what happens; kinds that were never tested follow the ratio of hits to promises."""
    rng, drafts = random.Random(1), pending(Drafting(32, Policy.AUTO))
    for base in range(400):
        level = rng.choice([6, 13])
        drafts.trie.merge_tree(TreeDraft(base, base, [1], [ROOT], [level]), drafts.committed)
        commit(drafts, 1 if rng.random() < skill * CHANCES[level] else 2)
    for level, within in ((13, 0.15), (6, 0.12), (11, 0.2)):
        assert drafts.chances.rates()[LEVELS + level] == pytest.approx(skill * CHANCES[level], abs=within)


@pytest.mark.parametrize("width", [1, 4])
def test_a_tree_that_is_always_wrong_is_soon_not_verified(width: int) -> None:
    """About ten tested nodes of the highest level, with a step of 40 ms and 1 ms per drafted token."""
    drafting = timed(32, Policy.AUTO, 0.040, 0.001, with_trees=True)
    drafts, num_tested = pending(drafting), 0
    while True:
        base = len(drafts.committed)
        guesses = [t for t in range(width) for _ in range(3)]
        parents = [ROOT if i % 3 == 0 else 3 * width * base + i - 1 for i in range(3 * width)]
        drafting.merge_tree(drafts, TreeDraft(base, 3 * width * base, guesses, parents, [15] * len(guesses)), 0.0)
        if not drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts].tokens:
            break
        num_tested += width
        commit(drafts, 60)
    fresh = NodeChances(drafting.learned(b"").chances)
    assert num_tested <= 12 and fresh.rates()[LEVELS + 15] > 0.4  # a new session's hints are still believed


def test_earlier_sessions_spoil_no_estimate_of_later_ones() -> None:
    """Whatever a client did a thousand times, a new session of anybody begins within bounds."""
    drafting = Drafting(8, Policy.AUTO)
    for guess in (60, 1):
        for _ in range(1000):
            drafts = pending(drafting)
            drafting.merge_tree(drafts, line_message(0, 0, [1, 2], 15), 0.0)
            drafting.learned(b"").acceptance.observe(drafts.trie.likeliest_of_device(8), [guess, 2])
            commit(drafts, guess)
        fresh = pending(drafting).chances
        fresh.has_hints = True
        assert 0.3 <= AcceptanceEstimator(8, drafting.learned(b"").acceptance).rate <= 0.9
        assert 0.1 <= fresh.beta <= 0.9 and fresh.rates()[LEVELS + 15] > 0.4


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
    sizes = range(len(parents) + 1)
    every = itertools.chain.from_iterable(itertools.combinations(range(len(parents)), size) for size in sizes)
    return [nodes for nodes in every if all(parents[i] < 0 or parents[i] in nodes for i in nodes)]


def test_what_one_client_shows_no_other_can_tell() -> None:
    """A client's sessions begin with what its own showed; of many clients the latest are remembered."""
    drafting = Drafting(8, Policy.AUTO)
    first = drafting.learned(b"one")
    for _ in range(50):
        AcceptanceEstimator(8, first.acceptance).observe([1], [2])
    fresh = AcceptanceEstimator(8).rate
    one, two = (AcceptanceEstimator(8, drafting.learned(each).acceptance).rate for each in (b"one", b"two"))
    assert one < two == fresh
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
    drafting, step_s = Drafting(8, Policy.AUTO, with_trees=True), 0.01
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 10):
        step_s += data.draw(st.sampled_from([0.0, 0.0005, 0.002, 0.006]))
        drafting.curve.observe(StepSize(tokens), step_s)
    drafts = pending(drafting)
    drafting.merge_tree(drafts, TreeDraft(0, 0, range(size), [ROOT if p < 0 else p for p in parents], levels), 0.0)
    chosen = drafting.choose([drafts], budget, StepSize(1, 0), 0.0)[drafts]
    rates, alive = drafts.chances.rates(), list[float]()
    for parent, level in zip(parents, levels, strict=True):
        alive.append(rates[LEVELS + level] * (alive[parent] if parent >= 0 else 1.0))
    times = drafting.curve.seconds(1 + size)

    def rate(nodes: Sequence[int]) -> float:
        return float((1.0 + sum(alive[i] for i in nodes)) / times[len(nodes)])

    best = max(rate(nodes) for nodes in closed_sets(parents) if len(nodes) <= budget)
    assert rate(chosen.tokens) == pytest.approx(best)  # a node's token is its index
    assert [chosen.tokens[p] if p >= 0 else -1 for p in chosen.parents] == [parents[i] for i in chosen.tokens]
    assert all(parent < index for index, parent in enumerate(chosen.parents))


def branching(drafting: Drafting) -> PendingDrafts:
    """A session with a tree: a likely and an unlikely child of the last token; below the first two again."""
    drafts = pending(drafting)
    drafting.merge_tree(drafts, TreeDraft(0, 0, [1, 2, 3, 4], [ROOT, ROOT, 0, 0], [13, 6, 13, 6]), 0.0)
    return drafts


@pytest.mark.parametrize(
    ("extra_s", "expected"),
    [
        (0.0001, SelectedDrafts([1, 3, 2, 4], [-1, 0, -1, 0])),
        (0.006, SelectedDrafts.line([1, 3])),
        (0.1, SelectedDrafts()),
    ],
    ids=["tree", "line", "nothing"],
)
def test_under_load_a_tree_shrinks_to_a_line_and_then_to_nothing(extra_s: float, expected: SelectedDrafts) -> None:
    """Nothing but the step's time decides: the dearer a token, the less of the tree is verified."""
    drafting = timed(32, Policy.AUTO, 0.010, extra_s, with_trees=True)
    drafts = branching(drafting)
    assert drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts] == expected


def test_a_tree_is_verified_only_where_its_steps_are_worth_their_time() -> None:
    """Steps with trees that take twice as long are declined, tried again at times, and taken once they are faster."""
    drafting = timed(32, Policy.AUTO, 0.040, with_trees=True)
    drafts = branching(drafting)

    def step(factor: float) -> bool:
        """Whether a step is one with a tree; its time is `factor` of a line's then."""
        chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts]
        size = StepSize(1 + len(chosen.tokens))
        drafting.stepped(size, 0.040 * (1.0 if chosen.is_line else factor), not chosen.is_line)
        return not chosen.is_line

    assert step(2.0) and 1 <= sum(step(2.0) for _ in range(500)) < 12 and drafting.trees.ratio > 1.5
    assert sum(step(1.0) for _ in range(700)) > 100 and all(step(1.0) for _ in range(20))
    for _ in range(20_000):
        step(3.0)
    while not step(3.0):
        pass
    assert any(step(1.0) for _ in range(520))  # however long they were slow


def test_trees_keep_their_size_where_no_line_is_run() -> None:
    """Times of lines are forgotten after 256 steps; then trees tell them, and the plain step is still timed."""
    drafting = timed(32, Policy.AUTO, 0.120, with_trees=True)
    drafts, sizes = branching(drafting), list[int]()
    for step in range(1_500):
        chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts]
        sizes.append(len(chosen.tokens))
        drafting.stepped(StepSize(1 + sizes[-1]), 0.040 + 0.001 * sizes[-1], not chosen.is_line)
        if step < 600:  # else nothing plain is run but what is tried
            drafting.stepped(StepSize(1), 0.040, False)
    assert sizes[300:].count(4) > 0.97 * len(sizes[300:])
    step_s, extra_s = drafting.curve.step_and_extra()
    assert step_s == pytest.approx(0.040, rel=0.05) and extra_s == pytest.approx(0.001, rel=0.5)
    assert drafting.trees.ratio < 1.1


def test_no_more_is_verified_than_may_be_committed() -> None:
    """The last token needs no draft."""
    drafting = Drafting(32, Policy.VERIFY, with_trees=True)
    drafts = pending(drafting, max_new=3)
    drafting.merge_tree(drafts, line_message(0, 0, range(9), 15), 0.0)
    assert drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts] == SelectedDrafts.line([0, 1])
