"""Products, sums, norms and softmaxes whose rows do not depend on what else is in the step, bit for bit, in Triton.

cuBLAS and torch choose kernels, tiles and split sums by a step's number of tokens, so a row's last bits change with its
company. Here every sum has one order: tiles of a fixed size, one after the other, no split-K. `row_by_row` puts these
kernels in the place of torch's own on a device, so that any model's code uses them (the way of He et al. 2025,
"Defeating Nondeterminism in LLM Inference"). On the CPU it runs on Triton's interpreter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from outrider.models.errors import ConfigError

_ROWS: Final = 64
"""Rows of a tile of a product: what Hopper's tensor cores take at least; fewer new tokens waste arithmetic only."""
_TILES: Final = {1: (64, 64), 2: (32, 128), 4: (64, 64)}
"""Columns of a tile of a product, and numbers of a row that one sum adds at a time, by bytes of a weight."""
_WIDE: Final = 1024
"""The same in a sum, a norm or a softmax."""
_FEW: Final = 16
"""Numbers of a sum that is made of whole tensors."""


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    left,
    right,
    bias,
    scale,
    ends,
    out,
    num_rows,
    num_columns,
    size,
    left_row,
    left_column,
    right_row,
    right_column,
    right_group,
    num_groups,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """A tile of left [M, K] times right [K, N], times scale [N], plus bias [N]: out [M, N], contiguous.

    GROUPS: not 0 where groups of rows have a `right` each, and `ends` says where each group's rows end: as many, padded
    to a power of 2. Each group has tiles of its own, so that a row's place in its tile is all that the others change.
    """
    tile = tl.program_id(1).to(tl.int64)
    begin = tile * ROWS
    if GROUPS > 0:
        each = tl.arange(0, GROUPS)
        is_group = each < num_groups
        end = tl.load(ends + each, mask=is_group, other=0)
        counts = tl.where(is_group, end - tl.load(ends + each - 1, mask=is_group & (each > 0), other=0), 0)
        tiles = (counts + ROWS - 1) // ROWS
        group = tl.minimum(tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0), num_groups - 1)
        begin = tl.sum(tl.where(each < group, counts, 0), axis=0).to(tl.int64)
        begin += (tile - tl.sum(tl.where(each < group, tiles, 0), axis=0)) * ROWS
        num_rows = tl.sum(tl.where(each <= group, counts, 0), axis=0)
        right += group.to(tl.int64) * right_group
    row = begin + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, tl.where(begin < num_rows, size, 0), STRIDE):  # some of the groups' tiles may be none
        inner = at + tl.arange(0, STRIDE)
        a = tl.load(
            left + row[:, None] * left_row + inner[None, :] * left_column,
            mask=(row < num_rows)[:, None] & (inner < size)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + inner[:, None] * right_row + column[None, :] * right_column,
            mask=(inner < size)[:, None] & (column < num_columns)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale + column, mask=column < num_columns, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * num_columns + column[None, :],
        total,
        mask=(row < num_rows)[:, None] & (column < num_columns)[None, :],
    )


