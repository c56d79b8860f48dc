"""Tests what is not exported: broken sources, options and lengths that cannot be right; and the messages: the first
cause, the model's name, and advice that can be followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tests.export_cli import parity_of
from tests.tiny_models import copy_source, make_unknown, make_unlike_pair
from tools.tiny_sources import make_tiny_source

from outrider.export.check.advice import advise
from outrider.export.cli.display import show_progress
from outrider.export.convert.onnx_dynamo import _find_shapes
from outrider.export.make import build
from outrider.export.make.pair import PairOptions, PairPaths, export_pair
from outrider.export.make.pipeline import export_model
from outrider.export.make.stage_store import StageStore
from outrider.export.make.sweep import sweep_pair
from outrider.export.progress import silent
from outrider.export.quiet import quiet_upstream
from outrider.export.recipes import ExportOptions, RuntimeName
from outrider.export.source.family_facts import MORE_THAN_TEXT
from outrider.export.source.model_source import read_source
from outrider.export.source.torch_source import load_source_model
from outrider.models.bundle.manifest import Precision, StaticShapes
from outrider.models.errors import ConfigError, ExportError, OutriderError, RuntimeUnavailable
from outrider.models.runtimes import npu_compile
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_graph import failure_reason

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_unlike_pair(tmp_path_factory.mktemp("sources"))


def reweighed(path: Path, edit: Callable[[dict[str, NDArray[Any]]], object]) -> None:
    """Writes other tensors."""
    tensors = {name: np.array(tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def missing_shard(path: Path) -> None:
    """The index names a file that is not there."""
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


GPU = {"precision": "fp16", "runtime": "openvino", "device": "gpu"}


# Files that are cut short and sizes that the weights do not have: tests/test_source.py.
@pytest.mark.parametrize(
    ("config", "damage", "options", "message"),
    [
        ({}, lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), {},
         r"pickled weights.*pytorch_model\.bin.*execute code on load"),
        ({}, missing_shard, {}, "lacks model-00002-of-00002"),
        ({}, partial(reweighed, edit=lambda tensors: tensors[UP].put(7, np.nan)), {}, "not finite"),
        ({}, partial(reweighed, edit=lambda tensors: tensors[UP].put(7, 1e5)), GPU, "up_proj.*100000, beyond"),
        ({}, partial(reweighed, edit=lambda tensors: tensors.pop(UP)), {}, f"lack the tensor {UP}"),
        # Left out a norm would be another model, and the check, made of the same loading, would not see it.
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None, {}, "no place for the tensor .*_norm"),
        ({"model_type": "ownnet"}, None, {}, "'ownnet' model.*does not have built in"),
        ({"model_type": "clip_vision_model"}, None, {}, "generates no text"),
        ({"quantization_config": {"bits": 4}}, None, {}, "quantized already"),
        ({"vocab_size": 100}, None, {}, "do not belong together"),
        ({}, lambda path: (path / "config.json").write_text("{"), {}, "not JSON"),
        ({}, lambda path: (path / "tokenizer.json").write_text("{"), {}, r"tokenizer\.json"),
        ({}, lambda path: (path / "tokenizer.json").unlink(), {}, r"tokenizer\.json"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_rightly_is_refused(
    sources: PairPaths,
    tmp_path: Path,
    config: dict[str, Any],
    damage: Callable[[Path], None] | None,
    options: dict[str, Any],
    message: str,
) -> None:
    """What is wrong, in which file, and what to do; nothing is written."""
    path = copy_source(sources.draft, tmp_path / "model", **config)
    if damage is not None:
        damage(path)
    with pytest.raises(OutriderError, match=message):
        export_model(path, tmp_path / "out", ExportOptions("draft", **options))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_parts_that_a_text_model_does_not_load_are_no_lie(sources: PairPaths, tmp_path: Path) -> None:
    """A vision tower, and the rotary frequencies that old checkpoints carry."""
    path = copy_source(sources.draft, tmp_path / "model")
    parts = {"vision_tower.layers.0.fc.weight": (4, 4), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    more = {name: np.ones(shape, np.float32) for name, shape in parts.items()}
    reweighed(path, lambda tensors: tensors.update(more))
    load_source_model(path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"role": "draft", "runtime": "torch"},
        {"role": "draft", "precision": "bf16"},
        {"role": "target", "precision": "int8", "runtime": "torch"},
        {"role": "draft", "widen_mb": 10.0},
        {"role": "target", "widen_mb": 0.0},
        {"role": "draft", "device": "npu", "static_shapes": StaticShapes(prompt_len=16, response_len=16, step_len=33)},
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: dict[str, Any]) -> None:
    """When they are made, not minutes later."""
    with pytest.raises(ConfigError):
        ExportOptions(**arguments)


def for_npu(**lengths: int) -> ExportOptions:
    """Of a draft with these lengths, where any are given."""
    return ExportOptions("draft", device="npu", static_shapes=StaticShapes(**lengths) if lengths else None)


def test_lengths_that_the_model_does_not_have_are_refused(sources: PairPaths, tmp_path: Path) -> None:
    """Before any work, naming the given lengths; lengths that were not given are cut to the model's positions."""
    options = for_npu(prompt_len=100_000)
    with pytest.raises(ConfigError, match=r"--prompt-len 100,000 was given; the model takes [\d,]+ tokens"):
        export_model(sources.draft, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    fitting: list[tuple[dict[str, int], tuple[int, int, int]]] = [
        ({}, (341, 171, 8)),
        ({"step_len": 4}, (341, 171, 4)),
        ({"prompt_len": 400}, (400, 112, 8)),
        ({"response_len": 500}, (12, 500, 8)),
        ({"prompt_len": 100, "response_len": 64}, (100, 64, 8)),
    ]
    for given, (prompt, response, step) in fitting:
        expected = StaticShapes(prompt_len=prompt, response_len=response, step_len=step)
        assert for_npu(**given).fitting(512).resolved_shapes == expected
    for wrong in ({"prompt_len": 512}, {"response_len": 512}, {"prompt_len": 300, "response_len": 300}):
        with pytest.raises(ConfigError, match="the model takes 512 tokens, prompt and response together"):
            for_npu(**wrong).fitting(512)
    assert ExportOptions("draft").fitting(512) == ExportOptions("draft")


def test_ctrl_c_says_what_was_kept_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and the interrupt goes on: the exit code is Ctrl-C's."""
    with pytest.raises(KeyboardInterrupt), show_progress(is_quiet=False):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == (
        "Stopped. Nothing was put in place; finished stages are kept, and the same command goes on from there.\n"
    )


NPU = for_npu(prompt_len=128, response_len=128)


def refusal(source: Path, tmp_path: Path, options: ExportOptions) -> str:
    """The message with which an export ends."""
    with pytest.raises(ExportError) as error:
        parity_of(source, tmp_path, options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "config", "finer", "elsewhere"),
    [
        (ExportOptions("draft", "int8"), {}, "--precision fp32", "--runtime onnxruntime"),
        (ExportOptions("draft", "fp32"), {}, "--runtime onnxruntime", "--runtime onnxruntime"),
        (ExportOptions("target", "bf16", "torch"), {}, "--precision fp32", "--runtime openvino"),
        (ExportOptions("target", "fp32", "torch"), {"model_type": "bloom"}, *["--runtime openvino"] * 2),
        (ExportOptions("target", "fp32", "openvino"), {"model_type": "bloom"}, "no runtime", "no runtime"),
        (NPU, {}, "--device cpu", "--device cpu"),  # which has no FP32
        (ExportOptions("draft", "w8a8", device="npu"), {}, "--precision int8", "--device cpu"),
        (ExportOptions("draft", "int4", device="gpu"), {}, "--precision fp16", "--runtime onnxruntime"),
        (ExportOptions("draft", "fp16", "onnxruntime", device="gpu"), {}, "--runtime openvino", "--runtime openvino"),
        (ExportOptions("target", "fp16", "openvino", device="gpu"), {"model_type": "bloom"}, *["--device cpu"] * 2),
        # By the measured table: what fails as well is not advised.
        (ExportOptions("draft", "fp32", "openvino"), {"model_type": "falcon"}, *["--device npu"] * 2),
        (ExportOptions("draft", "fp32", "onnxruntime"), {"model_type": "falcon"}, *["--device npu"] * 2),
        (ExportOptions("draft", "fp32", "openvino"), {"model_type": "mpt"}, *["no runtime that was measured"] * 2),
        (ExportOptions("draft", "fp32", "onnxruntime"), {"model_type": "nemotron"}, *["no runtime that was"] * 2),
        (ExportOptions("target", "fp32", "openvino"), {"model_type": "nemotron"}, *["--runtime torch"] * 2),
        (ExportOptions("draft", "fp32"), {"model_type": "modernbert-decoder"}, *["--runtime onnxruntime"] * 2),
        (ExportOptions("target"), {"model_type": "gemma3_text", MORE_THAN_TEXT: True}, "--precision", "runtime torch"),
    ],
)  # fmt: skip
def test_advice_is_a_way_that_is_there_and_not_known_to_fail(
    options: ExportOptions, config: dict[str, Any], finer: str, elsewhere: str
) -> None:
    """One piece of it: a precision of this device, else a runtime of it, else another device."""
    found = advise(options, config)
    for words, advice in ((finer, found.finer), (elsewhere, found.elsewhere)):
        assert words in advice and advice.count("--") <= 1


