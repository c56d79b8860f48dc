"""Tests the NPU's path, emulated on the CPU: transformers' logits in any tree, after any rollback; options, errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops
from tests.conftest import TINY_VOCAB
from tests.tiny_models import FAMILIES

from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes import open_sequence_runtime, openvino_npu, sequence_kind
from outrider.models.runtimes.base import BranchingRuntime, RuntimeOptions, SequenceRuntime
from outrider.models.runtimes.openvino_graph import run_request
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime
from outrider.models.runtimes.torch_loading import load_causal_lm

# Weights and cache in f16: at most 0.004 on logits of +-4; a stale or shifted slot is off by 0.5 or more.
TOLERANCE = 0.01
SHAPES = StaticShapes(prompt_len=64, response_len=64, step_len=8)
OPTIONS = RuntimeOptions(device="NPU", num_threads=1, static_shapes=SHAPES, emulate_npu=True)
RNG = np.random.default_rng(7)
FIRST = RNG.integers(0, TINY_VOCAB, 120).tolist()
SECOND = RNG.integers(0, TINY_VOCAB, 120).tolist()

Truth = Callable[[list[int]], NDArray[np.float32]]


def truth_of(path: Path, attention: str = "sdpa") -> Truth:
    model = load_causal_lm(path, torch.float32, attention)

    def logits(tokens: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            found: NDArray[np.float32] = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        return found

    return logits


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


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE


def test_the_limits_are_what_was_asked_for(runtime: OpenVinoNpuRuntime) -> None:
    """Prompt and response together; the slots for branches come on top."""
    assert isinstance(runtime, SequenceRuntime) and isinstance(runtime, BranchingRuntime)
    assert (runtime.limits.vocab_size, runtime.limits.max_positions) == (TINY_VOCAB, 64 + 64)
    assert runtime.max_branches == 8
    assert runtime.provider == "NPU path emulated on the CPU"


def test_prompt_single_tokens_and_several_at_once(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """A prompt in one pass, then cached steps of one token, of some, and of more than a step takes."""
    assert_close(runtime.extend(FIRST[:40]), truth(FIRST[:40])[-1])
    for length in (41, 42, 43):
        assert_close(runtime.extend(FIRST[length - 1 : length]), truth(FIRST[:length])[-1])
    assert_close(runtime.extend(FIRST[43:48]), truth(FIRST[:48])[-1])
    assert_close(runtime.extend_rows(FIRST[48:56]), truth(FIRST[:56])[-8:])
    assert_close(runtime.extend_rows(FIRST[56:75]), truth(FIRST[:75])[-19:])
    assert_close(runtime.extend(FIRST[75:100]), truth(FIRST[:100])[-1])
    assert runtime.length == 100


def test_a_prompt_longer_than_its_pass(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """What does not fit one pass runs in the next, up to the longest sequence."""
    assert_close(runtime.extend(FIRST), truth(FIRST)[-1])
    assert_close(runtime.extend(SECOND[:8]), truth(FIRST + SECOND[:8])[-1])
    assert runtime.length == runtime.limits.max_positions == 128
    with pytest.raises(ConfigError, match="129 tokens do not fit the 128 positions"):
        runtime.extend([1])
    runtime.truncate(112)
    assert_close(runtime.extend_rows(SECOND[:8]), truth(FIRST[:112] + SECOND[:8])[-8:])


def test_every_row_of_a_prompt(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """All rows of a prompt on request; afterwards the sequence continues as after an ordinary prompt."""
    assert_close(runtime.extend_rows(FIRST[:50]), truth(FIRST[:50]))
    assert_close(runtime.extend_rows(FIRST[50:53]), truth(FIRST[:53])[-3:])
    runtime.truncate(0)
    assert_close(runtime.extend_rows(SECOND[:90]), truth(SECOND[:90]))
    runtime.truncate(0)
    assert_close(runtime.extend_rows(FIRST[:2]), truth(FIRST[:2]))


def test_rejected_tokens_leave_no_trace(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """Rollbacks one after the other, deeper and deeper, each followed by fewer tokens than were dropped."""
    runtime.extend(FIRST[:45])
    runtime.extend(FIRST[45:75])
    kept = FIRST[:75]
    for length, tokens in ((70, SECOND[:3]), (72, SECOND[3:4]), (60, SECOND[4:10]), (50, SECOND[10:12])):
        runtime.truncate(length)
        kept = kept[:length] + tokens
        assert_close(runtime.extend_rows(tokens), truth(kept)[-len(tokens) :])
    kept += SECOND[20:60]
    assert_close(runtime.extend(SECOND[20:60]), truth(kept)[-1])  # grows over the dropped tokens


def test_a_rollback_into_the_prompt(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """Right after the prompt, and later, down to one token."""
    runtime.extend(FIRST[:60])
    runtime.truncate(20)
    assert_close(runtime.extend_rows(SECOND[:3]), truth(FIRST[:20] + SECOND[:3])[-3:])
    runtime.truncate(10)
    assert_close(runtime.extend_rows(SECOND[3:9]), truth(FIRST[:10] + SECOND[3:9])[-6:])
    runtime.truncate(1)
    assert_close(runtime.extend_rows(SECOND[9:11]), truth(FIRST[:1] + SECOND[9:11])[-2:])


def test_a_full_prompt_can_be_rolled_back_too(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """Cut right after a prompt that fills its pass."""
    runtime.extend(FIRST[:64])
    runtime.truncate(63)
    assert_close(runtime.extend(SECOND[:1]), truth(FIRST[:63] + SECOND[:1])[-1])


def test_a_new_prompt_after_an_old_one(runtime: OpenVinoNpuRuntime, truth: Truth) -> None:
    """From an empty cache again: a prompt, a single token, and a prompt with no cached step after it."""
    runtime.extend(FIRST[:50])
    runtime.truncate(0)
    assert_close(runtime.extend(SECOND[:1]), truth(SECOND[:1])[-1])
    assert_close(runtime.extend(SECOND[1:5]), truth(SECOND[:5])[-1])
    runtime.truncate(0)
    assert_close(runtime.extend(FIRST[:30]), truth(FIRST[:30])[-1])
    runtime.truncate(0)
    assert_close(runtime.extend(SECOND[:40]), truth(SECOND[:40])[-1])
    assert_close(runtime.extend(SECOND[40:45]), truth(SECOND[:45])[-1])


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


@pytest.mark.parametrize("other", ["olmo2", "opt", "xglm"])
def test_families_with_masks_of_another_kind(
    other: str, tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    """Of true and false, and added before a softmax of its own; rows that nothing uses must not become NaN."""
    truth = truth_of(tiny_model(other), "eager")
    runtime = OpenVinoNpuRuntime(tiny_ir(other), OPTIONS)
    assert_close(runtime.extend_rows(FIRST[:40]), truth(FIRST[:40]))
    assert_close(runtime.extend(FIRST[40:41]), truth(FIRST[:41])[-1])
    assert_close(runtime.extend_rows(FIRST[41:47]), truth(FIRST[:47])[-6:])
    runtime.truncate(43)
    assert_close(runtime.extend_rows(SECOND[:5]), truth(FIRST[:43] + SECOND[:5])[-5:])
    runtime.close()


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
    runtime.close()
    usual.close()


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
    tree = [[1], [2], [1, 3], [1, 4], [2, 5], [1, 3, 6]]
    runtime.extend_branches(tree)
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
    runtime.close()


@pytest.mark.parametrize(("other", "step_len"), [("cohere2", 8), ("cohere2", 4), ("mistral", 8)])
def test_windows_are_those_of_positions_not_of_slots(
    other: str, step_len: int, tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    """Beyond a sliding window of 32, of every layer and of every second one: in prompts, in trees, after a fork. Also
    with as many tokens in a pass as an attention has heads, where the CPU's fused kernels are wrong.
    """
    truth = truth_of(tiny_model(other))
    shapes = replace_shapes(step_len=step_len)
    runtime = OpenVinoNpuRuntime(tiny_ir(other), replace(OPTIONS, static_shapes=shapes))
    assert runtime._step.windows == ((0, 32) if other == "cohere2" else (32,))
    assert_close(runtime.extend_rows(FIRST[:70]), truth(FIRST[:70]))
    for ways in ([SECOND[:2], SECOND[:1], [3]], [[3, 4], [3, 5], [*SECOND[:2], 6]]):
        assert_close(runtime.extend_branches(ways), np.stack([truth(FIRST[:70] + way)[-1] for way in ways]))
    assert_close(runtime.extend([3, 5, 7]), truth([*FIRST[:70], 3, 5, 7])[-1])
    runtime.truncate(40)
    assert_close(runtime.extend(SECOND[:30]), truth(FIRST[:40] + SECOND[:30])[-1])
    runtime.close()


def test_steps_of_one_token(tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]) -> None:
    """A draft may be compiled for single tokens: then it takes no branches, and several tokens run one by one."""
    truth = truth_of(tiny_model("qwen2"))
    runtime = OpenVinoNpuRuntime(tiny_ir("qwen2"), replace(OPTIONS, static_shapes=replace_shapes(step_len=1)))
    assert runtime.max_branches == 1
    assert_close(runtime.extend_rows(FIRST[:20]), truth(FIRST[:20]))
    runtime.truncate(18)
    assert_close(runtime.extend_rows(SECOND[:4]), truth(FIRST[:18] + SECOND[:4])[-4:])
    runtime.close()


def replace_shapes(**lengths: int) -> StaticShapes:
    return SHAPES.model_copy(update=lengths)


def test_the_models_own_limit_binds(tiny_ir: Callable[..., Path]) -> None:
    """`max_positions` of the options or of the model's config, if less than the compiled lengths."""
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), replace(OPTIONS, max_positions=40))
    assert runtime.limits.max_positions == 40
    runtime.close()


