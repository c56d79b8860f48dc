"""Tests the NPU's path, emulated on the CPU: transformers' logits in any tree, after any rollback, in any family.

Then its graphs: lengths and weights, what is kept on disk, options, errors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops
from tests.conftest import TINY_VOCAB
from tests.npu_path import FIRST, OPTIONS, SECOND, TOLERANCE, Truth, assert_close, replace_shapes, truth_of
from tests.tiny_models import FAMILIES

from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes import open_sequence_runtime, openvino_npu, sequence_kind
from outrider.models.runtimes.base import BranchingRuntime, RuntimeOptions, SequenceRuntime
from outrider.models.runtimes.openvino_graph import run_request
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
    assert (runtime.limits.vocab_size, runtime.limits.max_positions, runtime.max_branches) == (TINY_VOCAB, 64 + 64, 8)
    assert runtime.provider == "NPU path emulated on the CPU"
    for tokens in ([], [TINY_VOCAB], [-1]):  # our bugs: they never reach the model
        with pytest.raises(AssertionError):
            runtime.extend(tokens)
    with pytest.raises(AssertionError):
        runtime.truncate(1)


Step = tuple[int, list[int], bool]
"""How many tokens stay, the new ones, and whether all of their rows are asked for."""


def random_walk(num_steps: int = 45) -> Iterator[Step]:
    """Growth and rollbacks."""
    walk, length = np.random.default_rng(11), 0
    for _ in range(num_steps):
        if length and walk.random() < 0.5:
            near = length - int(walk.integers(0, 9))
            length = max(0, near if walk.random() < 0.6 else int(walk.integers(0, length)))
        length = min(length, 127)
        num_new = min(int(walk.choice([1, 2, 5, 8, 9, 30])), 128 - length)
        yield length, walk.integers(0, TINY_VOCAB, num_new).tolist(), walk.random() < 0.5
        length += num_new


WALKS: dict[str, list[Step]] = {
    "steps of one, of some, and of more than a pass takes": [
        *((at, FIRST[at : at + num], False) for at, num in ((0, 40), (40, 1), (41, 1), (42, 1), (43, 5))),
        *((48, FIRST[48:56], True), (56, FIRST[56:75], True), (75, FIRST[75:100], False)),
    ],
    "longer than a pass, up to the longest": [(0, FIRST, False), (120, SECOND[:8], False), (112, SECOND[:8], True)],
    "every row of a prompt": [
        *((0, FIRST[:50], True), (50, FIRST[50:53], True), (0, SECOND[:90], True), (0, [7, 8], True)),
    ],
    "back, deeper and deeper, and on over what was dropped": [
        *((0, FIRST[:45], False), (45, FIRST[45:75], False), (70, SECOND[:3], True), (72, SECOND[3:4], True)),
        *((60, SECOND[4:10], True), (50, SECOND[10:12], True), (52, SECOND[20:60], False)),
    ],
    "back into the prompt": [
        *((0, FIRST[:60], False), (20, SECOND[:3], True), (10, SECOND[3:9], True), (1, [7, 8], True)),
    ],
    "back by one from a prompt that fills its pass": [(0, FIRST[:64], False), (63, SECOND[:1], False)],
    "a new prompt after an old one, with and without steps after it": [
        *((0, FIRST[:50], False), (0, SECOND[:1], False), (1, SECOND[1:5], False), (0, FIRST[:30], False)),
        *((0, SECOND[:40], False), (40, SECOND[40:45], False)),
    ],
    "at random": list(random_walk()),
}


@pytest.mark.parametrize("steps", WALKS.values(), ids=WALKS.keys())
def test_rows_are_those_of_the_tokens_that_stay(
    runtime: OpenVinoNpuRuntime, truth: Truth, steps: Sequence[Step]
) -> None:
    """Whatever was there before leaves no trace."""
    check_rows(runtime, truth, steps)


def check_rows(runtime: OpenVinoNpuRuntime, truth: Truth, steps: Sequence[Step]) -> None:
    """Takes these steps, from an empty text on."""
    kept: list[int] = []
    for length, new, all_rows in steps:
        if length < len(kept):
            runtime.truncate(length)
        kept = kept[:length] + new
        rows = runtime.extend_rows(new) if all_rows else runtime.extend(new)[None]
        assert_close(rows, truth(kept)[-len(new) if all_rows else -1 :])
        assert runtime.length == len(kept)


def test_a_rollback_and_a_commit_run_nothing(runtime: OpenVinoNpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback touches no tensor; a tree of as many nodes as a pass takes is one run, whatever forks in it."""
    assert runtime._prompt is not None
    step, prompt, runs = runtime._step, runtime._prompt, list[Any]()

    def noted(request: Any) -> None:
        runs.append(prompt if request is prompt.request else step)
        run_request(request)

    monkeypatch.setattr(openvino_npu, "run_request", noted)
    for graph in (step, prompt):
        monkeypatch.setattr(graph, "fastest_s", 1e-9)  # so a prompt's pass is as fast as a step
    runtime.extend(FIRST[:40])
    assert runs == [prompt]
    runtime.truncate(30)
    runtime.extend(SECOND[:8])
    assert runs[1:] == [step]
    runtime.extend_branches([[1], [2], [1, 3], [1, 4], [2, 5], [1, 3, 6]])
    assert runs[1:] == [step] * 2
    runtime.extend_branches([[1, 3, 7], [2, 5, 8]])  # two new nodes, whose ways are kept
    assert runs[1:] == [step] * 3
    runtime.extend([1, 3, 7])  # the last runs once more, for its logits
    assert runs[1:] == [step] * 4


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


