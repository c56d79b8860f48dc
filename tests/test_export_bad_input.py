"""Broken, inconsistent and altered sources and bundles, each has a clear message."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.bad_sources import DAMAGED_BUNDLES, DAMAGED_SOURCES, WEIGHTS, make_sources

from outrider.export.make.pair import export_pair
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.export.source.torch_source import load_source_model
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import BundleError, OutriderError


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft and a target, whole."""
    root = tmp_path_factory.mktemp("sources")
    make_sources(root)
    return root


@pytest.fixture(scope="module")
def bundle(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the torch runtime."""
    place = tmp_path_factory.mktemp("bundle") / "target"
    return export_model(sources / "target", place, ExportOptions("target", "fp32", "torch", num_threads=1)).path


@pytest.mark.parametrize("what", DAMAGED_SOURCES)
def test_a_bad_source_is_told_of_and_nothing_is_written(what: str, sources: Path, tmp_path: Path) -> None:
    """What is wrong, in which file, and what to do."""
    damage, expected, *more = DAMAGED_SOURCES[what]
    source = shutil.copytree(sources / "draft", tmp_path / "damaged")
    damage(source)
    options = ExportOptions("draft", "fp16", "openvino", device="gpu") if "fp16" in more else ExportOptions("draft")
    with pytest.raises(OutriderError, match=rf"(?s){expected}"):
        if "pair" in more:
            export_pair(source, sources / "target", tmp_path / "out")
        else:
            export_model(source, tmp_path / "out" / "draft", options)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize("what", DAMAGED_BUNDLES)
def test_an_altered_bundle_is_not_opened(what: str, bundle: Path, tmp_path: Path) -> None:
    """Whatever was changed, taken away or put in."""
    damage, expected = DAMAGED_BUNDLES[what]
    altered = shutil.copytree(bundle, tmp_path / "altered")
    damage(altered)
    with pytest.raises(BundleError, match=expected):
        Bundle.open(altered).tokenizer()


def load_with(source: Path, **shapes: tuple[int, ...]) -> None:
    """Loads a source with these tensors added to its weights; "__" stands for a dot."""
    tensors = {name: np.array(tensor) for name, tensor in load_file(source / WEIGHTS).items()}
    tensors |= {name.replace("__", "."): np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})
    load_source_model(source)


def test_parts_that_a_text_model_does_not_load_are_no_lie(sources: Path, tmp_path: Path) -> None:
    """A vision tower, and the rotary frequencies that old checkpoints carry."""
    source = shutil.copytree(sources / "draft", tmp_path / "draft")
    load_with(
        source,
        vision_tower__layers__0__fc__weight=(4, 4),
        model__layers__0__self_attn__rotary_emb__inv_freq=(4,),
    )


def test_a_norm_that_the_family_does_not_have_is_refused(sources: Path, tmp_path: Path) -> None:
    """Left out it would be another model, and the check, made of the same loading, would not see it."""
    source = shutil.copytree(sources / "draft", tmp_path / "draft")
    with pytest.raises(OutriderError, match=r"no place for the tensor model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_with(source, model__layers__0__self_attn__q_norm__weight=(16,))