@pytest.mark.parametrize("step_len", [4, 100])
def test_odd_lengths(step_len: int, tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]) -> None:
    """Any lengths hold as they were asked for; a pass as long as a prompt's is the only graph."""
    truth = truth_of(tiny_model("llama"))
    shapes = StaticShapes(prompt_len=100, response_len=10, step_len=step_len)
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), replace(OPTIONS, static_shapes=shapes))
    assert runtime.limits.max_positions == 110 and (runtime._prompt is None) == (step_len == 100)
    assert_close(runtime.extend_rows(FIRST[:66]), truth(FIRST[:66]))
    runtime.truncate(40)
    assert_close(runtime.extend_rows(SECOND[:5]), truth(FIRST[:40] + SECOND[:5])[-5:])
    assert_close(runtime.extend(SECOND[5:70]), truth(FIRST[:40] + SECOND[:70])[-1])
    runtime.close()


def test_a_short_text_takes_the_faster_graph(tiny_ir: Callable[..., Path]) -> None:
    """A prompt's pass counts as three steps until both were measured; then their times decide."""
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), OPTIONS)
    step, prompt = runtime._step, runtime._prompt
    assert prompt is not None
    assert [runtime._graph(length, length - 1) for length in (24, 25, 64, 90)] == [step, prompt, prompt, prompt]
    assert runtime._graph(64, 0) is step  # it gives the logits after every token
    step.fastest_s, prompt.fastest_s = 0.01, 0.055
    assert [runtime._graph(length, length - 1) for length in (40, 41)] == [step, prompt]
    runtime.close()


