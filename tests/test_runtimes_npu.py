"""Tests the NPU's path, emulated on the CPU: transformers' logits in any tree, after any rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import TINY_VOCAB
from tests.npu_path import FIRST, OPTIONS, SECOND, Truth, assert_close, truth_of
from tests.tiny_models import FAMILIES

from outrider.models.errors import ConfigError
from outrider.models.runtimes import open_sequence_runtime, sequence_kind
from outrider.models.runtimes.base import BranchingRuntime, SequenceRuntime
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def truth(family: str, tiny_model: Callable[[str], Path]) -> Truth:
    return truth_of(tiny_model(family))


@pytest.fixture(scope="module")
def opened(family: str, tiny_ir: Callable[..., Path]) -> Iterator[SequenceRuntime]:
    made = open_sequence_runtime(sequence_kind("openvino", "npu"), tiny_ir(family), OPTIONS)
    yield made
    made.close()
    made.close()


@pytest.fixture
def runtime(opened: OpenVinoNpuRuntime) -> OpenVinoNpuRuntime:
    opened.truncate(0)
    return opened


def test_the_limits_are_what_was_asked_for(runtime: OpenVinoNpuRuntime) -> None:
    """Prompt and response together; the slots for branches come on top."""
    assert isinstance(runtime, SequenceRuntime) and isinstance(runtime, BranchingRuntime)
    assert (runtime.limits.vocab_size, runtime.limits.max_positions) == (TINY_VOCAB, 64 + 64)
    assert runtime.max_branches == 8
    assert runtime.provider == "NPU path emulated on the CPU"


WALKS: dict[str, list[tuple[int, list[int], bool]]] = {
    "steps of one, of some, and of more than a pass takes": [
        *(
            (length, FIRST[length : length + num], False)
            for length, num in ((0, 40), (40, 1), (41, 1), (42, 1), (43, 5))
        ),
        *((48, FIRST[48:56], True), (56, FIRST[56:75], True), (75, FIRST[75:100], False)),
    ],
    "longer than a pass, up to the longest": [(0, FIRST, False), (120, SECOND[:8], False), (112, SECOND[:8], True)],
    "every row of a prompt": [
        (0, FIRST[:50], True),
        (50, FIRST[50:53], True),
        (0, SECOND[:90], True),
        (0, [7, 8], True),
    ],
    "back, deeper and deeper, and on over what was dropped": [
        *((0, FIRST[:45], False), (45, FIRST[45:75], False), (70, SECOND[:3], True), (72, SECOND[3:4], True)),
        *((60, SECOND[4:10], True), (50, SECOND[10:12], True), (52, SECOND[20:60], False)),
    ],
    "back into the prompt": [
        (0, FIRST[:60], False),
        (20, SECOND[:3], True),
        (10, SECOND[3:9], True),
        (1, [7, 8], True),
    ],
    "back by one from a prompt that fills its pass": [(0, FIRST[:64], False), (63, SECOND[:1], False)],
    "a new prompt after an old one, with and without steps after it": [
        *((0, FIRST[:50], False), (0, SECOND[:1], False), (1, SECOND[1:5], False), (0, FIRST[:30], False)),
        *((0, SECOND[:40], False), (40, SECOND[40:45], False)),
    ],
}
"""Steps: how many tokens stay, the new ones, and whether all of their rows are asked for."""


@pytest.mark.parametrize("steps", WALKS.values(), ids=WALKS.keys())
def test_rows_are_those_of_the_tokens_that_stay(
    runtime: OpenVinoNpuRuntime, truth: Truth, steps: list[tuple[int, list[int], bool]]
) -> None:
    """Whatever was there before leaves no trace."""
    kept: list[int] = []
    for length, new, all_rows in steps:
        if length < len(kept):
            runtime.truncate(length)
        kept = kept[:length] + new
        if all_rows:
            assert_close(runtime.extend_rows(new), truth(kept)[-len(new) :])
        else:
            assert_close(runtime.extend(new), truth(kept)[-1])
        assert runtime.length == len(kept)


def test_more_tokens_than_positions_are_refused(runtime: OpenVinoNpuRuntime) -> None:
    """And nothing has changed."""
    runtime.extend((FIRST + SECOND)[:128])
    with pytest.raises(ConfigError, match="129 tokens do not fit the 128 positions"):
        runtime.extend([1])
    assert runtime.length == runtime.limits.max_positions == 128


def test_a_random_walk(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """After random growth and rollbacks, the rows are always those of one pass over the remaining tokens."""
    walk = np.random.default_rng(11)
    kept: list[int] = []
    num_checked = 0
    for _ in range(60):
        if kept and walk.random() < 0.45:
            near = len(kept) - int(walk.integers(0, 9))
            kept = kept[: max(0, near if walk.random() < 0.6 else int(walk.integers(0, len(kept))))]
            runtime.truncate(len(kept))
        num_new = min(int(walk.choice([1, 2, 5, 8, 9, 30])), runtime.limits.max_positions - len(kept))
        new = walk.integers(0, TINY_VOCAB, num_new).tolist()
        if not new:
            continue
        kept += new
        if walk.random() < 0.5:
            assert_close(runtime.extend_rows(new), truth(kept)[-num_new:])
        else:
            assert_close(runtime.extend(new), truth(kept)[-1])
        num_checked += 1
    assert num_checked > 40 and runtime.length == len(kept)


class CountingRequest:
    """An infer request that counts how often it runs."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.num_runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def start_async(self, **options: Any) -> Any:
        self.num_runs += 1
        return self._request.start_async(**options)


