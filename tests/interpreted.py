"""Triton's interpreter as GPUs compute: for tests, and for benches that run kernels without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime import interpreter


@contextmanager
def products_row_by_row() -> Iterator[None]:
    """A tile's product as tensor cores make it, each row by itself and with bits to spare: numpy's BLAS sums the last
    rows of a tile in another order than the first.
    """
    before = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=np.float64, optimize=False)
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = before
