"""Exports for torch: cast weights, and INT8 that is made when they are loaded."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer, make_unlike_pair

from outrider.export.make.pair import PairPaths
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.errors import ExportError
from outrider.models.runtimes.base import TORCH_DTYPES, RuntimeOptions, SequenceSlice
from outrider.models.runtimes.torch_paged import TorchPagedRuntime


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_unlike_pair(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize(("device", "precision"), [("cpu", "bf16"), ("gpu", "int8")])
def test_a_torch_target_is_cast_and_checked_in_its_precision(
    device: Device, precision: Precision, sources: PairPaths, tmp_path: Path
) -> None:
    """Safetensors with a config that says what they are now; INT8 is made of them when they are loaded."""
    options = ExportOptions("target", precision, "torch", device=device)
    bundle = export_model(sources.target, tmp_path / precision, options)
    assert (bundle.manifest.format, bundle.manifest.runtime) == ("safetensors", "torch")
    assert bundle.manifest.precision == precision
    assert (bundle.manifest.quantization is not None) is (precision == "int8")
    loading = RuntimeOptions(kv_cache_bytes=1 << 20, properties={"dtype": TORCH_DTYPES[precision]})
    with closing(TorchPagedRuntime(bundle.path, loading)) as runtime:
        assert ("linear layers in INT8" in runtime.description) is (precision == "int8")
    assert json.loads((bundle.path / "config.json").read_text())["dtype"] == "bfloat16"
    assert max(stage.max_delta for stage in bundle.manifest.report.parity.stages) > 1e-3
    assert bundle.model_file == bundle.path


def test_int8_leaves_a_mixtures_router(tmp_path: Path) -> None:
    """DeepSeek V2 reads its router's weights without calling it; rounded, it would choose other experts."""
    path = make_tiny_model("deepseek_v2", tmp_path / "model", vocab_size=320)
    rows = []
    for dtype in ("bf16", "i8"):
        loading = RuntimeOptions(kv_cache_bytes=1 << 20, properties={"dtype": dtype})
        with closing(TorchPagedRuntime(path, loading)) as runtime:
            rows.append(runtime.forward([SequenceSlice(list(range(40)), 0, [0, 1], 40)]).copy())
    assert 0 < np.abs(rows[0] - rows[1]).mean() < 0.05


def test_int8_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    """GPT-2's layers are not torch's."""
    make_tiny_tokenizer(tmp_path / "model")
    make_tiny_model("gpt2", tmp_path / "model", vocab_size=320)
    with pytest.raises(ExportError, match="gpt2 has no linear layers of torch's own, so INT8 changes nothing"):
        export_model(tmp_path / "model", tmp_path / "out", ExportOptions("target", "int8", "torch", device="gpu"))
