"""Mixtures of experts: rounding lets tokens choose other experts, so their check is another, and no weaker."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from tests.export_cli import parity_of
from tests.test_parity import Exact, source
from tests.tiny_models import make_tiny_tokenizer, make_unknown

from outrider.export.check.parity import check_parity
from outrider.export.check.source_logits import make_reference
from outrider.export.convert.openvino_ir import IR_NAME, convert_to_ir, finish_ir
from outrider.export.make import build
from outrider.export.recipes import ExportOptions
from outrider.export.source.family_facts import is_mixture
from outrider.export.source.model_source import read_source
from outrider.export.source.torch_source import load_source_model
from outrider.models.bundle.manifest import Precision
from outrider.models.errors import ExportError, ParityFailure
from outrider.models.text.tokenizer import Tokenizer

XML = f"{IR_NAME}.xml"
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64, "head_dim": 16},
}
COMMON: dict[str, Any] = {
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_unknown(tmp_path_factory.mktemp("mixtral") / "mixtral", "mixtral", **COMMON, **FAMILIES["mixtral"])


@pytest.fixture(scope="module")
def ir(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixtral in FP32."""
    directory = tmp_path_factory.mktemp("ir")
    convert_to_ir(load_source_model(mixtral), directory, "mixtral")
    return directory


def constants(directory: Path) -> dict[str, Any]:
    """The constants of an IR by name, copied."""
    model = openvino.Core().read_model(directory / XML)
    return {
        node.get_friendly_name(): node.get_data().copy()
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant"
    }


def altered(directory: Path, target: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of an IR with one constant changed in place."""
    model = openvino.Core().read_model(directory / XML)
    (node,) = (node for node in model.get_ordered_ops() if node.get_friendly_name() == name)
    values = node.get_data().copy()
    change(values)
    constant = openvino.op.Constant(values)
    constant.set_friendly_name(name)
    for reader in node.output(0).get_target_inputs():
        reader.replace_source_output(constant.output(0))
    target.mkdir()
    openvino.save_model(model, target / XML, compress_to_fp16=False)
    return target


def test_routers_stay_as_they_are(ir: Path, tmp_path: Path) -> None:
    """An error of INT8 in a router sends a token to another expert; experts are quantized."""
    finish_ir(ir, tmp_path, "mixtral", "int8", "cpu")
    exact, found = constants(ir), constants(tmp_path)
    router, expert = "self.model.layers.0.mlp.gate.weight", "self.model.layers.0.mlp.experts.down_proj"
    assert found[router].dtype == np.float32 and np.array_equal(found[router], exact[router])
    assert found[expert].dtype == np.uint8 and found[expert].shape == exact[expert].shape


@pytest.mark.parametrize(("family", "seed"), [("mixtral", 2), ("qwen3_moe", 0)])
def test_int8_passes_whichever_experts_its_tokens_choose(family: str, seed: int, tmp_path: Path) -> None:
    """Exact without quantization; in INT8 agreement and KL decide, not the largest difference."""
    path = make_unknown(tmp_path / family, family, seed=seed, **COMMON, **FAMILIES[family])
    assert is_mixture(read_source(path).shape.facts)
    parity = parity_of(path, tmp_path, ExportOptions("target", "int8", num_threads=1))
    assert parity.max_relative_delta is None and parity.max_mean_kl == 0.05 and parity.own_delta < 1e-3


def zero_an_expert(values: Any) -> None:
    values[5] = 0


def swap_two(values: Any) -> None:
    values[[1, 5]] = values[[5, 1]]


@pytest.mark.parametrize(
    ("stage", "precision", "change"),
    [
        ("conversion", "int8", zero_an_expert),
        ("quantization", "int8", swap_two),
        ("quantization", "int4", zero_an_expert),
    ],
)
def test_a_broken_expert_is_refused(
    stage: str,
    precision: Precision,
    change: Callable[[Any], None],
    mixtral: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By FP32's bounds where the converter breaks it, by the comparison of weights where the quantizer does: one that
    is zeroed, or has another's weights, is found however few tokens choose it.
    """
    name = "self.model.layers.0.mlp.experts.down_proj"

    def break_ir(directory: Path) -> None:
        broken = altered(directory, directory / "broken", name, change)
        for path in broken.iterdir():
            path.replace(directory / path.name)
        broken.rmdir()

    def convert(model: Any, directory: Path, label: str) -> None:
        convert_to_ir(model, directory, label)
        break_ir(directory)

    def finish(ir: Path, directory: Path, *arguments: Any) -> Any:
        aside = shutil.copytree(ir, tmp_path / "aside")
        break_ir(aside)
        return finish_ir(aside, directory, *arguments)

    if stage == "conversion":
        monkeypatch.setattr(build, "convert_to_ir", convert)
        message = "already before quantization: parity check failed"
    else:
        monkeypatch.setattr(build, "finish_ir", finish)
        message = f"matrix [15] of {name} differs from the source's"
    options = ExportOptions("draft", precision, num_threads=1)
    with pytest.raises(ExportError, match=message):
        parity_of(mixtral, tmp_path, options)


class Flipped(Exact):
    """A share of its rows is another token's altogether, as where experts flip."""

    share = 0.02

    def run(self, tokens: Any, num_rows: int) -> Any:
        rows = super().run(tokens, num_rows)
        ends = np.arange(len(self.tokens) - len(rows), len(self.tokens))
        flips = (ends * 0.6180339887) % 1.0 < self.share
        return np.where(flips[:, None], rows * 0.3, rows)


class FlippedOften(Flipped):
    share = 0.2


def test_few_flips_pass_and_many_do_not(tmp_path: Path) -> None:
    """For a mixture in INT8; a dense model's largest difference is bounded, and a mixture's in FP32."""
    make_tiny_tokenizer(tmp_path)
    reference = make_reference(Tokenizer.from_dir(tmp_path), source, 512)
    assert check_parity(Flipped(), reference, "int8", "Flipped", is_mixture=True).max_relative_delta is None
    with pytest.raises(ParityFailure, match=r"mean KL [\d.]+ over 70 rows of a mixture of experts \(at most 0\.05"):
        check_parity(FlippedOften(), reference, "int8", "Flipped", is_mixture=True)
    for precision, is_mixed in (("int8", False), ("fp32", True)):
        with pytest.raises(ParityFailure, match="largest difference"):
            check_parity(Flipped(), reference, precision, "Flipped", is_mixture=is_mixed)
