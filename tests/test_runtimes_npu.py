"""Tests the NPU's path, emulated on the CPU: transformers' logits after any rollback; its options and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_sequence_runtime, sequence_kind
from outrider.models.runtimes.base import Reading, RuntimeOptions, SequenceRuntime
from outrider.models.runtimes.npu_compile import compiled_shapes
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime
from outrider.models.runtimes.torch_paged import load_causal_lm

# Weights and cache in f16: at most 0.004 on logits of +-4; a stale or shifted slot is off by 0.5 or more.
TOLERANCE = 0.01
SHAPES = StaticShapes(prompt_len=64, response_len=64, step_len=8)
OPTIONS = RuntimeOptions(device="NPU", num_threads=1, static_shapes=SHAPES, emulate_npu=True)
RNG = np.random.default_rng(7)
FIRST = RNG.integers(0, TINY_VOCAB, 120).tolist()
SECOND = RNG.integers(0, TINY_VOCAB, 120).tolist()

Truth = Callable[[list[int]], NDArray[np.float32]]


def truth_of(path: Path) -> Truth:
    model = load_causal_lm(path, torch.float32, "sdpa")

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


class CountingRequest:
    """An infer request that counts how often it runs."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.num_runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def infer(self, **options: Any) -> Any:
        self.num_runs += 1
        return self._request.infer(**options)


def test_the_limits_are_what_the_device_can_hold(runtime: OpenVinoNpuRuntime) -> None:
    """Prompt and response together, less one step: the plugin keeps these positions for the new tokens."""
    assert isinstance(runtime, SequenceRuntime)
    assert (runtime.limits.vocab_size, runtime.limits.max_positions) == (TINY_VOCAB, 64 + 64 - 8)
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
    """The rest of a prompt that does not fit one pass runs in cached steps, up to the longest sequence."""
    assert_close(runtime.extend(FIRST), truth(FIRST)[-1])
    assert runtime.length == runtime.limits.max_positions == 120
    with pytest.raises(ConfigError, match="121 tokens do not fit the 120 positions"):
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
    """Right after the prompt, when the plugin alone would keep its end, and later, down to one token."""
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


@pytest.mark.parametrize("other", ["olmo2", "opt"])
def test_padding_before_a_prompt_leaves_no_trace(
    other: str, tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    """Families whose masks are true and false: padded rows attend nothing, and must not become NaN."""
    truth = truth_of(tiny_model(other))
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


def test_a_rollback_runs_nothing(runtime: OpenVinoNpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback touches no tensor and the next step is one run; two, once, after a cut right behind a prompt."""
    counted = CountingRequest(runtime._request)
    monkeypatch.setattr(runtime, "_request", counted)
    runtime.extend(FIRST[:40])
    assert counted.num_runs == 1
    runtime.truncate(30)
    assert counted.num_runs == 1
    runtime.extend(SECOND[:8])
    assert counted.num_runs == 3
    for _ in range(3):
        runtime.truncate(30)
        runtime.extend(SECOND[:8])
    assert counted.num_runs == 6


def test_prompts_in_chunks_and_odd_lengths(tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]) -> None:
    """The plugin may split a prompt's pass into chunks and rounds lengths up; the requested lengths still hold."""
    truth = truth_of(tiny_model("llama"))
    options = replace(
        OPTIONS,
        static_shapes=StaticShapes(prompt_len=100, response_len=10, step_len=5),
        properties={"NPUW_LLM_PREFILL_CHUNK_SIZE": "32"},
    )
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), options)
    assert runtime.limits.max_positions == 110
    assert_close(runtime.extend_rows(FIRST[:66]), truth(FIRST[:66]))
    runtime.truncate(40)
    assert_close(runtime.extend_rows(SECOND[:5]), truth(FIRST[:40] + SECOND[:5])[-5:])
    assert_close(runtime.extend(SECOND[5:70]), truth(FIRST[:40] + SECOND[:70])[-1])
    runtime.close()


def test_steps_of_one_token(tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]) -> None:
    """A draft may be compiled for single tokens; several then run one by one, with an f32 cache."""
    truth = truth_of(tiny_model("qwen2"))
    shapes = replace_shapes(step_len=1)
    runtime = OpenVinoNpuRuntime(
        tiny_ir("qwen2"), replace(OPTIONS, static_shapes=shapes, properties={"KV_CACHE_PRECISION": "f32"})
    )
    assert runtime.limits.max_positions == 127
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


