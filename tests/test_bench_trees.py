"""Tests of what the measurements of trees rest on: the draft beside the target, the emulated pair, bounds, bodies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bench.attacks.tree_bytes import chain, fan, tree_bytes
from bench.beside import GUESSES, EmulatedPair, Stop, Turns
from bench.emulated import MAX_POSITIONS, EmulatedDraft, EmulatedTarget, Emulation, emulated_draft
from bench.known_text import SUCCESSOR
from bench.never_slower import Comparison, goals, misses
from bench.round_trips import PATH, TREE, WRONG, Cell, Place, Yardstick, rate_of
from bench.server_overhead import tree_of
from tests.ranks import read_ranks

from outrider.edge.lab.laboratory import CLOUD_ONLY
from outrider.edge.results import GenerationResult, Mode, Source
from outrider.export.check.acceptance import Continuation
from outrider.export.report.simulation.ranks import Picked, Ranks
from outrider.models.picks.sampling import SamplingParams, candidates, pick
from outrider.models.runtimes.base import BranchingRuntime, SequenceSlice
from outrider.models.wire.tree_draft import ROOT, decode_tree

NO_TIME = Emulation(0.0, 0.0, 0.0)
PARAMS = SamplingParams(temperature=0.8, seed=3)


@pytest.mark.parametrize("stop", [Stop(depth=1), Stop(depth=5), Stop(floor=0.2)], ids=str)
def test_the_draft_beside_the_target_writes_the_targets_text(stop: Stop) -> None:
    """However far a round drafts, and in fewer passes than tokens."""
    turns = Turns(*EmulatedPair(NO_TIME)())
    plain = turns.generate([5, 6, 7], PARAMS, 40, Stop(floor=2.0))
    found = turns.generate([5, 6, 7], PARAMS, 40, stop)
    assert found.tokens == plain.tokens and len(found.tokens) == len(found.arrival_s) == 40
    assert found.num_passes + found.num_accepted == 40 and found.num_passes < 40


def test_a_round_by_gaps_drafts_at_least_once_and_stops_at_the_floor() -> None:
    """A floor that no path reaches drafts one token and looks at the second."""
    found = Turns(*EmulatedPair(NO_TIME)()).generate([5, 6, 7], PARAMS, 30, Stop(floor=1.0))
    rounds = found.num_passes - 1
    assert rounds <= found.num_drafted <= 2 * rounds


def test_ranks_are_measured_along_the_given_texts() -> None:
    """One record per token; the draft's own pick counts as rank 0."""
    turns = Turns(*EmulatedPair(NO_TIME)())
    written = turns.generate([5, 6, 7], PARAMS, 30, Stop(depth=4))
    (found,) = turns.ranks([Continuation((5, 6, 7), written.tokens, PARAMS)])
    assert len(found) == 30 and sum(token.rank == 0 for token in found) >= written.num_accepted


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
    draft.extend([1, 2])
    alone.extend([1, 2])
    rows = draft.extend_branches([[3], [4, 5]])
    assert draft.length == 2
    assert (rows[0] == alone.extend([3])).all()
    alone.truncate(2)
    assert (rows[1] == alone.extend([4, 5])).all()


def _text(ms_per_token: float) -> GenerationResult:
    arrival_s = tuple(index * ms_per_token / 1e3 for index in range(11))
    return GenerationResult(Mode.STREAM, tuple(range(11)), (Source.TARGET,) * 11, arrival_s, "length", 11, 0, 0, 0)


def _comparison(rtt_ms: float, **speed_ups: float) -> Comparison:
    """A round trip with these speed-ups over a step of 40 ms."""
    cells = {}
    for name, speed_up in {CLOUD_ONLY: 1.0, **speed_ups}.items():
        text = _text(40.0 / speed_up)
        cells[name] = Cell(texts=[text], rates=[rate_of([text.arrival_s])], ratios=[speed_up])
    yardstick = Yardstick(None, rates={"depth": [25.0 * 2.0]})  # type: ignore[arg-type]
    return Comparison(Place(rtt_ms, {}, {}, cells), yardstick, None)


def test_bounds_hold_tree_against_path_and_cloud_only() -> None:
    """1.15 over the path at 50 ms, and the floor for an always-wrong tree."""
    assert misses(_comparison(50.0, **{PATH: 1.5, TREE: 1.8, WRONG: 1.0})) == []
    slow = _comparison(50.0, **{PATH: 1.6, TREE: 1.8, WRONG: 1.0})
    assert misses(slow) == ["RTT 50 ms: tree over path is 1.125, expected at least 1.15"]
    wrong = _comparison(50.0, **{PATH: 1.5, TREE: 1.8, WRONG: 0.96})
    assert misses(wrong) == ["RTT 50 ms: an always-wrong tree over cloud-only is 0.960, expected at least 0.97"]


def test_goals_compare_with_the_draft_beside_the_target() -> None:
    """The line gives the round trip in steps, and says whether the goal is reached."""
    (line,) = goals(_comparison(10.0, **{PATH: 1.5, TREE: 1.8, WRONG: 1.0}))
    assert line.startswith("RTT 10 ms (0.25 steps): tree is 0.900 of") and line.endswith("goal 0.97 missed")
    assert goals(_comparison(100.0, **{PATH: 1.5, TREE: 1.8, WRONG: 1.0})) == []


def test_the_overheads_tree_holds_the_right_path_and_nothing_else_that_is_right() -> None:
    """32 nodes, eight of them right."""
    tree = decode_tree(tree_of(300, 70_000, 17))
    assert (tree.base, tree.first, len(tree.tokens)) == (300, 70_000, 32)
    right = {ROOT: 17}
    for number, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=tree.first):
        if parent in right and token == SUCCESSOR[right[parent]]:
            right[number] = token
    assert len(right) - 1 == 8


def test_the_attackers_trees_are_valid_messages() -> None:
    """Each chain node below the one before it, each child of a fan below the root."""
    rng = random.Random(0)
    deep = decode_tree(tree_bytes(3, 10, chain(512, rng)))
    assert deep.parents == [ROOT, *range(10, 521)] and set(deep.levels) == {15}
    wide = decode_tree(tree_bytes(3, 10, fan(512, rng)))
    assert set(wide.parents) == {ROOT} and len(set(wide.tokens)) == 512
    assert decode_tree(tree_bytes(0, 2_000_000, [(7, 1_000_000)])).parents == [1_000_000]
