"""Triton's interpreter as GPUs compute: for tests, and for benches that run kernels without one."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_PACKAGES = (language, core, language.tensor, language.math, core.tensor_descriptor_base)
_BUILTINS = {
    package: [name for name, member in inspect.getmembers(package) if core.is_builtin(member)] for package in _PACKAGES
}
_LANGUAGES = (language, core)


# -- the same results sooner: what Triton's own finds anew at each operation of a kernel is found once -----------------


def _is_patched(package: Any) -> bool:
    """All names of a package are, or none: a kernel calls the function."""
    return not core.is_builtin(getattr(package, _BUILTINS[package][0]))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    if not _is_patched(package):
        for name in _BUILTINS[package]:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


@functools.cache
def _languages_of(function: Any) -> list[Any]:
    return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in _LANGUAGES]


def _patch_lang(function: Any, patch: Any = interpreter._patch_lang) -> Any:
    """Nothing where a kernel calls the function."""
    known = _languages_of(function)
    return interpreter._LangPatchScope() if known and all(map(_is_patched, known)) else patch(function)


@functools.cache
def _shape_of_a_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(each) for each in shape])


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape_of_a_tensor(tuple(type.shape.values) if type.is_block() else ())


_blocks: dict[tuple[int, ...], tuple[Any, int]] = {}


def _make_block_type(self: Any, element_ty: Any, shape: Any, make: Any = core.block_type.__init__) -> None:
    values = shape.values if isinstance(shape, core.tuple) else shape
    sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in values)
    if sizes not in _blocks:
        make(self, element_ty, shape)
        _blocks[sizes] = self.shape, self.numel
    self.element_ty, (self.shape, self.numel) = element_ty, _blocks[sizes]
    self.name = f"<{self.shape}, {element_ty}>"


def _broadcast(self: Any, left: Any, right: Any, broadcast: Any = TritonSemantic.broadcast_impl_value) -> Any:
    blocks = left.type.is_block(), right.type.is_block()
    if not any(blocks) or (all(blocks) and left.type.shape.values == right.type.shape.values):
        return left, right
    return broadcast(self, left, right)


_numpys: dict[str, np.dtype[Any]] = {}


def _numpy_of(type: Any, find: Any = interpreter._get_np_dtype) -> np.dtype[Any]:
    if (found := _numpys.get(type.name)) is None:
        found = _numpys[type.name] = find(type)
    return found


interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
interpreter._get_np_dtype = _numpy_of
core.tensor.__init__, core.block_type.__init__ = _make_tensor, _make_block_type
TritonSemantic.broadcast_impl_value = _broadcast
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