def test_a_model_that_takes_more_than_text_is_for_torch_only(tmp_path: Path) -> None:
    """Said before any work, with a way that works; in a pair before its target is exported."""
    path = make_tiny_source("gemma3_text", tmp_path / "mixed")
    text = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}), encoding="utf-8")
    for options, advice in (
        (ExportOptions("target"), "try --runtime torch"),
        (ExportOptions("target", device="gpu", runtime="openvino"), "try --runtime torch"),
        (ExportOptions("draft"), r"export a checkpoint of its text model \(gemma3_text\) alone"),
    ):
        message = rf"mixed cannot run on openvino .*: it takes more than text, .*nothing was written: {advice}$"
        with pytest.raises(ExportError, match=message):
            export_model(path, tmp_path / "out", options)
    told: list[object] = []
    for export in (export_pair, sweep_pair):
        pair = PairOptions(ExportOptions("draft"), ExportOptions("target", runtime="torch"))
        with pytest.raises(ExportError, match=r"takes more than text.*gemma3_text\) alone"):
            export(path, path, tmp_path / "out", options=pair, progress=told.append)
    assert not told and [entry.name for entry in tmp_path.iterdir()] == ["mixed"]


def test_a_model_that_the_torch_runtime_cannot_run_is_named_by_its_name(tmp_path: Path) -> None:
    """Not by the directory that it was built in; the advice is the exporter's."""
    path = make_unknown(tmp_path / "openai-gpt", "openai-gpt", n_embd=64, n_layer=2, n_head=4, n_positions=256)
    said = refusal(path, tmp_path, ExportOptions("target", "fp32", "torch"))
    assert "partial" not in said and str(tmp_path) not in said
    assert re.search(
        "torch cannot run the exported model: the model in openai-gpt does not use.*nothing was written: "
        "no runtime that was measured runs a target of the family openai-gpt: choose another model$",
        said,
    )


