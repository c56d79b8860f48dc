"""Every family, exported from a tiny local model: correct in the runtime that will run it, or refused with a reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import make_unknown
from tools.tiny_sources import make_tiny_source

from outrider.export.convert import openvino_ir
from outrider.export.make.pipeline import export_model, stage_export
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import silent
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import warnings_of
from outrider.export.source.family_facts import FAMILIES
from outrider.export.source.model_source import read_source
from outrider.models.bundle.manifest import Parity, Precision, Role
from outrider.models.errors import ExportError, ParityFailure
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions

SLIDING = ("gemma2", "gemma3_text", "gpt_neo", "mistral", "phi3")
ALSO_INT8 = ("bloom", "gpt_neo", "phi3")
ON_OPENVINO = tuple(family for family in FAMILIES if family != "gemma2")  # refused below


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_source("phi3")` is a whole source of that family, made once."""
    root = tmp_path_factory.mktemp("families")
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_source(family, root / family)
        return made[family]

    return make


def stage(source: Path, out: Path, store: Path, role: Role, precision: Precision, runtime: Any = "openvino") -> Parity:
    """The check of one export, which is not put in place; `store` keeps what the next may use."""
    options = ExportOptions(role, precision, runtime, num_threads=1)
    with stage_export(read_source(source), out, options, silent, StageStore(store)) as staged:
        return staged.manifest.report.parity


@pytest.mark.parametrize("family", ON_OPENVINO)
def test_openvino_runs_it_rightly(family: str, tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """As a target in FP32, some also as a draft in INT8; where layers slide, also beyond the window."""
    source = tiny_source(family)
    exact = stage(source, tmp_path / "target", tmp_path / "store", "target", "fp32")
    assert exact.runtime == "OpenVinoPagedRuntime"
    assert max(stage.max_delta / stage.scale for stage in exact.stages) < 1e-5
    assert len(exact.stages) == (9 if family in SLIDING else 5)
    if family not in ALSO_INT8:
        return
    quantized = stage(source, tmp_path / "draft", tmp_path / "store", "draft", "int8")
    assert quantized.runtime == "OpenVinoSequenceRuntime" and len(quantized.stages) == (10 if family in SLIDING else 5)
    assert max(stage.max_delta / stage.scale for stage in quantized.stages) > 1e-3


def test_torch_runs_gemma_2_rightly(tiny_source: Callable[[str], Path], tmp_path: Path) -> None:
    """Soft-capping and windows included; other families are in test_runtimes_parity."""
    parity = stage(tiny_source("gemma2"), tmp_path / "target", tmp_path / "store", "target", "fp32", "torch")
    assert max(stage.max_delta / stage.scale for stage in parity.stages) < 1e-5
    assert len(parity.stages) == 9


@pytest.mark.parametrize("family", ["gptj", "nemotron", "deepseek_v2"])
def test_torch_runs_attention_of_other_kinds_rightly(
    family: str, tiny_source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Outside the interface, or with keys and values of different sizes; more of them are in test_runtimes_parity."""
    parity = stage(tiny_source(family), tmp_path / "target", tmp_path / "store", "target", "fp32", "torch")
    assert max(stage.max_delta / stage.scale for stage in parity.stages) < 1e-5


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
        stage(tiny_source("gemma2"), tmp_path / "out", tmp_path / "a", "target", "fp32")

    def fuse(model: Any) -> None:
        model.set_attn_implementation("sdpa")

    monkeypatch.setattr(openvino_ir, "choose_attention", fuse)
    with pytest.raises(ParityFailure, match=r"parity check failed, prefill:") as failure:
        stage(tiny_source("gemma2"), tmp_path / "out", tmp_path / "b", "draft", "int8")
    assert failure.value.relative_delta > 0.1  # less than what INT8 may do by itself
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_gpt_neo_as_upstream_converts_it_is_refused_by_the_check(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example of a silent error: correct up to its window, wrong beyond it, whatever noise INT4 adds."""

    @contextlib.contextmanager
    def unrepaired(model: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(openvino_ir, "sliding_gpt_neo", unrepaired)
    source = make_tiny_source("gpt_neo", tmp_path / "gpt_neo", window_size=80)
    with pytest.raises(ParityFailure, match=r"already before .*failed, prefill, beyond the window of 80:") as failure:
        stage(source, tmp_path / "out", tmp_path / "store", "draft", precision)
    assert failure.value.relative_delta > 0.2
    assert not (tmp_path / "out").exists()


def test_an_unknown_family_is_tried_and_what_is_right_is_exported(tmp_path: Path) -> None:
    """Its shape is read with transformers' defaults; the check decides."""
    path = make_unknown(tmp_path / "olmo2", "olmo2", max_position_embeddings=256, num_key_value_heads=2)
    source = read_source(path)
    assert (source.architecture.name, source.architecture.kv_heads, source.architecture.max_positions) == (
        "olmo2", 2, 256,
    )  # fmt: skip
    bundle = export_model(path, tmp_path / "out", ExportOptions("draft", "int4", num_threads=1))
    assert bundle.manifest.architecture.name == "olmo2"


def test_an_unknown_family_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    """With the converter's own words, and nothing left behind."""
    path = make_unknown(tmp_path / "nanochat", "nanochat")
    with pytest.raises(ExportError, match=r"(?s)converting nanochat to OpenVINO failed"):
        export_model(path, tmp_path / "out", ExportOptions("target", "fp32"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["nanochat"]


def test_a_window_that_is_too_long_to_check_ends_the_sequence(tmp_path: Path) -> None:
    """The bundle promises no more, its runtime gives no more, and a note tells the user."""
    path = make_tiny_source("mistral", tmp_path / "mistral", sliding_window=2000, max_position_embeddings=4096)
    source = read_source(path)
    assert source.architecture.max_positions == 2000 and not source.shape.checked_windows
    assert "sequences end at 2,000 tokens of the model's 4,096" in source.shape.notes[0]
    bundle = export_model(path, tmp_path / "out", ExportOptions("target", "fp32", num_threads=1))
    assert bundle.manifest.report.notes == source.shape.notes == warnings_of(bundle.manifest)[:1]
    opened = open_batch_runtime("openvino", bundle.model_file, RuntimeOptions(kv_cache_bytes=1 << 20))
    assert opened.limits.max_positions == bundle.manifest.architecture.max_positions == 2000
    opened.close()
