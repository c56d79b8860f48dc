"""Opens runtimes by name: unknown names, missing packages, and what opening does not import."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.models import runtimes
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import PROMISED_POSITIONS, RuntimeOptions

OPTIONS = RuntimeOptions()


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    """A misspelt runtime is a ConfigError that lists the runtimes."""
    with pytest.raises(ConfigError, match="no runtime named 'vllm'; expected one of openvino, torch"):
        open_batch_runtime("vllm", tmp_path, OPTIONS)
    with pytest.raises(ConfigError, match="no runtime named 'torch'; expected one of openvino"):
        open_sequence_runtime("torch", tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("opener", "kind", "package", "extra"),
    [
        (open_batch_runtime, "openvino", "openvino", "cloud"),
        (open_batch_runtime, "torch", "torch", "torch"),
        (open_sequence_runtime, "openvino", "openvino", "edge"),
    ],
)
def test_a_missing_package_prints_the_pip_command(
    opener: Callable[[str, Path, RuntimeOptions], object],
    kind: str,
    package: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error for a missing package names the extra that installs it."""
    for name in [name for name in sys.modules if name.startswith("outrider.models.runtimes.")]:
        if not name.endswith(".base"):
            # Put back in both places: a later test would patch the package's module, which no runtime uses.
            monkeypatch.setattr(runtimes, name.rpartition(".")[2], sys.modules[name], raising=False)
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        RuntimeUnavailable, match=rf'needs the package \'{package}\'.*pip install "outrider\[{extra}\]"'
    ):
        opener(kind, tmp_path, OPTIONS)


def test_the_package_itself_imports_no_runtime() -> None:
    """Neither openvino nor torch is loaded before a runtime is opened."""
    code = (
        "import sys, outrider.models.runtimes, tests.fake_runtime, outrider.models.runtimes.ngram\n"
        "assert not {'openvino', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_torch_refuses_what_it_cannot_do(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Devices, types, sizes and directories that do not work each have an error that names them."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="device is 'abacus'"):
        open_batch_runtime("torch", model, RuntimeOptions(device="abacus"))
    with pytest.raises(ConfigError, match="dtype is 'int3'; the torch runtime takes f32, bf16, f16"):
        open_batch_runtime("torch", model, RuntimeOptions(properties={"dtype": "int3"}))
    with pytest.raises(ConfigError, match="kv_cache_bytes is 10;"):
        open_batch_runtime("torch", model, RuntimeOptions(kv_cache_bytes=10))
    with pytest.raises(BundleError, match="transformers cannot load"):
        open_batch_runtime("torch", tmp_path, OPTIONS)
    for family in ("bloom", "gpt_neo"):
        with pytest.raises(BundleError, match=rf"{family} does not use transformers' attention interface"):
            open_batch_runtime("torch", tiny_model(family), OPTIONS)


def test_torch_keeps_to_the_length_that_an_export_promises(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The exporter writes it to config.json, beside the model's own length."""
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {PROMISED_POSITIONS: 100}), encoding="utf-8")
    for options, expected in ((OPTIONS, 100), (RuntimeOptions(max_positions=64), 64)):
        runtime = open_batch_runtime("torch", model, options)
        assert runtime.limits.max_positions == expected
        runtime.close()
