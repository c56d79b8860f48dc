"""Tests what a step of vLLM's gets: drafts of the target's own heads beside the device's, and who has a place in it.

No vLLM runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from tests.engine_harness import Clock
from tests.test_vllm_parts import book, timed, verified

from outrider.cloud.pending.policy import NO_WAIT, Policy
from outrider.cloud.seam import DraftHints
from outrider.cloud.vllm.book import Book, Served
from outrider.cloud.vllm.heads import MTP, NUM_DRAFTED, Heads, heads_config
from outrider.cloud.vllm.step_shares import StepShares
from outrider.cloud.vllm.terms import Terms
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams

GREEDY = SamplingParams()
heads_book = partial(book, max_draft=8, has_heads=True)


def step(on: Book, served: Served, tokens: Sequence[int], heads: Sequence[int] = ()) -> list[int]:
    """A pass that commits `tokens`, after which the heads draft. Returns what it verified."""
    served.proposed = chosen = verified(on, served)
    on.committed(served, list(tokens), False)
    on.take_heads_draft(served, heads)
    on.learn()
    return chosen


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("LlamaForCausalLMEagle3", "eagle3"), ("Eagle3DraftModel", "eagle3"), ("EagleLlamaForCausalLM", "eagle")],
)
def test_a_directory_of_heads_says_how_they_draft(tmp_path: Path, architecture: str, method: str) -> None:
    """By its architecture."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    expected = {"method": method, "model": str(tmp_path.resolve()), "num_speculative_tokens": 16}
    expected["num_speculative_tokens_per_batch_size"] = [[1, 32, NUM_DRAFTED]]
    found = heads_config(str(tmp_path), 16, 32)
    assert found == found | expected


def test_what_needs_no_directory_and_what_is_no_head(tmp_path: Path) -> None:
    """MTP's are among the target's weights; a draft model of its own is the device's."""
    found = heads_config(MTP, 2, 32)
    assert found == found | {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 32, 2]]}
    assert "model" not in found
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="not EAGLE heads"):
        heads_config(str(tmp_path), 16, 32)


# -- beside the device's drafts --------------------------------------------------------------------------------------


def test_the_heads_fill_steps_for_which_the_device_sent_nothing() -> None:
    """And only the step after them: an older draft of theirs does not count, nor one of a text that is over. A newer
    draft replaces what is left of an older one, whose last tokens were guessed without the text since.
    """
    on, _ = heads_book()
    served = on.open(Terms(1, GREEDY, 40), [9])
    assert step(on, served, [1], [2, 3, 4, 5]) == []
    assert step(on, served, [2, 3, 4, 5, 6], [7, 8, 1, 2])[:2] == [2, 3]
    step(on, served, [7], [6, 7, 5, 1])
    first, second, *others = verified(on, served)
    assert (first, second) == (6, 7) and 8 not in others
    assert served.drafts.trie.num_nodes == served.drafts.trie.num_looked_up == 4
    assert step(on, served, [9], ()) and verified(on, served) == []
    on.close(served)
    on.take_heads_draft(served, [1])


@pytest.mark.parametrize("device_is_right", [False, True])
def test_the_likelier_draft_is_verified(device_is_right: bool) -> None:
    """The heads' where the device has been wrong, the device's where it has been right and is longer."""
    on, clock = heads_book()
    served = on.open(Terms(1, GREEDY, 400), [9])
    text = [n % 50 for n in range(200)]
    for at in range(0, 90, 3):
        on.take_paths(1, at, [text[at : at + 8] if device_is_right else [77] * 8], clock.now)
        heads = [*text[at + 3 : at + 4], 88, 88, 88] if device_is_right else text[at + 3 : at + 7]
        chosen = step(on, served, text[at : at + 3], heads)
    assert chosen[:3] == text[87:90]


def test_items_and_probes_have_no_heads() -> None:
    """The ones bring their draft, the others measure."""
    on, _ = heads_book()
    item = on.open(Terms(1, GREEDY, 9, DraftHints((5, 6)), once=True), [9])
    probe = on.open(Terms(2, GREEDY, 9, probe=1), [9])
    for served in (item, probe):
        on.take_heads_draft(served, [1, 2, 3])
    assert verified(on, item) == [5, 6] and verified(on, probe) == [0]


def test_a_wait_ends_with_a_draft_that_is_worth_a_step() -> None:
    """A sequence waits for its device; the heads' draft comes first, and has been right."""
    on, clock = heads_book(policy=Policy.AUTO)
    timed(on, (1, 0.050), (5, 0.051))
    served = on.open(Terms(1, GREEDY, 400, DraftHints(lag_ms=5.0)), [9])
    for at in range(0, 80, 4):  # the rates are learned, the device's included
        on.take_paths(1, at, [[at, at + 1, 77, 77]], clock.now)
        step(on, served, range(at, at + 4), range(at + 4, at + 8))
    served.proposed = verified(on, served)
    on.committed(served, list(range(80, 85)), False)
    assert served.drafts.wait is not NO_WAIT and on.waiting([served], clock.now, 1) == {served}
    on.take_heads_draft(served, [85, 86, 87, 88])
    assert on.waiting([served], clock.now, 1) == set() and verified(on, served) == [85, 86, 87, 88]


# -- when they draft -------------------------------------------------------------------------------------------------


def measured(ratio: float) -> tuple[Heads, Book, Clock]:
    """Heads whose drafts make a step so much longer."""
    on, clock = heads_book()
    heads = Heads(8, clock)
    probe = on.open(Terms(99, GREEDY, 40, probe=1), [9])
    for _ in range(9):
        heads.draft_after([probe.drafts], is_probing=True)
        clock.now += 0.02 * (ratio if heads.num_drafted else 1.0)
    assert heads.ratio == pytest.approx(ratio)
    return heads, on, clock


