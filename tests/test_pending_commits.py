"""Tests what commits leave pending, also where they are learned from later, and what is chosen of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pending_drafts import advance, move_root, nodes_below, position_of

from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.pending_drafts import LEAST, PendingDrafts, line_of
from outrider.cloud.pending.policy import Policy
from outrider.cloud.pending.trie import PROMPT_KINDS, UNHINTED, DraftTrie, PendingNode, is_looked_up
from outrider.cloud.seam import DraftHints
from outrider.models.wire.tree_draft import ROOT, TreeDraft

token = st.integers(1, 3)


def shape_of(node: PendingNode) -> tuple[object, ...]:
    """A node and what is below it."""
    below = tuple(shape_of(child) for _, child in sorted((node.children or {}).items()))
    return node.token, node.position, node.kind, node.best and node.best.token, below


@st.composite
def messages(draw: st.DrawFn, committed: Sequence[int], first: int) -> TreeDraft | list[int]:
    """A tree of a device that is not far behind, or a path."""
    base = draw(st.integers(max(0, len(committed) - 2), len(committed)))
    count = draw(st.integers(1, 6))
    if draw(st.booleans()):
        return [*committed[base:], *(draw(token) for _ in range(count))]
    parents = [draw(st.sampled_from([ROOT, *range(first, first + i)])) for i in range(count)]
    levels = [draw(st.integers(5, 15)) for _ in range(count)]
    return TreeDraft(base, first, [draw(token) for _ in range(count)], parents, levels)


def take(drafting: Drafting, drafts: PendingDrafts, message: TreeDraft | list[int], base: int = 0) -> None:
    if isinstance(message, TreeDraft):
        drafting.merge_tree(drafts, message, 1.0)
    else:
        drafting.merge(drafts, base, [message], 1.0)


class Side:
    """A session, whose commits are learned from at once or later."""

    def __init__(self, is_late: bool) -> None:
        self.drafting, self.is_late = Drafting(8, Policy.AUTO), is_late
        self.drafts = self.drafting.pending(b"", [], 1000, DraftHints(lag_ms=5.0))

    def shown(self) -> tuple[object, ...]:
        """What is pending."""
        trie = self.drafts.trie
        return shape_of(trie.root), bool(trie), trie.has_device_nodes

    def learned(self) -> tuple[object, ...]:
        """By the session, and by its client."""
        drafts, others = self.drafts, self.drafting.learned(b"")
        chances = drafts.chances.rates(), drafts.chances.beta, others.chances.rates()
        return chances, drafts.acceptance.rates(8), others.acceptance.rate

    def commit(self, tokens: list[int]) -> int:
        drafts = self.drafts
        drafts.committed += tokens
        if self.is_late:
            return drafts.follow(tokens, teaches_path=True)
        drafts.acceptance.observe(drafts.trie.likeliest_of_device(8), tokens)
        return advance(drafts, tokens)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_what_is_learned_later_is_the_same(data: st.DataObject) -> None:
    """Messages, lookups and commits in any order: the pending nodes at once, counts and rates once it is settled."""
    now, late, first = Side(False), Side(True), 0
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 2))):
            message = data.draw(messages(now.drafts.committed, first))
            first += len(message.tokens) if isinstance(message, TreeDraft) else 0
            base = len(now.drafts.committed) - data.draw(st.integers(0, min(1, len(now.drafts.committed))))
            for side in (now, late):
                take(side.drafting, side.drafts, message, base)
        if data.draw(st.booleans()):
            path = [data.draw(token) for _ in range(3)]
            late.drafts.settle()
            for side in (now, late):
                side.drafts.trie.merge(path, [PROMPT_KINDS[2]] * len(path))
        tokens = [data.draw(token) for _ in range(data.draw(st.integers(1, 4)))]
        assert now.commit(tokens) == late.commit(list(tokens)) and now.shown() == late.shown()
        if data.draw(st.booleans()):
            late.drafts.settle()
    late.drafts.settle()
    late.drafts.settle()  # a second time changes nothing
    here = [is_looked_up(node.kind) for _, node in nodes_below(late.drafts.trie.root)]
    expected = len(here), sum(here)
    assert all((trie.num_nodes, trie.num_looked_up) == expected for trie in (now.drafts.trie, late.drafts.trie))
    places = [[position_of(side.drafts.trie, number) for number in range(first)] for side in (now, late)]
    assert places[0] == places[1] and now.learned() == late.learned()


def test_a_dropped_node_takes_no_message_after_its_commit() -> None:
    """Its siblings are dropped late, but before anything is merged below them."""
    side = Side(True)
    take(side.drafting, side.drafts, TreeDraft(0, 0, [1, 2], [ROOT, ROOT], [15, 9]))
    side.commit([1])
    # Below the one that the commit contradicts.
    take(side.drafting, side.drafts, TreeDraft(0, 2, [3], [1], [15]))
    assert side.drafts.trie.num_nodes == 0 and position_of(side.drafts.trie, 2) == -1


short_paths = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(st.lists(st.one_of(st.tuples(st.just("merge"), short_paths), st.tuples(st.just("advance"), st.integers(0, 3)))))
@settings(max_examples=300, deadline=None)
def test_trie_equals_a_set_of_paths(actions: list[tuple[str, list[int] | int]]) -> None:
    """Merging and committing leave exactly the paths that are consistent with the commits."""
    trie, paths = DraftTrie(), set[tuple[int, ...]]()
    for kind, value in actions:
        if kind == "merge":
            assert isinstance(value, list)
            trie.merge(value, prefer=True)
            paths.add(tuple(value))
            assert trie.likeliest(len(value)) == value
        else:
            move_root(trie, value)  # type: ignore[arg-type]
            paths = {p[1:] for p in paths if p[0] == value and len(p) > 1}
        assert bool(trie) == bool(paths)
        likeliest = tuple(trie.likeliest(10))
        assert not paths or any(p[: len(likeliest)] == likeliest for p in paths)


# -- the choice --------------------------------------------------------------------------------------------------------


def plain_line(drafts: PendingDrafts, max_draft: int) -> tuple[list[int], list[float]]:
    """The likeliest path and its survivals, step by step."""
    tokens, survivals, node = list[int](), list[float](), drafts.trie.root.best
    while node is not None and len(tokens) < min(max_draft, drafts.num_left - 1):
        unhinted = drafts.acceptance.rates(max_draft)[len(tokens)]
        chance = unhinted if node.kind == UNHINTED else drafts.chances.rates()[node.kind]
        alive = (survivals[-1] if survivals else 1.0) * chance
        if alive < LEAST:
            break
        tokens.append(node.token)
        survivals.append(alive)
        node = node.best
    return tokens, survivals


def plain_counts(survivals: Sequence[Sequence[float]], fixed: int, step_s: Sequence[float], budget: int) -> list[int]:
    """The best number of each, by trying every prefix of all tokens in order."""
    order = sorted(((-p, row, i) for row, own in enumerate(survivals) for i, p in enumerate(own)), key=lambda e: e[0])
    best, best_rate, gained = 0, len(survivals) / step_s[fixed - 1], float(len(survivals))
    for count, (p, _, _) in enumerate(order[:budget], start=1):
        gained -= p
        if gained / step_s[fixed + count - 1] > best_rate + 1e-12:
            best, best_rate = count, gained / step_s[fixed + count - 1]
    counts = [0] * len(survivals)
    for _, row, _ in order[:best]:
        counts[row] += 1
    return counts


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_choice_is_the_plain_ones(data: st.DataObject) -> None:
    """Of many sessions at once: each verifies the path that trying every number of tokens finds the best."""
    drafting = Drafting(8, Policy.AUTO)
    for size in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128):
        for _ in range(3):
            drafting.stepped(StepSize(size, 0), 0.010 + 0.0003 * size, False)
    everyone = []
    for number in range(data.draw(st.integers(1, 6))):
        drafts = drafting.pending(b"%d" % (number % 2), [], data.draw(st.integers(2, 20)), DraftHints())
        take(drafting, drafts, data.draw(messages([], 0)))
        tokens = [data.draw(token) for _ in range(data.draw(st.integers(0, 2)))]
        drafts.committed += tokens
        drafts.follow(tokens, teaches_path=True)
        everyone.append(drafts)
    budget, fixed = data.draw(st.integers(0, 40)), StepSize(len(everyone), 0)
    lines = [plain_line(drafts, 8) for drafts in everyone]
    found = drafting.choose(everyone, budget, fixed, 0.0)
    step_s = drafting.curve.seconds(fixed.tokens + budget + 50).tolist()
    counts = plain_counts([survivals for _, survivals in lines], fixed.tokens, step_s, budget)
    for drafts, (tokens, survivals), count in zip(everyone, lines, counts, strict=True):
        row = line_of(drafts, 8)
        assert list(row.tokens) == tokens and row.survivals == pytest.approx(survivals)
        assert list(found[drafts].tokens) == tokens[:count]


def test_settling_costs_what_the_commit_passed() -> None:
    """The rest of the trie is not walked: a following node keeps its children."""
    trie = DraftTrie()
    trie.merge(range(1, 500))
    trie.follow([1, 2])
    below = trie.root.children
    trie.settle()
    assert trie.root.children is below and trie.num_nodes == 497


def test_under_policy_verify_the_likeliest_drafts_of_all_are_verified() -> None:
    """Where a step has no room for all that is likely, no session goes without because others came before it."""
    drafting = Drafting(8, Policy.VERIFY)
    sessions = [drafting.pending(b"%d" % number, [], 100, DraftHints()) for number in range(6)]
    for drafts in sessions:
        drafts.trie.merge(range(8), prefer=True)
        drafts.acceptance.observe(range(8), range(8))
    chosen = drafting.choose(sessions, 12, StepSize(6, 0), 0.0)
    assert [len(chosen[drafts].tokens) for drafts in sessions] == [2] * 6