@pytest.mark.parametrize("other", ["olmo2", "opt", "xglm"])
def test_families_with_masks_of_another_kind(
    other: str, tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    """Of true and false, and added before a softmax of its own; rows that nothing uses must not become NaN."""
    steps = [(0, FIRST[:40], True), (40, FIRST[40:41], False), (41, FIRST[41:47], True), (43, SECOND[:5], True)]
    check_rows(OpenVinoNpuRuntime(tiny_ir(other), OPTIONS), truth_of(tiny_model(other), "eager"), steps)


def test_quantized_weights_that_cannot_be_folded(tiny_ir: Callable[..., Path]) -> None:
    """GPT-2 multiplies over two axes, where the plugin's folding loses the scales; logits are those of the CPU's."""
    ir = tiny_ir("gpt2", int8=True)
    usual = open_sequence_runtime(
        "openvino", ir, RuntimeOptions(num_threads=1, properties={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"})
    )
    runtime = OpenVinoNpuRuntime(ir, OPTIONS)
    for begin, end in ((0, 40), (40, 41), (41, 47)):
        difference = runtime.extend(FIRST[begin:end]) - usual.extend(FIRST[begin:end])
        assert np.abs(difference).max() < 3 * TOLERANCE  # the scales are f16 too


def test_more_branches_than_slots(tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]) -> None:
    """What was used longest ago is forgotten, and runs again when it is asked for; the text is not."""
    truth = truth_of(tiny_model("llama"))
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), replace(OPTIONS, static_shapes=replace_shapes(response_len=8)))
    runtime.extend(FIRST[:60])
    nodes = [[first, second] for first in range(20) for second in range(8)]
    for at in range(0, len(nodes), 8):
        new = nodes[at : at + 8]
        assert_close(runtime.extend_branches(new)[-1], truth(FIRST[:60] + new[-1])[-1])
    assert_close(runtime.extend_branches([nodes[0]]), truth(FIRST[:60] + nodes[0])[-1:])
    assert_close(runtime.extend(nodes[0]), truth(FIRST[:60] + nodes[0])[-1])


@pytest.mark.parametrize(("other", "step_len"), [("cohere2", 8), ("cohere2", 4), ("mistral", 8)])
def test_windows_are_those_of_positions_not_of_slots(
    other: str, step_len: int, tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    """Beyond a sliding window of 32, of every layer and of every second one: in prompts, in trees, after a fork. Also
    with as many tokens in a pass as an attention has heads, where the CPU's fused kernels are wrong.
    """
    truth = truth_of(tiny_model(other))
    runtime = OpenVinoNpuRuntime(tiny_ir(other), replace(OPTIONS, static_shapes=replace_shapes(step_len=step_len)))
    assert runtime._step.windows == ((0, 32) if other == "cohere2" else (32,))
    assert_close(runtime.extend_rows(FIRST[:70]), truth(FIRST[:70]))
    for ways in ([SECOND[:2], SECOND[:1], [3]], [[3, 4], [3, 5], [*SECOND[:2], 6]]):
        assert_close(runtime.extend_branches(ways), np.stack([truth(FIRST[:70] + way)[-1] for way in ways]))
    assert_close(runtime.extend([3, 5, 7]), truth([*FIRST[:70], 3, 5, 7])[-1])
    runtime.truncate(40)
    assert_close(runtime.extend(SECOND[:30]), truth(FIRST[:40] + SECOND[:30])[-1])


@pytest.mark.parametrize(
    ("family", "shapes", "max_positions", "expected"),
    [
        ("qwen2", {"step_len": 1}, 0, (128, 1, True)),
        ("llama", {"prompt_len": 100, "response_len": 10, "step_len": 4}, 0, (110, 4, True)),
        ("llama", {"prompt_len": 100, "response_len": 10, "step_len": 100}, 0, (110, 100, False)),
        ("llama", {}, 90, (90, 8, True)),
        ("llama", {}, 40, (40, 8, True)),  # under a prompt's pass
    ],
)
def test_odd_lengths(
    family: str,
    shapes: dict[str, int],
    max_positions: int,
    expected: tuple[int, int, bool],
    tiny_ir: Callable[..., Path],
    tiny_model: Callable[[str], Path],
) -> None:
    """Any lengths hold as they were asked for, the least of all binds. A pass as long as a prompt's is the only graph;
    one of single tokens takes no branches, and several tokens run one by one.
    """
    options = replace(OPTIONS, static_shapes=replace_shapes(**shapes), max_positions=max_positions)
    runtime = OpenVinoNpuRuntime(tiny_ir(family), options)
    assert (runtime.limits.max_positions, runtime.max_branches, runtime._prompt is not None) == expected
    size = expected[0]  # every position is used
    first, kept = FIRST[: size * 3 // 5], size * 2 // 5
    steps = [(0, first, True), (kept, SECOND[:5], True), (kept + 5, SECOND[5 : size - kept], False)]
    check_rows(runtime, truth_of(tiny_model(family)), steps)
    with pytest.raises(ConfigError, match=f"{size + 1} tokens do not fit the {size} positions"):
        runtime.extend([1])
    assert runtime.length == size


def test_a_short_text_takes_the_faster_graph(tiny_ir: Callable[..., Path]) -> None:
    """A prompt's pass counts as three steps until both were measured; then their times decide."""
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), OPTIONS)
    step, prompt = runtime._step, runtime._prompt
    assert prompt is not None
    assert [runtime._graph(length, length - 1) for length in (24, 25, 64, 90)] == [step, prompt, prompt, prompt]
    assert runtime._graph(64, 0) is step  # it gives the logits after every token
    step.fastest_s, prompt.fastest_s = 0.01, 0.055
    assert [runtime._graph(length, length - 1) for length in (40, 41)] == [step, prompt]


