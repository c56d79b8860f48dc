"""Every family, exported from a tiny local model: correct in the runtime that will run it, or refused with a reason.

What depends on the longest text, too: rotary scaling that changes with it is refused, and would be found by the check.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.export_cli import parity_of
from tests.tiny_models import copy_source, make_unknown
from tools.tiny_sources import make_tiny_source

from outrider.export.check import source_logits as source_logits_module
from outrider.export.convert import openvino_ir
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import warnings_of
from outrider.export.source import config_reader
from outrider.export.source.family_facts import FAMILIES
from outrider.export.source.model_source import read_source
from outrider.export.source.torch_source import load_source_model, source_logits
from outrider.models.bundle.manifest import Parity, Precision
from outrider.models.errors import ExportError, ParityFailure
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions

SLIDING = ("gemma2", "gemma3_text", "gpt_neo", "mistral", "phi3")
ALSO_INT8 = ("bloom", "gpt_neo", "phi3")
ON_OPENVINO = tuple(family for family in FAMILIES if family != "gemma2")  # refused below


def worst_of(parity: Parity) -> float:
    """The largest relative error."""
    return max(stage.max_delta / stage.scale for stage in parity.stages)


@pytest.mark.parametrize("family", ON_OPENVINO)
def test_openvino_runs_it_rightly(family: str, tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """As a target in FP32, some also as a draft in INT8; where layers slide, also beyond the window."""
    source = tiny_source(family)
    exact = parity_of(source, tmp_path, ExportOptions("target", "fp32", num_threads=1))
    assert (exact.runtime, len(exact.stages)) == ("OpenVinoPagedRuntime", 9 if family in SLIDING else 5)
    assert worst_of(exact) < 1e-5
    if family in ALSO_INT8:
        quantized = parity_of(source, tmp_path, ExportOptions("draft", "int8", num_threads=1))
        found = quantized.runtime, len(quantized.stages)
        assert found == ("OpenVinoSequenceRuntime", 10 if family in SLIDING else 5) and worst_of(quantized) > 1e-3


@pytest.mark.parametrize("family", ["gemma2", "gptj", "nemotron", "deepseek_v2"])
def test_torch_runs_attention_of_other_kinds_rightly(
    family: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """With soft caps and windows, outside the interface, with keys and values of different sizes; more of them are in
    test_runtimes_parity.
    """
    parity = parity_of(tiny_source(family), tmp_path, ExportOptions("target", "fp32", "torch", num_threads=1))
    assert worst_of(parity) < 1e-5 and (family != "gemma2" or len(parity.stages) == 9)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma2", ExportOptions("draft"), r"gemma2 cannot run on openvino \(cpu\).*attn_logit_softcapping"),
        ("bloom", ExportOptions("draft", device="npu"), r"bloom cannot run on openvino \(npu\).*no positions"),
        ("bloom", ExportOptions("target", runtime="torch"), r"bloom cannot run on torch \(cpu\).*ALiBi"),
        ("gpt_neo", ExportOptions("target", runtime="torch"), r"gpt_neo cannot run on torch \(cpu\).*its own"),
    ],
)
def test_what_is_known_to_be_impossible_is_refused_before_work(
    family: str, options: ExportOptions, message: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """With what to use instead, and without a stage having begun."""
    events: list[object] = []
    with pytest.raises(ExportError, match=message):
        export_model(tiny_source(family), tmp_path / "out", options, events.append)
    assert not events and not (tmp_path / "out").exists()


def test_soft_capping_that_nobody_knew_of_is_refused_by_the_check(
    tiny_source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain attention Gemma 2 cannot be paged; with fused attention its logits are wrong."""
    monkeypatch.setattr("outrider.export.make.pipeline.require_runtime", lambda *arguments: None)
    with pytest.raises(ExportError, match=r"cannot run the exported model: gemma2 cannot use paged attention"):
        parity_of(tiny_source("gemma2"), tmp_path, ExportOptions("target", "fp32", num_threads=1))

    monkeypatch.setattr(openvino_ir, "choose_attention", lambda model: model.set_attn_implementation("sdpa"))
    with pytest.raises(ParityFailure, match=r"parity check failed, prefill:") as failure:
        parity_of(tiny_source("gemma2"), tmp_path, ExportOptions("draft", "int8", num_threads=1))
    assert failure.value.relative_delta > 0.1 and not (tmp_path / "out").exists()  # less than INT8 may do by itself


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_gpt_neo_as_upstream_converts_it_is_refused_by_the_check(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example of a silent error: correct up to its window, wrong beyond it, whatever noise INT4 adds."""

    monkeypatch.setattr(openvino_ir, "sliding_gpt_neo", contextlib.nullcontext)
    source = make_tiny_source("gpt_neo", tmp_path / "gpt_neo", window_size=80)
    with pytest.raises(ParityFailure, match=r"already before .*failed, prefill, beyond the window of 80:") as failure:
        parity_of(source, tmp_path, ExportOptions("draft", precision, num_threads=1))
    assert failure.value.relative_delta > 0.2 and not (tmp_path / "out").exists()


def test_an_unknown_family_is_tried_and_what_is_right_is_exported(tmp_path: Path) -> None:
    """Its shape is read with transformers' defaults; the check decides."""
    path = make_unknown(tmp_path / "olmo2", "olmo2", max_position_embeddings=256, num_key_value_heads=2)
    shape = export_model(path, tmp_path / "out", ExportOptions("draft", "int4", num_threads=1)).manifest.architecture
    assert (shape.name, shape.kv_heads, shape.max_positions) == ("olmo2", 2, 256)


def test_an_unknown_family_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    """With the converter's own words, and nothing left behind."""
    path = make_unknown(tmp_path / "nanochat", "nanochat")
    with pytest.raises(ExportError, match=r"converting nanochat to OpenVINO failed: \w+Error: \w+"):
        export_model(path, tmp_path / "out", ExportOptions("target", "fp32"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["nanochat"]


def test_a_window_that_is_too_long_to_check_ends_the_sequence(tmp_path: Path) -> None:
    """The bundle promises no more, its runtime gives no more, and a note tells the user."""
    path = make_tiny_source("mistral", tmp_path / "mistral", sliding_window=2000, max_position_embeddings=4096)
    shape = read_source(path).shape
    assert not shape.checked_windows and "sequences end at 2,000 tokens of the model's 4,096" in shape.notes[0]
    bundle = export_model(path, tmp_path / "out", ExportOptions("target", "fp32", num_threads=1))
    assert bundle.manifest.report.notes == shape.notes == warnings_of(bundle.manifest)[:1]
    opened = open_batch_runtime("openvino", bundle.model_file, RuntimeOptions(kv_cache_bytes=1 << 20))
    assert opened.limits.max_positions == bundle.manifest.architecture.max_positions == 2000
    opened.close()


TORCH = ExportOptions("target", "fp32", "torch", num_threads=1)
ORT = ExportOptions("draft", "fp32", "onnxruntime", num_threads=1)
VINO = ExportOptions("draft", "fp32", "openvino", num_threads=1)


@pytest.fixture
def scaled(tiny_source: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """`scaled("su", 128)`: Phi-3 with rotary scaling of that type beyond 128 positions, and no window."""

    def make(kind: str, original: int, window: int | None = None, **rope: Any) -> Path:
        length = {"original_max_position_embeddings": original}
        scaling = {"type": kind, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8} | length | rope
        values = {"rope_parameters": None, "sliding_window": window, "rope_scaling": scaling} | length
        return copy_source(tiny_source("phi3"), tmp_path / f"{kind}-{original}", **values)

    return make


@pytest.mark.parametrize("kind", ["longrope", "yarn", "su"])
def test_longrope_is_refused_however_it_is_spelled(kind: str, scaled: Callable[..., Path]) -> None:
    """transformers reads "su" and "yarn" of Phi-3 as "longrope"; the message names both, and advice that holds."""
    path = scaled(kind, 128)
    origin = "" if kind == "longrope" else rf" \(config.json says {kind}, which transformers reads as longrope\)"
    with pytest.raises(ExportError, match=rf"has longrope rotary scaling{origin}, .*: --max-positions 128 exports it"):
        read_source(path)
    with pytest.raises(ExportError, match=r"--max-positions is 513; give at most 512"):
        read_source(path, max_positions=513)
    source = read_source(path, max_positions=128)
    assert source.architecture.max_positions == 128 and not source.shape.crossed_originals
    assert source.shape.notes == ("sequences end at 128 tokens of the model's 512: as asked for",)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_is_exported_up_to_its_original_length(kind: str, scaled: Callable[..., Path], tmp_path: Path) -> None:
    """With its short factors and its attention factor; "su" also with its original length at the top level only."""
    path = scaled(kind, 64, short_factor=[1.0 + 0.1 * i for i in range(8)])
    if kind == "su":
        scaling = json.loads((path / "config.json").read_text(encoding="utf-8"))["rope_scaling"]
        del scaling["original_max_position_embeddings"]
        path = copy_source(path, tmp_path / "short", rope_scaling=scaling)
    source = read_source(path, max_positions=64)
    assert max(worst_of(parity_of(source, tmp_path, way)) for way in (TORCH, ORT, VINO)) < 4e-6
    # The old advice: no scaling, which is another model.
    other = copy_source(path, tmp_path / "other", rope_scaling=None, max_position_embeddings=64)
    expected, found = (source_logits(load_source_model(place), range(1, 60)) for place in (path, other))
    assert np.abs(found - expected).max() > expected.std()


@pytest.mark.parametrize(("family", "alpha"), [("llama", {}), ("hunyuan_v1_dense", {"alpha": 1000.0, "factor": 1.0})])
def test_dynamic_scaling_is_exported(family: str, alpha: dict[str, float], tmp_path: Path) -> None:
    """It changes beyond the model's positions only; Hunyuan's alpha applies at all lengths."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0} | alpha
    path = make_tiny_source(family, tmp_path / "model", rope_parameters=rope)
    assert max(worst_of(parity_of(path, tmp_path, way)) for way in (TORCH, ORT)) < 4e-6


def test_forty_positions_are_exported_and_twenty_refused_at_once(tmp_path: Path) -> None:
    """The check's sequences are as long as the model's."""
    path = make_tiny_source("llama", tmp_path / "model", max_position_embeddings=40)
    bundle = export_model(path, tmp_path / "out", ExportOptions("draft", "fp32", "onnxruntime", num_threads=1))
    assert bundle.manifest.architecture.max_positions == 40
    events: list[object] = []
    with pytest.raises(ExportError, match="would end at 20 tokens; the check needs at least 24"):
        export_model(path, tmp_path / "short", ExportOptions("draft", max_positions=20), events.append)
    assert not events


def test_every_scaling_of_phimoe_depends_on_the_longest_position(tmp_path: Path) -> None:
    """Its factor for cosines is chosen by the longest position of a step, whatever the type."""
    path = make_unknown(tmp_path / "phimoe", "phimoe", num_key_value_heads=2, num_local_experts=2)
    assert read_source(path).architecture.name == "phimoe"
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64,
        "short_mscale": 1.0, "long_mscale": 1.2,
    }  # fmt: skip
    words = "has yarn rotary scaling, which changes for texts beyond the original length of 64"
    with pytest.raises(ExportError, match=words):
        read_source(copy_source(path, tmp_path / "scaled", rope_parameters=rope))


def test_scaling_that_is_the_same_for_every_length_is_exported_and_crossed(tmp_path: Path) -> None:
    """YaRN of a Llama: its frequencies are constant, so its original length is crossed without a difference."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    source = read_source(make_tiny_source("llama", tmp_path / "llama", rope_parameters=rope))
    parity = parity_of(source, tmp_path, TORCH)
    assert source.shape.crossed_originals == (128,) and worst_of(parity) < 1e-5
    assert [stage.rows for stage in parity.stages] == [48, 8, 8, 6, 1, 8, 8, 6, 64]
    last = ["step after rollback, across the original length of 128", "batch with a longer sequence"]
    assert [stage.name for stage in parity.stages[-2:]] == last


@pytest.mark.parametrize(
    ("original", "longest_crossed", "window", "where"),
    [
        (128, 1024, None, "prefill, across the original length of 128"),
        (400, 0, None, "batch with a longer sequence"),  # as where the original length is too long to run
        (400, 0, 32, "batch with a longer sequence"),
    ],
)
def test_longrope_that_nobody_knew_of_is_found_by_the_check(
    original: int,
    longest_crossed: int,
    window: int | None,
    where: str,
    scaled: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the refusal switched off: a short sequence is computed with the long one's frequencies."""
    monkeypatch.setattr(config_reader, "_require_steady_rope", lambda *arguments: None)
    monkeypatch.setattr(source_logits_module, "LONGEST_CHECKED", longest_crossed)
    source = read_source(scaled("yarn", original, window))
    with pytest.raises(ParityFailure, match=f"parity check failed, {where}:") as failure:
        parity_of(source, tmp_path, TORCH)
    assert failure.value.relative_delta > 0.4
