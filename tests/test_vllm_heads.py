"""Tests how drafts of the target's own heads join the device's, and when they are asked for. No vLLM runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.engine_harness import Clock

from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.policy import NO_WAIT, Policy
from outrider.cloud.pending.trie import HEAD_KINDS, DraftTrie
from outrider.cloud.seam import DraftHints
from outrider.cloud.vllm.book import Book, Served
from outrider.cloud.vllm.heads import MTP, NUM_DRAFTED, Heads, heads_config
from outrider.cloud.vllm.terms import Terms
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams

GREEDY = SamplingParams()


def book(policy: Policy = Policy.VERIFY) -> tuple[Book, Clock]:
    clock = Clock()
    return Book(max_draft=8, policy=policy, looks_up=False, has_heads=True, clock=clock), clock


def verified(on: Book, served: Served) -> list[int]:
    return on.choose([served], 64, StepSize(1, 3), 3.0)[served]


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
    found = heads_config(str(tmp_path), 16, 32)
    assert (found["method"], found["model"]) == (method, str(tmp_path.resolve()))
    assert found["num_speculative_tokens"] == 16
    assert found["num_speculative_tokens_per_batch_size"] == [[1, 32, NUM_DRAFTED]]


def test_heads_among_the_targets_weights_need_no_directory() -> None:
    """MTP."""
    found = heads_config(MTP, 2, 32)
    assert found["method"] == "mtp" and "model" not in found
    assert found["num_speculative_tokens_per_batch_size"] == [[1, 32, 2]]


def test_a_model_that_is_no_head_is_refused(tmp_path: Path) -> None:
    """A draft model of its own is the device's."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="not EAGLE heads"):
        heads_config(str(tmp_path), 16, 32)


# -- beside the device's drafts --------------------------------------------------------------------------------------


def test_the_heads_fill_steps_for_which_the_device_sent_nothing() -> None:
    """And only the step after them: an older draft of theirs does not count, nor one of a text that is over."""
    on, _ = book()
    served = on.open(Terms(1, GREEDY, 40), [9])
    assert step(on, served, [1], [2, 3, 4, 5]) == []
    assert step(on, served, [2, 3, 4, 5, 6], [7, 8, 1, 2])[:2] == [2, 3]
    assert step(on, served, [9], ()) and verified(on, served) == []
    on.close(served)
    on.take_heads_draft(served, [1])


def test_a_newer_draft_replaces_what_is_left_of_an_older_one() -> None:
    """Its last tokens were guessed without the text since."""
    on, _ = book()
    served = on.open(Terms(1, GREEDY, 40), [9])
    step(on, served, [1], [2, 3, 4, 5])
    step(on, served, [2, 3], [6, 7, 8, 1])
    assert verified(on, served)[:2] == [6, 7] and 4 not in verified(on, served)


def test_the_likelier_draft_is_verified() -> None:
    """The heads' where the device has been wrong, the device's where it has been right and is longer."""
    for device_is_right in (False, True):
        on, clock = book()
        served = on.open(Terms(1, GREEDY, 400), [9])
        text = [n % 50 for n in range(200)]
        for at in range(0, 90, 3):
            on.take_paths(1, at, [text[at : at + 8] if device_is_right else [77] * 8], clock.now)
            heads = [*text[at + 3 : at + 4], 88, 88, 88] if device_is_right else text[at + 3 : at + 7]
            chosen = step(on, served, text[at : at + 3], heads)
        assert chosen[:3] == text[87:90]


def test_items_and_probes_have_no_heads() -> None:
    """The ones bring their draft, the others measure."""
    on, _ = book()
    item = on.open(Terms(1, GREEDY, 9, DraftHints((5, 6)), once=True), [9])
    probe = on.open(Terms(2, GREEDY, 9, probe=1), [9])
    for served in (item, probe):
        on.take_heads_draft(served, [1, 2, 3])
    assert verified(on, item) == [5, 6] and verified(on, probe) == [0]


def test_a_wait_ends_with_a_draft_that_is_worth_a_step() -> None:
    """A sequence waits for its device; the heads' draft comes first, and has been right."""
    on, clock = book(Policy.AUTO)
    on.stepped(StepSize(1, 3), 0.050, 0.0)
    on.stepped(StepSize(5, 15), 0.051, 0.0)
    on.learn()
    served = on.open(Terms(1, GREEDY, 400, DraftHints(lag_ms=5.0)), [9])
    for at in range(0, 80, 4):  # the rates are learned, the device's included
        on.take_paths(1, at, [[at, at + 1, 77, 77]], clock.now)
        step(on, served, range(at, at + 4), range(at + 4, at + 8))
    served.proposed = verified(on, served)
    on.committed(served, list(range(80, 85)), False)
    assert served.drafts.wait is not NO_WAIT and on.waiting([served], clock.now, 1) == {served}
    on.take_heads_draft(served, [85, 86, 87, 88])
    assert on.waiting([served], clock.now, 1) == set() and verified(on, served) == [85, 86, 87, 88]


def test_a_trie_is_emptied_with_its_counts() -> None:
    """What a device numbered in it is gone, too."""
    trie = DraftTrie()
    trie.merge([1, 2, 3], HEAD_KINDS)
    trie.clear()
    assert not trie and trie.num_looked_up == 0 and trie.likeliest(4) == []
    trie.clear()


# -- when they draft -------------------------------------------------------------------------------------------------


def measured(ratio: float) -> tuple[Heads, Book, Clock]:
    """Heads whose drafts make a step so much longer."""
    on, clock = book()
    heads = Heads(8, clock)
    probe = on.open(Terms(99, GREEDY, 40, probe=1), [9])
    for _ in range(9):
        heads.draft_after([probe.drafts], is_probing=True)
        clock.now += 0.02 * (ratio if heads.num_drafted else 1.0)
    assert heads.ratio == pytest.approx(ratio)
    return heads, on, clock


def test_they_draft_where_the_device_is_silent() -> None:
    """After a step in which anybody goes on."""
    heads, on, _ = measured(1.2)
    served = on.open(Terms(1, GREEDY, 40), [9])
    assert [heads.draft_after([served.drafts], is_probing=False) for _ in range(50)] == [NUM_DRAFTED] * 50
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
    assert 1 <= sum(drafted[30:]) <= 3
    silent = []
    for _ in range(40):
        on.committed(served, [7], False)
        on.learn()
        silent.append(heads.draft_after([served.drafts], is_probing=False) > 0)
    assert all(silent[20:])


def test_heads_that_take_too_long_rest() -> None:
    """A step of three times the length for at most four tokens that are seldom right."""
    heads, on, _ = measured(6.0)
    served = on.open(Terms(1, GREEDY, 40), [9])
    assert sum(heads.draft_after([served.drafts], is_probing=False) > 0 for _ in range(60)) == 0
