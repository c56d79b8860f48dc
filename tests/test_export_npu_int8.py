"""Tests exports with INT8 weights and activations for an NPU, and the text that they are calibrated with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tests.conftest import TINY_VOCAB
from tests.npu_path import walked

from outrider.export.convert.calibration import NUM_TEXTS, TEXT_TOKENS, complete_texts, quantize_fully
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime
from outrider.models.runtimes.torch_loading import load_causal_lm

XML = "openvino_model.xml"
NPU = RuntimeOptions(
    num_threads=1, emulate_npu=True, static_shapes=StaticShapes(prompt_len=64, response_len=64, step_len=8)
)
RNG = np.random.default_rng(5)
TOKENS = RNG.integers(0, TINY_VOCAB, 60).tolist()


@pytest.fixture(scope="module")
def fully_quantized(tiny_ir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("w8a8")
    quantize_fully(tiny_ir("qwen2"), directory, [TOKENS], "tiny")
    shutil.copyfile(tiny_ir("qwen2") / "config.json", directory / "config.json")
    return directory


def test_weights_and_activations_are_int8(fully_quantized: Path) -> None:
    """Every matrix is INT8, and what goes into every MatMul has a quantizer."""
    nodes = ov.Core().read_model(fully_quantized / XML).get_ordered_ops()
    matrices = [node for node in nodes if node.get_type_name() == "Constant" and len(node.get_output_shape(0)) == 2]
    assert {node.get_element_type().get_type_name() for node in matrices if node.get_data().size >= 512} == {"i8"}
    products = [node for node in nodes if node.get_type_name() == "MatMul" and node.get_attributes()["transpose_b"]]
    assert len(products) == 15
    for product in products:
        assert product.input_value(0).get_node().get_type_name() == "FakeQuantize"


def test_every_weight_of_full_int8_keeps_its_bound(fully_quantized: Path, tiny_model: Callable[[str], Path]) -> None:
    """Half of absmax / 127 of what smooth quantization made of the source: each column over what its activations are
    multiplied by. Activations have 256 levels over one range a tensor (docs/numerics.md).
    """
    source = load_file(tiny_model("qwen2") / "model.safetensors")
    source["lm_head.weight"] = source["model.embed_tokens.weight"]  # tied
    num_seen = num_smoothed = 0
    for node in ov.Core().read_model(fully_quantized / XML).get_ordered_ops():
        name = node.get_friendly_name().removeprefix("__module.").removesuffix("/aten::linear/MatMul") + ".weight"
        if node.get_type_name() != "MatMul" or name not in source:
            continue
        quantizer, product = (node.input_value(port).get_node() for port in (0, 1))
        low, high, *out = (quantizer.input_value(port).get_node().get_data() for port in range(1, 5))
        assert quantizer.get_attributes()["levels"] == 256 and low < high and [low, high] == out
        smoothing, columns = quantizer.input_value(0).get_node(), np.ones(1)
        if smoothing.get_friendly_name().endswith("nncf_smooth_quant"):  # not where a weight is read twice
            columns = smoothing.input_value(1).get_node().get_data().astype(np.float64).ravel()
            num_smoothed += 1
        smoothed = source[name].astype(np.float64) / columns
        integers, scale = (product.input_value(port).get_node() for port in (0, 1))
        stored = integers.input_value(0).get_node().get_data().astype(np.float64) * scale.get_data()
        step = np.abs(smoothed).max(axis=1, keepdims=True) / 127
        assert (np.abs(stored - smoothed) <= (0.5 + 2.0**-12) * step).all(), name
        num_seen += 1
    assert num_seen == num_smoothed + 1 == 15


def test_full_int8_runs_on_the_npus_path(fully_quantized: Path, tiny_model: Callable[[str], Path]) -> None:
    """Prompt, cached steps and rollback, near transformers' FP32; the cache starts empty and is its own."""
    model = load_causal_lm(tiny_model("qwen2"), torch.float32, "sdpa")
    found, expected = walked(OpenVinoNpuRuntime(fully_quantized, NPU), model, TOKENS)
    assert mean_kl(expected, found) < 0.01
    assert np.abs(found - expected).max() < 0.5


def mean_kl(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    log_p, log_q = (torch.log_softmax(torch.from_numpy(rows), -1) for rows in (expected, found))
    return float(torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean"))


def test_calibration_is_deterministic(fully_quantized: Path, tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """The same model and texts give the same files."""
    quantize_fully(tiny_ir("qwen2"), tmp_path, [TOKENS], "tiny")
    for name in (XML, "openvino_model.bin"):
        assert (tmp_path / name).read_bytes() == (fully_quantized / name).read_bytes()


def test_missing_text_is_written_by_the_model(tiny_ir: Callable[..., Path]) -> None:
    """Feeds are kept and continued, long ones cut; the rest begins all over the vocabulary; enough is left alone."""
    core = ov.Core()
    model = core.read_model(tiny_ir("llama") / XML)
    long = RNG.integers(0, TINY_VOCAB, TEXT_TOKENS + 5).tolist()
    texts = complete_texts(core, model, [TOKENS, long])
    assert [len(text) for text in texts] == [TEXT_TOKENS] * NUM_TEXTS
    assert texts[0][: len(TOKENS)] == TOKENS and texts[1] == long[:TEXT_TOKENS] and texts[2][:5] == long[TEXT_TOKENS:]
    assert len({text[0] for text in texts[3:]}) == NUM_TEXTS - 3
    assert all(0 <= token < TINY_VOCAB for text in texts for token in text)
    assert complete_texts(core, model, [TOKENS, long]) == texts
    assert complete_texts(core, model, texts) == texts


def test_a_continuation_is_sampled_from_the_model(
    tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    """Each written token is the pick from transformers' logits of what stands before it."""
    core = ov.Core()
    text = complete_texts(core, core.read_model(tiny_ir("llama") / XML), [TOKENS])[0]
    with torch.inference_mode():
        model = load_causal_lm(tiny_model("llama"), torch.float32, "sdpa")
        logits = model(torch.tensor([text]), use_cache=False).logits[0].numpy()
    written = range(len(TOKENS), TEXT_TOKENS)
    params = SamplingParams(temperature=1.0, seed=0)
    assert [pick(logits[i - 1], params, i) for i in written] == [text[i] for i in written]
