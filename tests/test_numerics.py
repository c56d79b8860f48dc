"""The error bounds of docs/numerics.md, weight by weight, on what exports write.

Weights are drawn, put into a small graph or file, quantized by the functions that exports use, written, read back from
the file and compared with what they were. `bench/` and the report card judge what such errors do to a model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from openvino import opset13 as ops
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from tests.stored_weights import Stored, read_ir
from tests.weight_bounds import (
    BF16,
    FP16,
    SHAPES,
    SMALLEST_BF16,
    SMALLEST_FP16,
    Matrix,
    asymmetric_bound,
    drawn,
    rounding_bound,
    small_models,
    symmetric_bound,
)

from outrider.export.convert.openvino_ir import IR_NAME, finish_ir
from outrider.export.convert.safetensors_cast import cast_weights
from outrider.export.make.pair import PairPaths, reference_directories
from outrider.export.source.weight_files import BF16_MAX, FP16_MAX, require_range
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.errors import ExportError


def write_ir(matrices: dict[str, Matrix], directory: Path) -> None:
    """An embedding and two products after it, as a language model begins and ends: nncf takes the ends for such."""
    ids = ops.parameter([1, -1], np.int64, name="input_ids")
    constants = {name: ops.constant(matrix, name=name) for name, matrix in matrices.items()}
    hidden = ops.gather(constants["embedding"], ids, ops.constant(0, np.int64))
    hidden = ops.matmul(hidden, constants["middle"], False, True)
    logits = ops.matmul(hidden, constants["head"], False, True)
    ov.save_model(ov.Model([logits], [ids], "small"), directory / f"{IR_NAME}.xml", compress_to_fp16=False)


def through_ir(matrices: dict[str, Matrix], precision: Precision, device: Device) -> dict[str, Stored]:
    """What the exported IR of these matrices holds."""
    with tempfile.TemporaryDirectory() as root:
        source, exported = Path(root) / "source", Path(root) / "exported"
        for directory in (source, exported):
            directory.mkdir()
        write_ir(matrices, source)
        finish_ir(source, exported, "small", precision, device)
        return read_ir(exported / f"{IR_NAME}.xml")


def require_bound(name: str, stored: Stored, weights: Matrix) -> float:
    """Every weight within the bound of its format; returns the largest share of a bound that was used."""
    exact = weights.astype(np.float64)
    if stored.bits == 32:
        bound = np.full(exact.shape, 0.0)
    elif stored.bits == 16:
        bound = rounding_bound(exact, FP16, SMALLEST_FP16)
    elif stored.scale_type == "f32":
        assert stored.group == weights.shape[1], name
        bound = symmetric_bound(exact)
    else:
        assert stored.scale_type == "f16", name
        bound = asymmetric_bound(exact, stored.group, 2**stored.bits - 1)
    error = np.abs(stored.values.reshape(exact.shape) - exact)
    assert np.isfinite(error).all(), name
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert error[worst] <= bound[worst], f"{name}{worst}: {exact[worst]} is off by {error[worst]}, bound {bound[worst]}"
    return float(np.divide(error, bound, out=np.zeros_like(error), where=bound > 0).max())


@pytest.mark.parametrize(
    ("precision", "device"), [("int8", "cpu"), ("int4", "cpu"), ("int8", "npu"), ("fp16", "gpu"), ("fp32", "cpu")]
)
@settings(max_examples=12, deadline=None)
@given(matrices=small_models())
def test_every_weight_of_an_ir_keeps_its_bound(
    precision: Precision, device: Device, matrices: dict[str, Matrix]
) -> None:
    """Whatever the rows are: zeros, denormals, outliers, one sign only."""
    stored = through_ir(matrices, precision, device)
    assert stored.keys() == matrices.keys()
    for name, weights in matrices.items():
        require_bound(name, stored[name], weights)


@pytest.mark.parametrize(
    ("precision", "device", "form"),
    [
        ("int8", "cpu", {"embedding": (8, 192, "f16"), "middle": (8, 192, "f16"), "head": (8, 128, "f16")}),
        ("int4", "cpu", {"embedding": (8, 192, "f16"), "middle": (4, 64, "f16"), "head": (8, 128, "f16")}),
        ("int8", "npu", {"embedding": (8, 192, "f32"), "middle": (8, 192, "f32"), "head": (8, 128, "f32")}),
        ("fp16", "gpu", dict.fromkeys(("embedding", "middle", "head"), (16, 0, ""))),
    ],
)
def test_the_formats_are_as_written_and_their_bounds_not_slack(
    precision: Precision, device: Device, form: dict[str, tuple[int, int, str]]
) -> None:
    """Bits, weights a scale and its type; the worst of ordinary weights uses most of the bound."""
    rng = np.random.default_rng(0)
    vocab, width, inner = SHAPES["large"]
    shapes = {"embedding": (vocab, width), "middle": (inner, width), "head": (vocab, inner)}
    matrices = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    stored = through_ir(matrices, precision, device)
    assert {name: (found.bits, found.group, found.scale_type) for name, found in stored.items()} == form
    for name, weights in matrices.items():
        assert 0.9 < require_bound(name, stored[name], weights) <= 1


@pytest.mark.parametrize(("width", "bits", "group"), [(192, 4, 64), (96, 4, 32), (160, 4, 32), (48, 8, 48)])
def test_groups_of_int4_fit_the_width(width: int, bits: int, group: int) -> None:
    """64 weights a scale, 32 where 64 does not divide the row, and INT8 where 32 does not."""
    rng = np.random.default_rng(0)
    shapes = {"embedding": (16, width), "middle": (32, width), "head": (16, 32)}
    matrices = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    middle = through_ir(matrices, "int4", "cpu")["middle"]
    assert (middle.bits, middle.group) == (bits, group)


@pytest.fixture(scope="module")
def target_weights() -> dict[str, Matrix]:
    """Every matrix of the bundled target, as its safetensors have it."""
    tensors = load_torch(reference_directories().target / "model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items() if tensor.ndim == 2}


@pytest.mark.parametrize(
    ("precision", "device"), [("int8", "cpu"), ("int4", "cpu"), ("int8", "npu"), ("fp16", "gpu"), ("fp32", "cpu")]
)
def test_every_weight_of_the_reference_target_keeps_its_bound(
    precision: Precision,
    device: Device,
    reference_pair: PairPaths,
    target_weights: dict[str, Matrix],
    tmp_path: Path,
) -> None:
    """A trained model, all of it, from the IR that was exported of it."""
    finish_ir(reference_pair.target, tmp_path, "target", precision, device)
    stored = {name.removeprefix("self."): found for name, found in read_ir(tmp_path / f"{IR_NAME}.xml").items()}
    assert stored.keys() >= target_weights.keys()
    shares = [require_bound(name, stored[name], weights) for name, weights in target_weights.items()]
    assert len(shares) == len(target_weights) > 40 and (max(shares) > 0.99 or precision == "fp32")


CASTS: dict[Precision, tuple[float, float, float]] = {
    "fp16": (FP16, SMALLEST_FP16, FP16_MAX),
    "bf16": (BF16, SMALLEST_BF16, BF16_MAX),
}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@settings(max_examples=40, deadline=None)
@example(matrix=np.array([[1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]], np.float32), scale=1.0)  # ties
@example(matrix=np.array([[2**-25, 3 * 2**-25, 2**-134, 3 * 2**-134, 0.0, -0.0]], np.float32), scale=1.0)
@given(matrix=drawn(16, 48), scale=st.sampled_from([1.0, 1e-30, 1e30]))
def test_every_weight_of_a_cast_keeps_its_bound(precision: Precision, matrix: Matrix, scale: float) -> None:
    """Rounded to nearest, ties to even, subnormal numbers kept, nothing made infinite."""
    unit, smallest, largest = CASTS[precision]
    weights = np.clip(matrix * np.float32(scale), -largest, largest)
    with tempfile.TemporaryDirectory() as root:
        source, out = Path(root) / "model.safetensors", Path(root) / "out"
        out.mkdir()
        save_file({"weights": weights}, source)
        require_range([source], precision)
        cast_weights([source], out, precision)
        cast = load_torch(out / source.name)["weights"]
    assert cast.dtype == (torch.float16 if precision == "fp16" else torch.bfloat16)
    stored = cast.double().numpy()
    error = np.abs(stored - weights.astype(np.float64))
    assert np.isfinite(stored).all()
    assert (error <= rounding_bound(weights.astype(np.float64), unit, smallest)).all()
    if precision == "fp16":  # numpy rounds to nearest even
        np.testing.assert_array_equal(stored, weights.astype(np.float16).astype(np.float64))


@pytest.mark.parametrize(
    ("precision", "weight", "message"),
    [
        ("fp16", 65_520.0, "holds 65520, beyond the 65504 that fp16 can hold"),
        ("fp16", -1e5, "holds -100000, beyond"),
        ("bf16", 3.4e38, "holds .*, beyond the 3.38953e.38 that bf16 can hold"),
        ("int8", 1e7, "holds .*, beyond .* that int8 can hold"),
        ("int4", 1e6, "holds .*, beyond .* that int4 can hold"),
        ("fp32", float("nan"), "holds weights that are not finite numbers"),
        ("int8", float("-inf"), "holds weights that are not finite numbers"),
    ],
)
def test_a_weight_that_a_precision_cannot_hold_is_refused(
    tmp_path: Path, precision: Precision, weight: float, message: str
) -> None:
    """With the tensor's name and the weight; torch would make it infinite, OpenVINO clip it."""
    path = tmp_path / "model.safetensors"
    save_file({"layer.weight": np.array([[1.0, weight, 2.0]], np.float32)}, path)
    with pytest.raises(ExportError, match=rf"the tensor layer\.weight {message}"):
        require_range([path], precision)


