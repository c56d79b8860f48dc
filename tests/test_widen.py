"""Widening: the same function with the memory traffic of a larger model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.export.source.model_source import read_source
from outrider.export.source.torch_source import load_source_model, source_logits
from outrider.export.source.widen import describe_widening, widen
from outrider.models.bundle.bundle import hash_file
from outrider.models.errors import ExportError

TOKENS = list(range(2, 60))


def make_source(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    size = make_tiny_tokenizer(directory)
    return make_tiny_model(family, directory, vocab_size=size, **overrides)


def logits(directory: Path) -> NDArray[np.float32]:
    return source_logits(load_source_model(directory), TOKENS)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {"mlp_bias": True}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})],
)
def test_a_widened_model_computes_the_same(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Logits move by no more than the order of a sum moves them."""
    source = make_source(tmp_path / "source", family, **overrides)
    widened = widen(source, tmp_path / "wide", 4.0)
    before, after = logits(source), logits(tmp_path / "wide")
    assert np.abs(after - before).max() <= 2e-6 * np.abs(before).max()
    assert widened.architecture.parameters * 4e-6 == pytest.approx(4.0, rel=0.02)


def test_added_neurons_do_real_work(tmp_path: Path) -> None:
    """Not zero, and far from the denormal numbers that would make kernels slow; only their output is zero."""
    from safetensors.numpy import load_file

    source = make_source(tmp_path / "source")
    widen(source, tmp_path / "wide", 1.0)
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    original = read_source(source).architecture.intermediate_size
    for kind in ("gate", "up"):
        added = tensors[f"model.layers.0.mlp.{kind}_proj.weight"][original:]
        assert len(added) and np.abs(added).min() > 1e-3 and np.abs(added).max() < 1
    assert not tensors["model.layers.0.mlp.down_proj.weight"][:, original:].any()


def test_it_says_that_it_is_widened_and_from_what(tmp_path: Path) -> None:
    """In config.json, and from there in the manifest."""
    source = make_source(tmp_path / "source")
    widened = widen(source, tmp_path / "wide", 2.0)
    told = describe_widening(widened)
    assert told is not None
    assert told.from_parameters == read_source(source).architecture.parameters
    assert told.from_intermediate_size == 128
    assert told.fp32_megabytes == pytest.approx(2.0, rel=0.05)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["outrider_widened"] == 128
    assert describe_widening(read_source(source)) is None


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """A widened bundle can be cached by its source."""
    source = make_source(tmp_path / "source")
    for name in ("a", "b"):
        widen(source, tmp_path / name, 2.0)
    first, second = ({p.name: hash_file(p) for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert first == second


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    """Too small a wish, a widened model, a place that is taken, a feed-forward of another make."""
    source = make_source(tmp_path / "source")
    with pytest.raises(ExportError, match="cannot be widened"):
        widen(source, tmp_path / "wide", 0.01)
    with pytest.raises(ExportError, match=r"\(gpt_neox\) cannot be widened: it has 0 matrices"):
        widen(make_source(tmp_path / "ungated", "gpt_neox"), tmp_path / "wide", 2.0)
    widen(source, tmp_path / "wide", 2.0)
    with pytest.raises(ExportError, match="not empty"):
        widen(source, tmp_path / "wide", 2.0)
    with pytest.raises(ExportError, match="widened already"):
        widen(tmp_path / "wide", tmp_path / "wider", 4.0)