@pytest.mark.parametrize(
    ("family", "fields", "cause"),
    [
        (
            "deepseek_v3",
            {
                "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
                "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
            },
            "differ in size; GroupQueryAttention needs one",
        ),
        (
            "gpt_oss",
            {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            "has a mask, bias or sink, which GroupQueryAttention would ignore",
        ),
    ],
)  # fmt: skip
def test_what_the_operator_lacks_is_said_and_not_the_interface_blamed(
    family: str, fields: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    """DeepSeek-V3's keys are wider than its values, GPT-OSS has sinks: both use transformers' interface."""
    path = make_unknown(tmp_path / family, family, **fields)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with pytest.raises(ExportError, match=cause):
        _find_shapes(model)


def test_upstream_advice_and_colours_are_left_out() -> None:
    """torch.onnx lists its causes after pages on its own flags; others are cut to what is read."""

    class TorchExportError(Exception):
        pass

    page = "Failed.\n\x1b[96mThis is step 1/3\x1b[0m\n" + "- Modify the code\n" * 40
    summary = (
        "\n## Exception summary\n\n<class 'torch.onnx._errors.DispatchError'>: No function for grouped_mm\n⬆️\n<class"
    )
    with pytest.raises(ExportError) as error, quiet_upstream("exporting x"):
        print("\x1b[31mred\x1b[0m")
        raise TorchExportError(page + summary)
    assert str(error.value) == ("exporting x failed: DispatchError: No function for grouped_mm\nits last output:\nred")
    shortened = r"(?s)^exporting x failed: TorchExportError: Failed\.\nThis is .* \.\.\.$"
    with pytest.raises(ExportError, match=shortened) as cut, quiet_upstream("exporting x"):
        raise TorchExportError(page)
    assert len(str(cut.value).splitlines()) == 12 and "\x1b" not in str(cut.value)


def test_an_npu_path_that_fails_without_words_says_whose_error_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`map::at` is no reason; where the CPU stands in for the NPU no driver is to blame."""
    for last, reason in ((" map::at", "an error of OpenVINO's own (map::at)"), ("no such device", "no such device")):
        assert failure_reason(RuntimeError(f"at x.cpp\n{last}")) == reason
    monkeypatch.setattr(npu_compile, "compile_graph", Mock(side_effect=RuntimeError("map::at")))
    said = refusal(make_tiny_source("llama", tmp_path / "llama"), tmp_path, NPU)
    assert re.search(r"cannot compile llama for the NPU: an error of OpenVINO's own \(map::at\)", said), said
    assert said.endswith("try --device cpu") and "driver" not in said and "partial" not in said
    monkeypatch.setattr(npu_compile, "npu_core", lambda options: None)
    monkeypatch.setattr(npu_compile, "read_ir", lambda core, xml: xml)
    with pytest.raises(RuntimeUnavailable, match="update the NPU's driver"):
        npu_compile.compile_for_npu(tmp_path / "x.xml", StaticShapes(), RuntimeOptions(device="NPU"))


@pytest.mark.parametrize(
    ("runtime", "precision", "family", "on_one_disk", "on_two"),
    [
        ("onnxruntime", "int8", "qwen3", 4, 8),  # beside the bundle: the builder's file, and a copy of the source
        ("onnxruntime", "fp32", "qwen3", 4, 8),
        ("onnxruntime", "int8", "gpt_neox", 1, 5),  # torch's exporter writes to the cache; the twin is copied
        ("openvino", "int8", "qwen3", 1, 5),
        ("openvino", "fp32", "qwen3", 4, 4),
        ("torch", "bf16", "qwen3", 2, 2),
    ],
)
def test_the_disk_is_asked_for_what_is_built_beside_the_bundle(
    sources: PairPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runtime: RuntimeName,
    precision: Precision,
    family: str,
    on_one_disk: int,
    on_two: int,
) -> None:
    """In bytes per parameter of the model, which is stored in FP32; the cache holds the converted model."""
    model = read_source(sources.draft)
    if family != "qwen3":
        model = replace(model, shape=replace(model.shape, facts={"architectures": ["GPTNeoXForCausalLM"]}))
    options = ExportOptions("target" if runtime == "torch" else "draft", precision, runtime)
    job = build.Job(model, model.describe(), tmp_path / "out", tmp_path, options, StageStore(tmp_path), silent)
    asked: list[tuple[tuple[Path, float], ...]] = []
    monkeypatch.setattr(build, "require_room", lambda *needs: asked.append(needs))
    for is_one, expected in ((True, on_one_disk), (False, on_two)):
        monkeypatch.setattr(build, "is_one_disk", lambda *_, is_one=is_one: is_one)
        job.require_room(tmp_path / "cache" / "stage", 10.0)
        (cache, staged), (out, beside) = asked.pop()
        size = model.architecture.parameters
        assert (cache, staged, out) == (tmp_path / "cache", (runtime != "torch") * 4 * size + 10, tmp_path)
        assert beside == pytest.approx(expected * size, rel=0.03)
