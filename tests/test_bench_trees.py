"""Tests of what the measurements of trees rest on: the draft beside the target, bounds, bodies, and the simulation.

The tree simulation gives the design's figures, chooses best, counts the bytes of the wire, and meets budgets.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from bench.beside import GUESSES, EmulatedPair, Stop, Turns
from bench.emulated import MAX_POSITIONS, EmulatedDraft, EmulatedTarget, Emulation, emulated_draft
from bench.known_text import SUCCESSOR
from bench.never_slower import Comparison, misses
from bench.round_trips import PATH, TREE, WRONG, Cell, Place, rate_of
from bench.server_overhead import tree_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import read_ranks

from outrider.edge.lab.laboratory import CLOUD_ONLY
from outrider.edge.results import GenerationResult, Mode, Source
from outrider.export.check.acceptance import Continuation
from outrider.export.report.simulation.ranks import MISSED, Picked, Ranks, bucket
from outrider.export.report.simulation.trees import path, simulate
from outrider.export.report.simulation.world import Device, Form, Node, Plan, Times, choose
from outrider.models.picks.sampling import Candidates, SamplingParams, candidates, pick
from outrider.models.runtimes.base import BranchingRuntime, SequenceSlice
from outrider.models.wire.tree_draft import ROOT, TreeDraft, decode_tree

NO_TIME = Emulation(0.0, 0.0, 0.0)
PARAMS = SamplingParams(temperature=0.8, seed=3)


@pytest.mark.parametrize("stop", [Stop(depth=1), Stop(depth=4), Stop(depth=5), Stop(floor=0.2)], ids=str)
def test_the_draft_beside_the_target_writes_the_targets_text(stop: Stop) -> None:
    """However far a round drafts, and in fewer passes than tokens. Ranks are measured along a given text: one a token,
    and the draft's own pick counts as rank 0.
    """
    turns = Turns(*EmulatedPair(NO_TIME)())
    plain = turns.generate([5, 6, 7], PARAMS, 40, Stop(floor=2.0))
    found = turns.generate([5, 6, 7], PARAMS, 40, stop)
    assert found.tokens == plain.tokens and len(found.tokens) == len(found.arrival_s) == 40
    assert found.num_passes + found.num_accepted == 40 and found.num_passes < 40
    (ranks_of,) = turns.ranks([Continuation((5, 6, 7), found.tokens, PARAMS)])
    assert len(ranks_of) == 40 and sum(token.rank == 0 for token in ranks_of) >= found.num_accepted


def emulated_ranks(temperature: float, num_texts: int, num_tokens: int) -> Ranks:
    """Ranks of the emulated target's picks among the emulated draft's guesses, along the target's own texts."""
    emulation = replace(NO_TIME, temperature=temperature)
    target, draft = EmulatedTarget(emulation), EmulatedDraft(emulation)
    blocks = list(range(MAX_POSITIONS // target.block_size))
    texts = []
    for seed in range(num_texts):
        params = SamplingParams(temperature=temperature, seed=seed)
        draft.truncate(0)
        token, picked = seed, []
        for position in range(num_tokens):
            guesses = candidates(draft.extend([token]), params, position + 1, GUESSES)
            rows = target.forward([SequenceSlice([token], position, blocks, 1)])
            token = pick(rows[0], params, position + 1)
            picked.append(Picked.among(guesses, token))
        texts.append(tuple(picked))
    return Ranks(tuple(texts))


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_the_emulated_pair_has_the_ranks_of_the_measured_one(temperature: float) -> None:
    """Within 0.06 for the draft's own pick and its best two, four and eight."""
    measured, emulated = read_ranks(f"reference_ranks_{temperature}"), emulated_ranks(temperature, 6, 120)
    for width in (1, 2, 4, 8):
        assert emulated.hits(width) == pytest.approx(measured.hits(width), abs=0.06)


def test_an_emulated_draft_of_several_nodes_gives_each_branch_its_own_logits() -> None:
    """And its sequence stays as it is."""
    draft, alone = emulated_draft(replace(NO_TIME, nodes_per_call=4)), emulated_draft(NO_TIME)
    assert isinstance(draft, BranchingRuntime) and not isinstance(alone, BranchingRuntime)
    for each in (draft, alone):
        each.extend([1, 2])
    branches = [[3], [4, 5]]
    for branch, row in zip(branches, draft.extend_branches(branches), strict=True):
        assert draft.length == 2 and (row == alone.extend(branch)).all()
        alone.truncate(2)


def _comparison(rtt_ms: float, path_x: float = 1.5, wrong_x: float = 1.0) -> Comparison:
    """A round trip with these speed-ups over a step of 40 ms, 1.8 for a tree."""
    cells = {}
    for name, speed_up in {CLOUD_ONLY: 1.0, PATH: path_x, TREE: 1.8, WRONG: wrong_x}.items():
        arrival_s = tuple(index * 0.04 / speed_up for index in range(11))
        text = GenerationResult(Mode.STREAM, tuple(range(11)), (Source.TARGET,) * 11, arrival_s, "length", 11, 0, 0, 0)
        cells[name] = Cell(texts=[text], rates=[rate_of([arrival_s])], ratios=[speed_up])
    return Comparison(Place(rtt_ms, {}, {}, cells), None, None)


def test_bounds_hold_tree_against_path_and_cloud_only() -> None:
    """1.15 over the path at 50 ms, and the floor for an always-wrong tree."""
    for found, expected in (
        (_comparison(50.0), []),
        (_comparison(50.0, path_x=1.6), ["tree over path is 1.125, expected at least 1.15"]),
        (_comparison(50.0, wrong_x=0.96), ["an always-wrong tree over cloud-only is 0.960, expected at least 0.97"]),
    ):
        assert misses(found) == [f"RTT 50 ms: {words}" for words in expected]


def test_the_overheads_tree_holds_the_right_path_and_nothing_else_that_is_right() -> None:
    """32 nodes, eight of them right."""
    tree = decode_tree(tree_of(300, 70_000, 17))
    assert (tree.base, tree.first, len(tree.tokens)) == (300, 70_000, 32)
    right = {ROOT: 17}
    for number, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=tree.first):
        if parent in right and token == SUCCESSOR[right[parent]]:
            right[number] = token
    assert len(right) - 1 == 8


TIMES = Times(step_ms=40.0, extra_ms=1.0, draft_ms=1.0)
PLAN = Plan()


@cache
def ranks() -> Ranks:
    """Those of the reference pair's first draft at temperature 0.8, from which trees were designed."""
    return read_ranks("ranks_0.8")


def made(*picked: int, gap: float = 1.5) -> Ranks:
    """One text whose picks have these ranks, all gaps alike."""
    return Ranks((tuple(Picked(rank, (gap,) * 7) for rank in picked),))


@pytest.mark.parametrize(("rtt_ms", "path_x", "line_x", "tree_x"), [(10.0, 2.27, 2.79, 2.89), (50.0, 1.78, 2.23, 2.34)])
def test_the_table_of_the_design_comes_out(rtt_ms: float, path_x: float, line_x: float, tree_x: float) -> None:
    """Temperature 0.8, step 40 + 1 ms, draft 1 ms, 400 tokens: the speed-ups from which trees were decided."""
    plans = (path(PLAN), replace(PLAN, form=Form.LINE), PLAN)
    found = [simulate(ranks(), TIMES, rtt_ms, plan).speed_up for plan in plans]
    assert found == pytest.approx([path_x, line_x, tree_x], rel=0.02)


def test_the_ranks_are_those_of_the_design() -> None:
    """Shares within the best 1, 2, 4 and 8 guesses, and the chance of the first two where their gap is small."""
    assert [round(ranks().hits(width), 2) for width in (1, 2, 4, 8)] == [0.77, 0.87, 0.94, 0.97]
    assert [round(ranks().table[guess][0], 2) for guess in (0, 1)] == [0.37, 0.33]
    assert ranks().table[0][bucket(5.0)] == pytest.approx(0.99, abs=0.005)
    assert [bucket(gap) for gap in (0.0, 0.25, 0.9, 4.0)] == [0, 1, 2, 5]


def test_a_draft_that_is_never_right_costs_nothing() -> None:
    """Its chances are known to be near 0: nothing is verified, and the target never waits in vain."""
    found = simulate(made(*[MISSED] * 50), TIMES, 25.0, PLAN, num_tokens=80)
    assert found.speed_up >= 0.99 and found.verified < 0.05


def test_second_guesses_are_worth_what_they_hit() -> None:
    """Where the pick is always the second guess, a path gains nothing and a tree nearly as much as a perfect path."""
    second, perfect = made(*[1] * 60), made(*[0] * 60)
    assert simulate(second, TIMES, 10.0, path(PLAN), num_tokens=80).speed_up < 1.01
    of_second, of_perfect = (simulate(each, TIMES, 10.0, PLAN, num_tokens=80).speed_up for each in (second, perfect))
    assert of_second > 0.9 * of_perfect > 3.0


def test_several_nodes_per_call_help_a_slow_draft() -> None:
    """Eight nodes of a call that takes 1.7 times as long, against one."""
    slow = Times(step_ms=30.0, extra_ms=1.0, draft_ms=3.0)
    one, eight = (
        simulate(ranks(), times, 25.0, PLAN, num_tokens=200) for times in (slow, replace(slow, nodes_per_call=8))
    )
    assert eight.speed_up > 1.05 * one.speed_up and eight.drafted > one.drafted


@pytest.mark.parametrize("budget", [60.0, 120.0])
def test_the_budget_of_bytes_is_met(budget: float) -> None:
    """To a tenth, by a floor that the device moves; fewer bytes are never free."""
    free = simulate(ranks(), TIMES, 50.0, PLAN)
    found = simulate(ranks(), TIMES, 50.0, replace(PLAN, bytes_per_token=budget))
    assert found.bytes_up == pytest.approx(budget, rel=0.1) and free.bytes_up > 2 * budget
    assert 1.5 < found.speed_up < free.speed_up


class Recorded(Device):
    """Keeps the messages that it sends."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(ranks(), TIMES, 30.0, plan, seed=1)
        self.messages: list[TreeDraft] = []

    def _send(self) -> None:
        nodes, first, base = list(self._queue), self.num_sent, self._known
        super()._send()
        parents = [ROOT if node.parent in (None, self.root) else node.parent.number for node in nodes]
        self.messages.append(TreeDraft(base, first, [4000] * len(nodes), parents, [8] * len(nodes)))


@pytest.mark.parametrize("plan", [PLAN, Plan(bytes_per_token=80.0)])
def test_bytes_are_those_of_the_wire(plan: Plan) -> None:
    """Every message encodes to what was counted, beside its two leading numbers; a parent always goes first."""
    device = Recorded(plan)
    for committed in range(1, 40):
        device.run(20.0 * committed)
        device.inform(20.0 * committed, committed)
    known, counted = {ROOT}, 0
    for message in device.messages:
        for number, parent in enumerate(message.parents, start=message.first):
            assert parent in known
            known.add(number)
        leading = len(TreeDraft(message.base, message.first, [], [], []).encode())
        counted += len(message.encode()) - leading + plan.message_bytes
    assert counted == device.num_bytes and len(known) - 1 == device.num_sent > 50
    assert len(device.messages) == device.num_messages


def tree(chances: list[tuple[int, float]]) -> tuple[Node, list[Node]]:
    """A root, and nodes (index of the parent among all before, chance) that have all arrived."""
    nodes = [Node(0, True)]
    for parent_index, chance in chances:
        parent = nodes[parent_index % len(nodes)]
        child = Node(parent.position + 1, False, parent, chance)
        child.at = 0.0
        parent.children = [*(parent.children or []), child]
        nodes.append(child)
    return nodes[0], nodes[1:]


def rate(nodes: list[Node]) -> float:
    """Expected tokens per ms of verifying these."""
    return (1.0 + sum(node.reached for node in nodes)) / (TIMES.step_ms + 10 * TIMES.extra_ms * len(nodes))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.05, 0.95)), max_size=6))
def test_what_is_chosen_is_the_best_of_all_choices(chances: list[tuple[int, float]]) -> None:
    """Any connected part of the tree, against brute force; of a line, along the likeliest children."""
    root, nodes = tree(chances)
    costly = replace(TIMES, extra_ms=10 * TIMES.extra_ms)
    best = max(
        rate(list(some))
        for size in range(len(nodes) + 1)
        for some in combinations(nodes, size)
        if all(node.parent is root or node.parent in some for node in some)
    )
    assert rate(choose(root, 0.0, costly, PLAN)) == pytest.approx(best)
    line = choose(root, 0.0, costly, Plan(form=Form.LINE))
    assert all(node.parent is (line[index - 1] if index else root) for index, node in enumerate(line))


def test_a_pick_is_ranked_among_the_guesses() -> None:
    """Gaps behind the best guess; a guess that truncation left out is far behind."""
    guesses = Candidates([7, 3, 5], [0.4, 0.4, 1.234])
    assert Picked.among(guesses, 3) == Picked(1, (0.4, 1.23, *[99.0] * 5))
    assert Picked.among(guesses, 4).rank == MISSED
    assert [Picked.among(guesses, 7).gap(guess) for guess in (0, 1, 2, 3)] == [0.4, 0.4, 1.23, 99.0]
