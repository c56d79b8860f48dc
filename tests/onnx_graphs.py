"""ONNX drafts for tests, made on the spot, and what they should compute: transformers' own FP32 logits."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tests.quantized import Blocks
from tools.tiny_sources import make_tiny_tokenizer

from outrider.export.convert.onnx_builder import CONFIG_FILE, build_with_genai
from outrider.export.convert.onnx_quantize import quantize_weights
from outrider.models.runtimes.onnxruntime_sequence import OnnxRuntimeSequence
from outrider.models.runtimes.torch_loading import load_causal_lm

VOCAB = 331  # odd, and no multiple of a block
RNG = np.random.default_rng(11)
FIRST = RNG.integers(0, VOCAB, 90).tolist()
SECOND = RNG.integers(0, VOCAB, 90).tolist()

Truth = Callable[[list[int]], NDArray[np.float32]]


def truth_of(model: Any) -> Truth:
    """Logits of a whole sequence, [length, vocab_size], without a cache; each sequence is computed once."""
    import torch

    @functools.cache
    def logits(tokens: tuple[int, ...]) -> NDArray[np.float32]:
        with torch.inference_mode():
            rows: NDArray[np.float32] = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        return rows

    return lambda tokens: logits(tuple(tokens))


def load_fp32(source: Path) -> Any:
    """The source with transformers' plain attention."""
    import torch

    return load_causal_lm(source, torch.float32, "eager")


def build(
    source: Path,
    directory: Path,
    precision: Literal["fp32", "fp16", "int8", "int4"],
    wide: Literal["fp32", "fp16"] = "fp32",
) -> Path:
    """Writes the builder's graph of `source`, quantized or not, with its config.json to `directory`, and returns it.

    wide: the precision before it is quantized.
    """
    if not (source / "tokenizer.json").is_file():
        make_tiny_tokenizer(source)
    directory.mkdir(parents=True)
    if precision in ("fp32", "fp16"):
        build_with_genai(source, directory, precision, directory.parent, source.name)
    else:
        graph = build(source, directory.with_name(f"{directory.name}-wide"), wide)
        quantize_weights(graph / "model.onnx", directory, 8 if precision == "int8" else 4)
        shutil.copyfile(graph / CONFIG_FILE, directory / CONFIG_FILE)
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return directory


def worst_delta(runtime: OnnxRuntimeSequence, truth: Truth) -> float:
    """Largest difference of a logit over every kind of step that drafting makes, beyond any tiny model's window."""
    steps = [  # how much of the text before stays, what is added to it, and whether all its rows are asked for
        (0, FIRST[:60], True),
        *((i, FIRST[i : i + 1], False) for i in range(60, 66)),
        (66, FIRST[66:74], True),
        (74, FIRST[74:90], False),
        (70, SECOND[:6], True),
        (76, SECOND[6:7], False),
        (25, SECOND[:50], True),  # into the prompt
        (0, SECOND, True),
    ]
    deltas, text = [], list[int]()
    for num_kept, tokens, has_all in steps:
        runtime.truncate(num_kept)
        text = [*text[:num_kept], *tokens]
        found = runtime.extend_rows(tokens) if has_all else runtime.extend(tokens)[None]
        # What begins as the first text does has its logits.
        expected = truth(FIRST if text == FIRST[: len(text)] else text)[len(text) - len(found) : len(text)]
        assert found.dtype == np.float32 and found.shape == expected.shape
        deltas.append(float(np.abs(found - expected).max()))
    assert runtime.length == len(SECOND)
    return max(deltas)


def put_back(model: Any, blocks: dict[str, Blocks]) -> Any:
    """A Llama or Qwen2 model with the weights that a builder's quantized graph computes with."""
    import torch

    def set_weight(module: Any, values: NDArray[np.float32]) -> None:
        assert tuple(module.weight.shape) == values.shape
        module.weight = torch.nn.Parameter(torch.tensor(values), requires_grad=False)

    head = blocks["lm_head.MatMul.weight"].values
    embedding = blocks.get("model.embed_tokens.weight")
    set_weight(model.lm_head, head)
    set_weight(model.model.embed_tokens, head if embedding is None else embedding.values)
    for index, layer in enumerate(model.model.layers):
        name = f"model.layers.{index}"
        attention = layer.self_attn
        sizes = [part.weight.shape[0] for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        packed = np.split(blocks[f"{name}.attn.qkv_proj.MatMul.weight"].values, np.cumsum(sizes)[:2])
        for part, values in zip((attention.q_proj, attention.k_proj, attention.v_proj), packed, strict=True):
            set_weight(part, values)
        set_weight(attention.o_proj, blocks[f"{name}.attn.o_proj.MatMul.weight"].values)
        for part in ("gate_proj", "up_proj", "down_proj"):
            set_weight(getattr(layer.mlp, part), blocks[f"{name}.mlp.{part}.MatMul.weight"].values)
    return model