@pytest.mark.parametrize(("precision", "weight"), [("fp16", FP16_MAX), ("bf16", BF16_MAX), ("fp32", 3.4e38)])
def test_the_largest_weight_of_a_precision_is_taken(tmp_path: Path, precision: Precision, weight: float) -> None:
    """The bound itself is inside; BF16 and integer tensors are read too."""
    path = tmp_path / "model.safetensors"
    others = {"brain": torch.ones(2, dtype=torch.bfloat16), "whole": torch.ones(1, dtype=torch.int32)}
    save_torch({"largest": torch.tensor([weight, -weight]), **others}, path)
    require_range([path], precision)


def test_in_an_fp16_ir_only_matrices_are_halved(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """Rotary frequencies, times the position, would turn their rounding into wrong angles far into a text."""
    finish_ir(tiny_ir("llama"), tmp_path, "tiny", "fp16", "gpu")
    before, after = (_constants(directory) for directory in (tiny_ir("llama"), tmp_path))
    vectors = {name: values for name, values in before.items() if sum(size > 1 for size in values.shape) < 2}
    assert any("rotary" in name and values.size > 1 for name, values in vectors.items())
    for values in vectors.values():
        assert any(other.dtype == np.float32 and np.array_equal(values, other) for other in after.values())
    halved = [name for name, values in after.items() if values.dtype == np.float16]
    assert len(halved) == len(before) - len(vectors) and all("weight" in name for name in halved)


def _constants(directory: Path) -> dict[str, NDArray[Any]]:
    nodes = ov.Core().read_model(directory / f"{IR_NAME}.xml").get_ordered_ops()
    constants = [node for node in nodes if node.get_type_name() == "Constant"]
    return {
        node.get_friendly_name(): node.get_data().copy()
        for node in constants
        if node.get_output_element_type(0).is_real()
    }