@pytest.mark.parametrize(("ratio", "drafts"), [(1.2, NUM_DRAFTED), (6.0, 0)])
def test_they_draft_where_the_device_is_silent(ratio: float, drafts: int) -> None:
    """After a step in which anybody goes on; not where a step of three times the length, or more, has at most four
    tokens that are seldom right.
    """
    heads, on, _ = measured(ratio)
    served = on.open(Terms(1, GREEDY, 40), [9])
    assert [heads.draft_after([served.drafts], is_probing=False) for _ in range(60)] == [drafts] * 60
    assert heads.draft_after([], is_probing=False) == 0


def test_they_rest_where_the_device_drafts_better_and_are_tried_again() -> None:
    """Their time is worth it at once when the device falls silent."""
    heads, on, clock = measured(1.2)
    served = on.open(Terms(1, GREEDY, 4000), [9])
    drafted = []
    for at in range(0, 1000, 8):
        on.take_paths(1, at, [range(at, at + 12)], clock.now)
        verified(on, served)
        drafted.append(heads.draft_after([served.drafts], is_probing=False) > 0)
        on.committed(served, list(range(at, at + 8)), False)
        on.learn()
    for _ in range(40):
        on.committed(served, [7], False)
        on.learn()
        drafted.append(heads.draft_after([served.drafts], is_probing=False) > 0)
    assert 1 <= sum(drafted[30:-40]) <= 3 and all(drafted[-20:])


# -- places ------------------------------------------------------------------------------------------------------------
NUM_SLOTS: Final = 2


class Steps:
    """Steps of a scheduler with slots for two sequences."""

    def __init__(self) -> None:
        self.places = StepShares(num_places=NUM_SLOTS, step_tokens=64)
        self.running: set[Served] = set()
        self._book, self._numbers = book(policy=Policy.AUTO)[0], count(1)

    def open(self, owner: bytes, priority: int = 0) -> Served:
        served = self._book.open(Terms(next(self._numbers), GREEDY, 8, owner=owner, priority=priority), [1, 2, 3])
        self.places.open(served)
        return served

    def step(self, *, commits: bool = True) -> list[Served]:
        """The sequences that got a slot."""
        newcomers = self.places.newcomers(self._make_room)
        if commits:
            for served in self.running:
                self.places.committed(served)
        return newcomers

    def _make_room(self, served: Served, givers: Callable[[], list[Served]]) -> bool:
        if len(self.running) == NUM_SLOTS:
            if not (found := givers()):
                return False
            self.running.remove(found[0])
            self.places.returned(found[0])
        self.running.add(served)
        return True


def test_who_has_priority_waits_for_no_turn() -> None:
    """Others of its priority wait until a sequence had its turn; who has a higher one takes a slot at once."""
    steps = Steps()
    held = {steps.open(b"many"), steps.open(b"many")}
    assert set(steps.step(commits=False)) == held
    equal, urgent = steps.open(b"other"), steps.open(b"urgent", priority=5)
    assert steps.step() == []  # without a token nobody gives way: each admission commits one at least
    assert steps.step() == [urgent]
    assert {urgent} == steps.running - held and equal not in steps.running
    assert steps.step() == []  # nobody with a lower priority takes its slot, or another's before the turn


def test_prompts_have_at_most_a_steps_time_beside_another_owners_texts() -> None:
    """And beside three owners' a third of that on average; those of an owner alone have all there is."""
    steps = Steps()
    prompts = [steps.open(b"many"), steps.open(b"many")]
    texts = [steps.open(b"text %d" % i) for i in range(3)]
    for prompt in prompts:
        prompt.num_wanted = 1000
    added = np.arange(1, 257) / 20  # of a step, for 1, 2, ... tokens

    def given(num_texts: int) -> Counter[int]:
        found = Counter[int]()
        for _ in range(63):
            steps.step()
            found[sum(steps.places.prompt_shares(prompts, 256, texts[:num_texts], added).values())] += 1
        return found

    assert given(0) == {256: 63}
    assert [given(1) for _ in range(2)][1] == {0: 1, 20: 62}  # one step of 64 is timed without
    three = given(3)
    assert three.keys() == {0, 20} and 19 <= three[20] <= 22


@pytest.mark.parametrize("prompt", [2, 3, 16])
@pytest.mark.parametrize("at_once", [1, 8, 32])
def test_another_owners_verify_items_take_their_share_of_time(at_once: int, prompt: int) -> None:
    """However many it sends, at once or one after another: a step has one whole draft, for which its owner pays."""
    steps, added = Steps(), np.arange(1, 2049) / 20
    texts = [steps.open(b"text %d" % i) for i in range(3)]
    items: list[Served] = []
    totals, num_done = list[int](), 0
    for _ in range(600):
        while len(items) < at_once:
            items.append(steps.open(b"many"))
            items[-1].num_wanted, items[-1].num_drafted = prompt + 64, 64
        steps.step()
        shares = steps.places.prompt_shares(items, 2048, texts, added)
        totals.append(sum(shares.values()))
        for item, share in shares.items():
            item.num_wanted -= share
            assert item.num_wanted == 0 or item.num_wanted >= 66, "a draft that was cut, or one that nobody pays"
        for item in [item for item in items if not item.num_wanted]:
            items.remove(item)
            steps.places.close(item)
            num_done += 1
    assert max(totals) <= 20 + 64 + (prompt > 2)  # with a draft may go the last token of a longer prompt
    took_s = sum(totals) / 20
    assert 0.8 / 4 <= took_s / (600 + took_s) <= 1.25 / 4 and num_done >= 30
