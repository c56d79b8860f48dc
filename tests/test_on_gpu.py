"""Checks exports for a GPU on the GPU; skipped, with the reason, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.export.check.runner import where_to_check
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import RECIPES, ExportOptions, RuntimeName
from outrider.models.bundle.manifest import Precision, Role
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice, TreeRuntime

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
    pytest.importorskip(runtime)
    options = ExportOptions(role, precision, runtime, device="gpu")
    if not (place := where_to_check(options)).is_real:
        pytest.skip(f"no GPU for {runtime}: {place.words}")
    make_tiny_tokenizer(tmp_path / "model")
    make_tiny_model("qwen2", tmp_path / "model", vocab_size=320)
    bundle = export_model(tmp_path / "model", tmp_path / "out", options)
    assert bundle.manifest.report.parity.checked_on == place.words
    assert bundle.manifest.report.timing is not None and bundle.manifest.report.timing.is_on_device


@pytest.mark.parametrize("family", ["qwen2", "mistral"])  # Mistral's window is shorter than the text
def test_a_tree_on_cuda_has_the_logits_of_its_lines(family: str, tmp_path: Path) -> None:
    """Two branches in one step, then the second one moved into place: each row is that of its line."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    path = make_tiny_model(family, tmp_path / family, vocab_size=96)
    options = RuntimeOptions(device="cuda", kv_cache_bytes=1 << 20, properties={"dtype": "f32"})
    runtime = open_batch_runtime("torch", path, options)
    assert isinstance(runtime, TreeRuntime) and runtime.why_no_trees is None
    text = [(5 * i + i * i) % 96 for i in range(31)]
    runtime.forward([SequenceSlice(text, 0, [5, 3], 0)])
    mask = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], np.uint8)
    rows = runtime.forward([SequenceSlice([7, 8, 9, 10], 31, [5, 3], 4, [31, 31, 32, 32], mask)])
    runtime.move([3 * 32, 3 * 32 + 1], [5 * 32 + 31, 3 * 32])
    moved = runtime.forward([SequenceSlice([11], 33, [5, 3], 1)])
    line = runtime.forward([SequenceSlice([*text, 8, 9, 11], 0, [1, 2], 3)])
    assert np.abs(np.concatenate([rows[1:3], moved]) - line).max() < 1e-3
    runtime.close()
