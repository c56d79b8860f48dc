"""Triton's interpreter as GPUs compute: for tests, and for benches that run kernels without one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

_PACKAGES = (language, language.core, language.tensor, language.math, language.core.tensor_descriptor_base)
_BUILTINS = {
    package: [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]
    for package in _PACKAGES
}


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As Triton's own, which looks through all names of a package at each call of a kernel's function."""
    names = _BUILTINS[package]
    if language.core.is_builtin(getattr(package, names[0])):  # else all are patched: a kernel calls the function
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


interpreter._patch_builtin = _patch_builtin
# Without `debug` what this computes is dropped: a quarter of a kernel's time.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


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