def test_compiled_models_are_kept(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """The second opening loads what the first compiled, with the same logits; a damaged file is compiled again."""
    options = replace(OPTIONS, cache_dir=str(tmp_path / "cache"))

    def logits() -> NDArray[np.float32]:
        runtime = OpenVinoNpuRuntime(tiny_ir("llama"), options)
        found = np.concatenate([runtime.extend(FIRST[:40]), runtime.extend(FIRST[40:45])])
        runtime.close()
        return found

    first = logits()
    kept = sorted((tmp_path / "cache").iterdir())  # of each graph one
    written = [path.stat().st_mtime_ns for path in kept]
    assert len(kept) == 2 and np.array_equal(logits(), first)
    assert kept == sorted((tmp_path / "cache").iterdir())
    assert written == [path.stat().st_mtime_ns for path in kept]
    kept[0].write_bytes(kept[0].read_bytes()[:1000])
    assert np.array_equal(logits(), first)
    assert kept[0].stat().st_size > 1000


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
    bloom = ov.Core().read_model(ir / "openvino_model.xml")
    positions = bloom.input("position_ids")
    counted = ops.add(ops.constant(np.zeros((1, 1), np.int64)), bloom.input("input_ids"))
    for reader in positions.get_target_inputs():
        reader.replace_source_output(counted.output(0))
    bloom.remove_parameter(positions.get_node())
    ov.save_model(bloom, tmp_path / "bloom.xml")
    with pytest.raises(BundleError, match=r"has no input position_ids.* such as Bloom"):
        OpenVinoNpuRuntime(tmp_path / "bloom.xml", replace(OPTIONS, max_positions=64))
    x = ops.parameter([-1, 4], np.float32, name="x")
    ov.save_model(ov.Model([ops.relu(x)], [x]), tmp_path / "openvino_model.xml")
    with pytest.raises(BundleError, match="has no KV cache"):
        OpenVinoNpuRuntime(tmp_path, replace(OPTIONS, max_positions=64))


def test_bad_tokens_and_lengths_are_our_bugs(runtime: OpenVinoNpuRuntime) -> None:
    """An id outside the vocabulary, no token at all, or a cut beyond the end never reaches the model."""
    for tokens in ([], [TINY_VOCAB], [-1]):
        with pytest.raises(AssertionError):
            runtime.extend(tokens)
    with pytest.raises(AssertionError):
        runtime.truncate(1)


def test_a_pass_that_went_wrong_leaves_nothing_behind(
    tiny_ir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that are no numbers are not kept: hidden slots count too, times 0. Closing frees all slots."""
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), OPTIONS)
    expected = runtime.extend(FIRST[:20]).copy()
    runtime.truncate(10)
    new = runtime._step._moves[0][1]

    def broken(request: Any) -> None:
        run_request(request)
        new[:] = np.inf

    with monkeypatch.context() as patched:
        patched.setattr(openvino_npu, "run_request", broken)
        runtime.extend(SECOND[:3])
    runtime.truncate(10)
    assert_close(runtime.extend(FIRST[10:20]), expected)
    cache = weakref.ref(next(iter(runtime._step.caches.values())))
    runtime.close()
    assert cache() is None
