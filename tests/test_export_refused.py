"""Tests what is not exported: models and options that cannot be right, and lengths that a model does not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import copy_source, make_unlike_pair

from outrider.export.cli.display import show_progress
from outrider.export.make.pair import PairPaths
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import ConfigError, ExportError


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_unlike_pair(tmp_path_factory.mktemp("sources"))


def only_pickles(path: Path) -> None:
    """As old checkpoints are."""
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def truncated(path: Path) -> None:
    """As after a broken download."""
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def missing_shard(path: Path) -> None:
    """The index names a file that is not there."""
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "damage", "message"),
    [
        ({}, only_pickles, r"pickled weights.*pytorch_model\.bin"),
        ({}, truncated, "not a safetensors file, or is truncated"),
        ({}, missing_shard, "lacks model-00002-of-00002"),
        ({"model_type": "ownnet"}, None, "'ownnet' model.*does not have built in"),
        ({"model_type": "clip_vision_model"}, None, "generates no text"),
        ({"quantization_config": {"bits": 4}}, None, "quantized already"),
        ({"vocab_size": 100}, None, "do not belong together"),
    ],
)
def test_what_cannot_be_exported_rightly_is_refused(
    sources: PairPaths, tmp_path: Path, config: dict[str, Any], damage: Callable[[Path], None] | None, message: str
) -> None:
    """Before any weight is loaded, with what to do."""
    path = copy_source(sources.target, tmp_path / "model", **config)
    if damage is not None:
        damage(path)
    with pytest.raises(ExportError, match=message):
        export_model(path, tmp_path / "out", ExportOptions("target"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"role": "draft", "runtime": "torch"},
        {"role": "draft", "precision": "bf16"},
        {"role": "target", "precision": "int8", "runtime": "torch"},
        {"role": "draft", "widen_mb": 10.0},
        {"role": "target", "widen_mb": 0.0},
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: dict[str, Any]) -> None:
    """When they are made, not minutes later."""
    with pytest.raises(ConfigError):
        ExportOptions(**arguments)


def test_lengths_that_the_model_does_not_have_are_refused(sources: PairPaths, tmp_path: Path) -> None:
    """Before any work, naming the given lengths; lengths that were not given are cut to the model's positions."""
    shapes = StaticShapes(prompt_len=100_000)
    with pytest.raises(ConfigError, match=r"--prompt-len 100,000 was given; the model takes [\d,]+ tokens"):
        export_model(sources.draft, tmp_path / "out", ExportOptions("draft", device="npu", static_shapes=shapes))
    assert not (tmp_path / "out").exists()

    def lengths(**chosen: int) -> tuple[int, int, int]:
        shapes = StaticShapes(**chosen) if chosen else None
        fitted = ExportOptions("draft", device="npu", static_shapes=shapes).fitting(512).resolved_shapes
        assert fitted is not None
        return fitted.prompt_len, fitted.response_len, fitted.step_len

    assert lengths() == (341, 171, 8)
    assert lengths(step_len=4) == (341, 171, 4)
    assert lengths(prompt_len=400) == (400, 112, 8)
    assert lengths(response_len=500) == (12, 500, 8)
    assert lengths(prompt_len=100, response_len=64) == (100, 64, 8)
    for wrong in ({"prompt_len": 512}, {"response_len": 512}, {"prompt_len": 300, "response_len": 300}):
        with pytest.raises(ConfigError, match="the model takes 512 tokens, prompt and response together"):
            lengths(**wrong)
    assert ExportOptions("draft").fitting(512) == ExportOptions("draft")


def test_ctrl_c_says_what_was_kept_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and the interrupt goes on: the exit code is Ctrl-C's."""
    with pytest.raises(KeyboardInterrupt), show_progress(is_quiet=False):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == (
        "Stopped. Nothing was put in place; finished stages are kept, and the same command goes on from there.\n"
    )