def matmul(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """left [M, K] times right [K, N], plus bias [N] if given: [M, N] of left's dtype; sums in float32.

    scale: float32 [N], of a `right` of int8.
    """
    return _product(left, right, None if bias is None else bias.contiguous(), None, scale)


def grouped_matmul(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """left [M, K] times, for each group of its rows, one of right [G, K, N]: [M, N] of left's dtype.

    ends: int32 [G], where each group's rows end. It stays on the device.
    """
    return _product(left, right, None, ends)


def _product(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    (num_rows, size), num_columns = left.shape, right.shape[-1]
    num_groups = 0 if ends is None else len(ends)
    out = left.new_empty((num_rows, num_columns))
    if not out.numel():
        return out
    tiles = triton.cdiv(num_rows, _ROWS) + num_groups  # a group's last tile may have one row
    columns, stride = _TILES.get(right.element_size(), _TILES[4])
    launch: Any = _multiply[(triton.cdiv(num_columns, columns), tiles)]
    launch(
        left,
        right,
        out if bias is None else bias,
        out if scale is None else scale,
        out if ends is None else ends,
        out,
        num_rows,
        num_columns,
        size,
        *left.stride(),
        *right.stride()[-2:],
        right.stride(0),
        num_groups,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        GROUPS=triton.next_power_of_2(num_groups) if num_groups else 0,
        ROWS=_ROWS,
        COLUMNS=columns,
        STRIDE=stride,
        num_stages=_stages(left.device),
    )
    return out


@lru_cache
def _stages(device: torch.device) -> int:
    """Tiles of a product that are on their way at once: what fits a GPU's fast memory."""
    if device.type != "cuda":
        return 3
    facts: Any = torch.cuda.get_device_properties(device)
    return 4 if facts.shared_memory_per_block_optin >= 100 << 10 else 3


@triton.jit
def _sum_row(values, size, WIDE: tl.constexpr, IN: tl.constexpr):
    """The sum of a row, in the type IN: WIDE sums side by side, then joined."""
    total = tl.zeros([WIDE], IN)
    for at in range(0, size, WIDE):
        place = at + tl.arange(0, WIDE)
        total += tl.load(values + place, mask=place < size, other=0.0).to(IN)
    return tl.sum(total, axis=0)


@triton.jit
def _sum(values, out, size, count, WIDE: tl.constexpr, IN: tl.constexpr):
    """The sum of a row, divided by `count`."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _sum_row(values + row * size, size, WIDE, IN) / count)


@triton.jit
def _layer_norm(values, weight, bias, out, means, scales, size, eps, WIDE: tl.constexpr):
    """out: (values - mean) * scale * weight + bias, with scale 1 / sqrt(variance + eps)."""
    row = tl.program_id(0).to(tl.int64)
    mean = _sum_row(values + row * size, size, WIDE, tl.float32) / size
    total = tl.zeros([WIDE], tl.float32)
    for at in range(0, size, WIDE):
        place = at + tl.arange(0, WIDE)
        off = tl.load(values + row * size + place, mask=place < size, other=0.0).to(tl.float32) - mean
        total += tl.where(place < size, off * off, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(total, axis=0) / size + eps)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    for at in range(0, size, WIDE):
        place = at + tl.arange(0, WIDE)
        is_in = place < size
        normed = (tl.load(values + row * size + place, mask=is_in, other=0.0).to(tl.float32) - mean) * scale
        normed = normed * tl.load(weight + place, mask=is_in, other=0.0).to(tl.float32)
        normed = normed + tl.load(bias + place, mask=is_in, other=0.0).to(tl.float32)
        tl.store(out + row * size + place, normed, mask=is_in)


@triton.jit
def _softmax(values, out, size, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = tl.full([WIDE], float("-inf"), tl.float32)
    for at in range(0, size, WIDE):
        place = at + tl.arange(0, WIDE)
        most = tl.maximum(most, tl.load(values + row * size + place, mask=place < size, other=float("-inf")))
    peak = tl.max(most, axis=0)
    total = tl.zeros([WIDE], tl.float32)
    for at in range(0, size, WIDE):
        place = at + tl.arange(0, WIDE)
        read = tl.load(values + row * size + place, mask=place < size, other=float("-inf")).to(tl.float32)
        total += tl.exp(read - peak)
    weight = tl.sum(total, axis=0)
    for at in range(0, size, WIDE):
        place = at + tl.arange(0, WIDE)
        read = tl.load(values + row * size + place, mask=place < size, other=float("-inf")).to(tl.float32)
        tl.store(out + row * size + place, tl.exp(read - peak) / weight, mask=place < size)


def sum_of(
    values: torch.Tensor, dims: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None, *, is_mean: bool
) -> torch.Tensor:
    """The sum or mean of floats over some dimensions, or all; in float64 if it is of that dtype, else in float32."""
    axes = sorted(each % values.dim() for each in dims) if dims else list(range(values.dim()))
    kept = [each for each in range(values.dim()) if each not in axes]
    read = values.permute(*kept, *axes)
    shape = [1 if each in axes else size for each, size in enumerate(values.shape)]
    size = math.prod(values.shape[each] for each in axes)
    out = values.new_empty(shape, dtype=dtype)
    in_float64 = torch.float64 in (values.dtype, out.dtype)
    if size <= _FEW and len(axes) == 1:  # experts, say: whole tensors are added, one after the other
        total = torch.zeros(read.shape[:-1], dtype=torch.float64 if in_float64 else torch.float32, device=out.device)
        for part in read.unbind(-1):
            total += part
        out.copy_((total / size if is_mean else total).view(shape))
    elif out.numel():
        read = read.contiguous()
        launch: Any = _sum[(out.numel(),)]
        launch(read, out, size, size if is_mean else 1, WIDE=_WIDE, IN=tl.float64 if in_float64 else tl.float32)
    return out if keepdim else out.view([values.shape[each] for each in kept])


def layer_norm(
    values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Layer norm over the last dimension; with it each row's mean and 1 / sqrt(variance + eps), float32."""
    read, size = values.contiguous(), values.shape[-1]
    out = torch.empty_like(read)
    means, scales = read.new_empty((2, *read.shape[:-1], 1), dtype=torch.float32)
    weight = read.new_ones(size) if weight is None else weight.contiguous()
    bias = read.new_zeros(size) if bias is None else bias.contiguous()
    launch: Any = _layer_norm[(means.numel(),)]
    launch(read, weight, bias, out, means, scales, size, eps, WIDE=_WIDE)
    return out, means, scales


def softmax(values: torch.Tensor) -> torch.Tensor:
    """The softmax over the last dimension, computed in float32."""
    read = values.contiguous()
    out = torch.empty_like(read)
    launch: Any = _softmax[(read.numel() // read.shape[-1],)]
    launch(read, out, read.shape[-1], WIDE=_WIDE)
    return out


@contextmanager
def row_by_row(key: str) -> Iterator[None]:
    """Puts the kernels in the place of torch's own for a dispatch key ("CUDA", "CPU"), inside.

    Other operations stay torch's: `bitwise_check` finds the models that are not row by row for all that.
    """
    library = torch.library.Library("aten", "IMPL")

    def mean_dim(
        values: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return sum_of(values, dim, keepdim, dtype, is_mean=True)

    def sum_dim(
        values: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if values.is_floating_point():
            return sum_of(values, dim, keepdim, dtype, is_mean=False)
        return sum_of(values, dim, keepdim, torch.float64, is_mean=False).to(dtype or torch.int64)  # exact to 2^53

    def grouped_mm(
        left: torch.Tensor,
        right: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if left.dim() != 2 or right.dim() != 3 or offs is None or bias is not None:
            raise ConfigError("the model multiplies groups in a way that --exact bitwise does not have; leave it out")
        return grouped_matmul(left, right, offs).to(out_dtype or left.dtype)

    def addmm(
        bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1.0, alpha: float = 1.0
    ) -> torch.Tensor:
        if beta == alpha == 1.0 and bias.dim() == 1 and bias.shape[0] == right.shape[1]:
            return matmul(left, right, bias)
        return beta * bias + alpha * matmul(left, right)

    def native_layer_norm(
        values: torch.Tensor, shape: list[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = values.flatten(values.dim() - len(shape)) if len(shape) > 1 else values
        weights = [None if each is None else each.flatten() for each in (weight, bias)]
        out, means, scales = layer_norm(flat, weights[0], weights[1], eps)
        return out.view(values.shape), means, scales

    def softmax_dim(values: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        last = values.movedim(dim, -1)
        return softmax(last.float() if half_to_float else last).movedim(-1, dim)

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.stack([matmul(a, b) for a, b in zip(left, right, strict=True)])

    def linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(values.reshape(-1, values.shape[-1]), weight.t(), bias).view(*values.shape[:-1], len(weight))

    for name, kernel in (
        ("linear", linear),
        ("mm", matmul),
        ("addmm", addmm),
        ("bmm", bmm),
        ("_grouped_mm", grouped_mm),
        ("mean.dim", mean_dim),
        ("sum.dim_IntList", sum_dim),
        ("native_layer_norm", native_layer_norm),
        ("_softmax", softmax_dim),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced: that is what it is for
            library.impl(name, kernel, key)
    try:
        yield
    finally:
        library._destroy()
