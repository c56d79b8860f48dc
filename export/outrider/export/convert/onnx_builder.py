"""Exports ONNX with onnxruntime-genai's model builder, for the families that it converts correctly.

Its graphs have rotary embedding inside `GroupQueryAttention`, packed projections and fused norms, and run under
onnxruntime-genai too (genai_config.json stays). Its errors are repaired here and tested: sliding windows, the scale of
Gemma's embedding, and the commit of the present work tree in the file. Nothing is downloaded and no code of a model
directory runs: the builder sees a copy with configuration, safetensors and tokenizer only.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal
from unittest.mock import patch

import numpy as np
import onnx_ir as ir

from outrider.export.convert.onnx_graph import (
    MODEL_FILE,
    add_initializer,
    save_model,
    select_rows,
    strip_origins,
)
from outrider.export.disk import link_or_copy
from outrider.export.quiet import quiet_upstream
from outrider.export.source.config_reader import read_shape
from outrider.export.source.model_source import read_config
from outrider.models.text.tokenizer import TOKENIZER_FILES

BuilderPrecision = Literal["fp32", "fp16"]
"""The two that its attention kernel takes: FP32 on the CPU, FP16 on CUDA."""

CONFIG_FILE: Final = "genai_config.json"
# Measured exact in FP32, to 1e-5, with onnxruntime-genai 0.18.0. What is not here goes through torch's exporter.
# Measured wrong or failing: Olmo (RMS norms where the model has layer norms), Gemma3 (fields that its configuration no
# longer has), Phi (off by thousandths of a logit), SmolLM3 (layers without rotary embedding).
_EXACT: Final = frozenset(
    f"{family}ForCausalLM"
    for family in (
        *("Llama", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Mistral", "Phi3"),
        *("Granite", "Ernie4_5", "HunYuanDenseV1"),
    )
)
_ROPES: Final = {"default", "llama3"}
_GEMMAS: Final = ("gemma", "gemma2")


def supports(config: Mapping[str, Any]) -> bool:
    """Whether `build_with_genai` converts a model with these facts correctly."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in _EXACT or set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        return False
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPES or (kind == "llama3" and architecture != "LlamaForCausalLM"):
        return False
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_size * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1))
    return not (head_size % 16 or rotated % 16)  # what GroupQueryAttention rotates


def build_with_genai(source_dir: Path, destination: Path, precision: BuilderPrecision, work: Path, name: str) -> None:
    """Writes model.onnx, model.onnx.data and genai_config.json to `destination`; the same input, the same bytes.

    precision: of weights, activations and cache: "fp32" is for the CPU, "fp16" for CUDA. Weights are quantized
    afterwards (`onnx_quantize`), so that one build serves the export and its unquantized twin. work: for temporary
    files. Raises ExportError where the builder fails.
    """
    scratch = work / f"genai-{precision}"
    view, built = scratch / "source", scratch / "built"
    try:
        view.mkdir(parents=True)
        config = read_config(source_dir)
        _view(source_dir, config, view)
        facts = read_shape(source_dir, config).facts
        with quiet_upstream(f"building {name} with onnxruntime-genai"):
            _run_builder(view, built, precision)
            _finish(built, destination, facts)
        shutil.copyfile(built / CONFIG_FILE, destination / CONFIG_FILE)
    finally:
        gc.collect()  # the builder's objects refer to each other and hold the source
        shutil.rmtree(scratch, ignore_errors=True)


def _view(source_dir: Path, config: Mapping[str, Any], view: Path) -> None:
    """Copies the parts of the source that the builder may see."""
    seen = {key: value for key, value in config.items() if key != "auto_map"}
    if config["model_type"] in _GEMMAS:
        seen["dtype"] = "float32"  # it adds 1 to norms in their own type
        seen.pop("torch_dtype", None)
    if config["model_type"] == "phi3":  # it takes two lengths for a rotary scaling, which `supports` has ruled out
        seen["original_max_position_embeddings"] = seen["max_position_embeddings"]
    (view / "config.json").write_text(json.dumps(seen), encoding="utf-8")
    others = [*TOKENIZER_FILES, "model.safetensors.index.json"]
    for path in [*source_dir.glob("*.safetensors"), *(source_dir / name for name in others)]:
        if path.is_file() and path.name != "config.json":
            link_or_copy(path.resolve(), view / path.name)


def _run_builder(view: Path, built: Path, precision: BuilderPrecision) -> None:
    options = {
        "hf_token": "false",  # nothing to authenticate: the directory is local
        "hf_remote": "false",
        "windowed_kv_cache": "false",  # a cache that forgets cannot be rolled back
        "fuse_qk_norm_gqa": "false",  # only CUDA's kernel has it, and then nothing else could check the graph
    }
    provider = "cpu" if precision == "fp32" else "cuda"
    arguments = (None, str(view), str(built), precision, provider, str(built / "cache"))
    spec = importlib.util.find_spec("onnxruntime_genai")
    folders = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parent / "models")]
    # The builder's modules find each other on sys.path, before the user's modules of the same names.
    with patch.object(sys, "path", [*folders, *sys.path]):
        builder: Any = importlib.import_module("onnxruntime_genai.models.builder")
        prepared = builder.parse_extra_options(*arguments, [f"{key}={value}" for key, value in options.items()])
        builder.create_model(*arguments, **prepared)


def _finish(built: Path, destination: Path, facts: Mapping[str, Any]) -> None:
    model: Any = ir.load(built / MODEL_FILE)
    graph = model.graph
    strip_origins(model, f"onnxruntime-genai {importlib.metadata.version('onnxruntime-genai')}")
    head_size = json.loads((built / CONFIG_FILE).read_text(encoding="utf-8"))["model"]["decoder"]["head_size"]
    for value in (*graph.inputs, *graph.outputs):
        if value.name.startswith(("past_key_values.", "present.")):
            value.shape = ir.Shape([*value.shape[:3], head_size])
    _set_windows(graph, facts)
    _set_embedding_scale(graph, facts)
    select_rows(model)
    save_model(model, destination)


def _set_windows(graph: Any, facts: Mapping[str, Any]) -> None:
    """Sets each layer's window: the builder omits it in families that do not list their layers."""
    window, kinds = facts.get("sliding_window"), facts.get("layer_types")
    for index, node in enumerate(node for node in graph if node.op_type == "GroupQueryAttention"):
        slides = kinds is None or kinds[index] == "sliding_attention"
        size = int(window) if window is not None and slides else -1
        node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", size)


def _set_embedding_scale(graph: Any, facts: Mapping[str, Any]) -> None:
    """Sets the scale of Gemma's embedding, the root of its width; the builder rounds it to two decimals."""
    if facts["model_type"] not in _GEMMAS:
        return
    scaling = next(node for node in graph if node.name == "/model/embed_tokens/Mul")
    exact = np.array(math.sqrt(facts["hidden_size"]), scaling.inputs[0].dtype.numpy())
    scaling.replace_input_with(1, add_initializer(graph, "embedding_scale", exact))