def test_lengths_are_rounded_as_the_plugin_does() -> None:
    """Prompt and response to 64, steps of several tokens to 8; a step as long as the response leaves no cache."""
    odd = StaticShapes(prompt_len=100, response_len=65, step_len=5)
    assert compiled_shapes(odd) == StaticShapes(prompt_len=128, response_len=128, step_len=8)
    assert compiled_shapes(replace_shapes(step_len=1)) == replace_shapes(step_len=1)
    with pytest.raises(ConfigError, match="a step of 64 tokens leaves no room in a response of 64"):
        compiled_shapes(replace_shapes(step_len=60))


def test_compiled_models_are_kept(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """The second opening loads what the first compiled, with the same logits; a damaged file is compiled again."""
    options = replace(OPTIONS, cache_dir=str(tmp_path / "cache"))

    def logits() -> NDArray[np.float32]:
        runtime = OpenVinoNpuRuntime(tiny_ir("llama"), options)
        found = np.concatenate([runtime.extend(FIRST[:40]), runtime.extend(FIRST[40:45])])
        runtime.close()
        return found

    first = logits()
    (kept,) = (tmp_path / "cache").iterdir()
    written = kept.stat().st_mtime_ns
    assert np.array_equal(logits(), first)
    assert [kept] == list((tmp_path / "cache").iterdir()) and kept.stat().st_mtime_ns == written
    kept.write_bytes(kept.read_bytes()[:1000])
    assert np.array_equal(logits(), first)
    assert kept.stat().st_size > 1000


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


@pytest.mark.parametrize("prompt", [10, 40])
def test_a_tree_is_drafted_by_rolling_back_to_the_fork(runtime: OpenVinoNpuRuntime, truth: Truth, prompt: int) -> None:
    """Nodes of a random tree in any order, one a call: cut back to what the last path shares with the next, then extend
    by the rest. Right after the prompt too, where the plugin would keep the wrong tokens of a cache that is cut back.
    """
    rng = np.random.default_rng(prompt)
    runtime.extend(FIRST[:prompt])
    runtime.truncate(prompt - 3)
    text = FIRST[: prompt - 3]
    tree: list[list[int]] = [[int(t) for t in rng.integers(0, TINY_VOCAB, 2)]]
    last: list[int] = []
    for _ in range(16):
        path = tree[-1]
        shared = next(
            (i for i, (a, b) in enumerate(zip(last, path, strict=False)) if a != b), min(len(last), len(path))
        )
        shared = min(shared, len(path) - 1)
        runtime.truncate(len(text) + shared)
        assert_close(runtime.extend(path[shared:]), truth(text + path)[-1])
        last = path
        tree.append([*tree[rng.integers(len(tree))][:30], int(rng.integers(TINY_VOCAB))])


def test_a_prompt_is_read_the_cheaper_way(tiny_ir: Callable[..., Path]) -> None:
    """In a pass from an empty cache, or in steps from what is shared: by the times of both, once they are measured."""
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), OPTIONS)
    prompt = runtime._prompt_len
    assert runtime.cheapest_reading(0, 40) == Reading(0, prompt)
    # A pass counts as a step for every 64 tokens until both were measured.
    assert runtime.cheapest_reading(1, 60) == Reading(0, prompt)
    assert runtime.cheapest_reading(52, 60) == Reading(52, 64)
    # What a pass cannot hold takes steps either way.
    assert runtime.cheapest_reading(prompt, prompt + 8) == Reading(prompt, 64)
    runtime._pass_s, runtime._step_s = 1.0, 0.01  # a slow pass
    assert runtime.cheapest_reading(1, 60) == Reading(1, 64)
    runtime._pass_s = 0.03
    assert runtime.cheapest_reading(1, 60) == Reading(0, prompt)
    assert runtime.cheapest_reading(40, 60) == Reading(40, 64)
    runtime.close()


def test_a_shared_token_does_not_turn_a_prompt_into_steps(tiny_ir: Callable[..., Path]) -> None:
    """A drafter reads a long prompt that shares its first token with the text before in one pass."""
    runtime = OpenVinoNpuRuntime(tiny_ir("llama"), OPTIONS)
    passes: list[int] = []
    prefill = runtime._prefill

    def counted(tokens: Sequence[int]) -> NDArray[np.float32]:
        passes.append(len(tokens))
        return prefill(tokens)

    runtime._prefill = counted  # type: ignore[method-assign]
    drafter = ModelDrafter(runtime)
    for prompt in (FIRST[:40], [FIRST[0], *SECOND[:50]]):
        drafter.begin(prompt, SamplingParams())
        assert not drafter.is_behind
        drafter.guess([[]], 1)
    assert passes == [40, 51]
    drafter.close()
