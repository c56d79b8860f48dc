"""Messages of refused exports: the first cause, the model's name, and advice that can be followed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.tiny_models import make_unknown
from tools.tiny_sources import make_tiny_source

from outrider.export.check.advice import advise
from outrider.export.convert.onnx_dynamo import _find_shapes
from outrider.export.make.pipeline import stage_export
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import silent
from outrider.export.quiet import quiet_upstream
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import read_source
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import ExportError, RuntimeUnavailable
from outrider.models.runtimes import npu_compile
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_graph import failure_reason

NPU = ExportOptions("draft", device="npu", static_shapes=StaticShapes(prompt_len=128, response_len=128))


def refusal(source: Path, out: Path, options: ExportOptions) -> str:
    """The message with which an export ends."""
    store = StageStore(out.parent / "store")
    with pytest.raises(ExportError) as error, stage_export(read_source(source), out, options, silent, store):
        pass
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
    ],
)  # fmt: skip
def test_advice_is_a_way_that_is_there_and_not_known_to_fail(
    options: ExportOptions, config: dict[str, Any], finer: str, elsewhere: str
) -> None:
    """One piece of it: a precision of this device, else a runtime of it, else another device."""
    found = advise(options, config)
    assert finer in found.finer and elsewhere in found.elsewhere
    assert found.finer.count("--") <= 1 and found.elsewhere.count("--") <= 1


def test_a_model_that_the_torch_runtime_cannot_run_is_named_by_its_name(tmp_path: Path) -> None:
    """Not by the directory that it was built in; the advice is the exporter's."""
    path = make_unknown(tmp_path / "openai-gpt", "openai-gpt", n_embd=64, n_layer=2, n_head=4, n_positions=256)
    said = refusal(path, tmp_path / "t-torch", ExportOptions("target", "fp32", "torch"))
    assert "partial" not in said and str(tmp_path) not in said
    assert re.search(r"torch cannot run the exported model: the model in openai-gpt does not use", said)
    assert said.endswith(
        "nothing was written: no runtime that was measured runs a target of the family openai-gpt: choose another model"
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
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with pytest.raises(ExportError, match=cause):
        _find_shapes(model.eval())


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
    assert failure_reason(RuntimeError("at x.cpp\n map::at")) == "an error of OpenVINO's own (map::at)"
    assert failure_reason(RuntimeError("at x.cpp\nno such device")) == "no such device"
    source = make_tiny_source("llama", tmp_path / "llama")

    def fail(*arguments: object) -> None:
        raise RuntimeError("map::at")

    monkeypatch.setattr(npu_compile, "compile_graph", fail)
    said = refusal(source, tmp_path / "out", NPU)
    assert re.search(r"cannot compile llama for the NPU: an error of OpenVINO's own \(map::at\)", said), said
    assert said.endswith("try --device cpu") and "driver" not in said and "partial" not in said
    monkeypatch.setattr(npu_compile, "npu_core", lambda options: None)
    monkeypatch.setattr(npu_compile, "read_ir", lambda core, xml: xml)
    with pytest.raises(RuntimeUnavailable, match="update the NPU's driver"):
        npu_compile.compile_for_npu(tmp_path / "x.xml", StaticShapes(), RuntimeOptions(device="NPU"))