def test_a_rollback_and_a_commit_run_nothing(runtime: OpenVinoNpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback touches no tensor; a tree of as many nodes as a pass takes is one run, whatever forks in it."""
    assert runtime._prompt is not None
    step, prompt = CountingRequest(runtime._step.request), CountingRequest(runtime._prompt.request)
    for graph, request in ((runtime._step, step), (runtime._prompt, prompt)):
        monkeypatch.setattr(graph, "request", request)
        monkeypatch.setattr(graph, "fastest_s", 1e-9)  # so a prompt's pass is as fast as a step
    runtime.extend(FIRST[:40])
    assert (prompt.num_runs, step.num_runs) == (1, 0)
    runtime.truncate(30)
    runtime.extend(SECOND[:8])
    assert step.num_runs == 1
    runtime.extend_branches([[1], [2], [1, 3], [1, 4], [2, 5], [1, 3, 6]])
    assert step.num_runs == 2
    runtime.extend_branches([[1, 3, 7], [2, 5, 8]])  # two new nodes, whose ways are kept
    assert step.num_runs == 3
    runtime.extend([1, 3, 7])  # the last runs once more, for its logits
    assert (prompt.num_runs, step.num_runs) == (1, 4)


def test_a_tree_that_is_larger_than_a_pass(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """Eight ways of up to five new tokens, several of which go on from others, run in as many passes as they need."""
    runtime.extend(FIRST[:20])
    ways = [SECOND[:5], SECOND[:3], [*SECOND[:3], 7, 8], [9], [9, 10, 11, 12], [9, 10], [13, 14, 15], SECOND[:5]]
    expected = np.stack([truth(FIRST[:20] + way)[-1] for way in ways])
    assert_close(runtime.extend_branches(ways), expected)
    assert_close(runtime.extend([9, 10, 16]), truth([*FIRST[:20], 9, 10, 16])[-1])


def test_a_random_tree(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """Nodes anywhere in a growing tree, several a call; then one way is taken over, or the text is cut back."""
    walk = np.random.default_rng(5)
    text = FIRST[:30]
    runtime.extend(text)
    for _ in range(5):
        tree: list[list[int]] = [[]]
        for _ in range(4):
            new = [
                [*tree[walk.integers(len(tree))], int(walk.integers(TINY_VOCAB))] for _ in range(walk.integers(1, 9))
            ]
            assert_close(runtime.extend_branches(new), np.stack([truth(text + way)[-1] for way in new]))
            tree += new
        taken = tree[walk.integers(1, len(tree))]
        text = text + taken
        assert_close(runtime.extend(taken), truth(text)[-1])
        if walk.random() < 0.5:
            text = text[: len(text) - int(walk.integers(1, 9))]
            runtime.truncate(len(text))
        if len(text) > 100:
            text = text[:20]
            runtime.truncate(20)


def test_bad_tokens_and_lengths_are_our_bugs(runtime: OpenVinoNpuRuntime) -> None:
    """An id outside the vocabulary, no token at all, or a cut beyond the end never reaches the model."""
    for tokens in ([], [TINY_VOCAB], [-1]):
        with pytest.raises(AssertionError):
            runtime.extend(tokens)
    with pytest.raises(AssertionError):
        runtime.truncate(1)
