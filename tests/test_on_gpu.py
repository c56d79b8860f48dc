"""Checks exports for a GPU on the GPU; skipped, with the reason, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.export.check.runner import where_to_check
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import RECIPES, ExportOptions, RuntimeName
from outrider.models.manifest import Precision, Role

GPU_RECIPES = [
    (role, runtime, precision)
    for (role, device, runtime), precisions in RECIPES.items()
    if device == "gpu"
    for precision in precisions
]


@pytest.mark.parametrize(("role", "runtime", "precision"), GPU_RECIPES)
def test_an_export_for_a_gpu_passes_its_check_there(
    role: Role, runtime: RuntimeName, precision: Precision, tmp_path: Path
) -> None:
    """Prefill, cached steps, steps of several tokens and steps after rollbacks, in the runtime and on the device."""
    options = ExportOptions(role, precision, runtime, device="gpu")
    if not (place := where_to_check(options)).is_real:
        pytest.skip(f"no GPU for {runtime}: {place.words}")
    make_tiny_tokenizer(tmp_path / "model")
    make_tiny_model("qwen2", tmp_path / "model", vocab_size=320)
    bundle = export_model(tmp_path / "model", tmp_path / "out", options)
    assert bundle.manifest.report.parity.checked_on == place.words
    assert bundle.manifest.report.timing is not None and bundle.manifest.report.timing.is_on_device