def test_compiled_models_are_kept(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """The second opening loads what the first compiled, with the same logits; a damaged file is compiled again."""
    options = replace(OPTIONS, cache_dir=str(tmp_path / "cache"))

    def logits() -> NDArray[np.float32]:
        runtime = OpenVinoNpuRuntime(tiny_ir("llama"), options)
        return np.concatenate([runtime.extend(FIRST[:40]), runtime.extend(FIRST[40:45])])

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}

    first, kept = logits(), written()
    assert len(kept) == 2 and np.array_equal(logits(), first) and written() == kept  # of each graph one
    path = min(kept)
    path.write_bytes(path.read_bytes()[:1000])
    assert np.array_equal(logits(), first) and path.stat().st_size > 1000


def test_without_an_npu_it_says_what_would_help(tiny_ir: Callable[..., Path]) -> None:
    """No silent use of another device: the error lists the devices and what to do."""
    if any(device.startswith("NPU") for device in ov.Core().available_devices):
        pytest.skip("this machine has an NPU")
    with pytest.raises(RuntimeUnavailable, match=r"no NPU on this machine, only CPU.*driver.*--emulate-npu"):
        OpenVinoNpuRuntime(tiny_ir("llama"), replace(OPTIONS, emulate_npu=False))


def test_bad_options_and_files_are_named(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """Each mistake has its own error, which names the value."""
    ir = tiny_ir("llama")
    for wrong, message in (
        ({"static_shapes": None}, "give static_shapes"),
        ({"num_threads": -1}, "num_threads is -1"),
        ({"device": "GPU"}, "device is 'GPU'; expected NPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            OpenVinoNpuRuntime(ir, replace(OPTIONS, **wrong))
    with pytest.raises(BundleError, match=r"no OpenVINO model at .*; expected openvino_model\.xml"):
        OpenVinoNpuRuntime(tmp_path, OPTIONS)
    bloom, x = ov.Core().read_model(ir / "openvino_model.xml"), ops.parameter([-1, 4], np.float32, name="x")
    positions = bloom.input("position_ids")
    counted = ops.add(ops.constant(np.zeros((1, 1), np.int64)), bloom.input("input_ids"))
    for reader in positions.get_target_inputs():
        reader.replace_source_output(counted.output(0))
    bloom.remove_parameter(positions.get_node())
    for model, message in (
        (bloom, r"has no input position_ids.* such as Bloom"),
        (ov.Model([ops.relu(x)], [x]), "has no KV cache"),
    ):
        ov.save_model(model, tmp_path / "openvino_model.xml")
        with pytest.raises(BundleError, match=message):
            OpenVinoNpuRuntime(tmp_path, replace(OPTIONS, max_positions=64))


def test_a_pass_that_went_wrong_leaves_nothing_behind(tiny_ir: Callable[..., Path]) -> None:
    """Keys and values that are no numbers are not kept: hidden slots count too, times 0. Closing frees all slots."""
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), OPTIONS)
    expected = runtime.extend(FIRST[:20]).copy()
    runtime.truncate(10)
    new = runtime._step._moves[0][1]

    def broken(request: Any) -> None:
        run_request(request)
        new[:] = np.inf

    with patch.object(openvino_npu, "run_request", broken):
        runtime.extend(SECOND[:3])
    runtime.truncate(10)
    assert_close(runtime.extend(FIRST[10:20]), expected)
    cache = weakref.ref(next(iter(runtime._step.caches.values())))
    runtime.close()
    assert cache() is None
