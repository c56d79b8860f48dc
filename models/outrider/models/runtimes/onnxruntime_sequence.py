"""Runs a `SequenceRuntime` on ONNX Runtime: the device's draft on the CPU, or on another execution provider.

Keys and values of each layer are one buffer, bound as past and as present: a step writes its rows in place, and
rollback is a smaller number. On the host everything is bound once, over memory that changes in place; only another
number of new tokens is bound again (and the attention mask of an onnxruntime-genai graph, whose length carries the
length of the cache). For a device with its own memory, inputs are bound in every step: binding copies them there.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.runtimes.base import RuntimeOptions, telling_of_memory
from outrider.models.runtimes.one_sequence import OneSequence
from outrider.models.runtimes.onnxruntime_providers import CPU, CUDA, DIRECTML
from outrider.models.runtimes.onnxruntime_session import OnnxModel, load_onnx_model

ort.disable_telemetry_events()  # Windows builds report their use by default

# A longer prompt runs in pieces: memory for activations grows with the piece, and ONNX Runtime never returns it.
_MAX_STEP: Final = 256
# Where caches live, as ONNX Runtime names memory. For other providers they live on the host and are bound, and so
# copied if necessary, in every step.
_CACHE_DEVICES: Final = {CUDA: "cuda", DIRECTML: "dml"}


def _lazy_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array whose pages the operating system zeroes on first touch: an unused part costs no memory.

    Uses small pages: every head has its own part of the cache, and with huge pages the first token would take two
    megabytes for each head of each layer.
    """
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


class OnnxRuntimeSequence(OneSequence):
    """One sequence of at most `limits.max_positions` tokens."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the model at `path` (directory or .onnx); raises as `load_onnx_model` does.

        The cache is sized for the longest sequence; pages that no token has reached take no memory on the CPU.
        """
        model = load_onnx_model(path, options)
        super().__init__(model.limits)
        self._provider = model.provider
        self._selects_rows = model.selects_rows
        self._has_mask = "attention_mask" in model.inputs
        self._session: Any = model.session
        self._binding: Any = model.session.io_binding()
        self._num_bound = (0, 0)  # new tokens and rows of the bound tensors
        longest = model.limits.max_positions
        self._ids = np.zeros((1, _MAX_STEP), np.int64)
        self._positions = np.zeros((1, _MAX_STEP), np.int64)
        self._masks: list[Any] = []  # one per length so far, as OrtValues over `_ones`
        self._last = np.zeros(1, np.int32)  # position of the last token of the step
        self._total = np.zeros(1, np.int32)
        self._first_row = np.zeros(1, np.int64)  # counted from the end
        self._logits = np.empty((1, _MAX_STEP, 0), model.logits_dtype)
        self._has_positions = "position_ids" in model.inputs
        self._is_on_host = model.provider == CPU
        with telling_of_memory(longest):
            self._ones = _lazy_zeros((1, longest if self._has_mask else 1), np.dtype(np.int64))
            self._caches = self._bind_caches(model)

    def _bind_caches(self, model: OnnxModel) -> dict[str, Any]:
        """Binds the caches; returns them by their input names."""
        device = _CACHE_DEVICES.get(model.provider)
        values = {}
        for cache in model.caches:
            shape = (1, cache.heads, model.limits.max_positions, cache.head_size)
            if device is None:
                value = ort.OrtValue.ortvalue_from_numpy(_lazy_zeros(shape, model.dtype))
            else:
                value = ort.OrtValue.ortvalue_from_shape_and_type(shape, model.dtype, device)
            self._binding.bind_ortvalue_input(cache.past, value)
            self._binding.bind_ortvalue_output(cache.present, value)
            values[cache.past] = value
        return values

    @property
    def provider(self) -> str:
        """The execution provider that runs the model's matrix products, for example "CPUExecutionProvider"."""
        return self._provider

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the next call.

        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than `limits.max_positions`.
        """
        row: NDArray[np.float32] = self._run(tokens, 1)[0]
        return row

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32."""
        if len(tokens) <= _MAX_STEP:
            return self._run(tokens, len(tokens))
        pieces = [tokens[start : start + _MAX_STEP] for start in range(0, len(tokens), _MAX_STEP)]
        self._check_new(tokens)
        return np.concatenate([self._run(piece, len(piece)).copy() for piece in pieces])

    def _run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        self._check_new(tokens)
        while len(tokens) > _MAX_STEP:  # only the last token's logits are needed
            self._step(tokens[:_MAX_STEP], 1)
            tokens = tokens[_MAX_STEP:]
        return self._step(tokens, num_rows)

    def _step(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        num_new = len(tokens)
        past, end = self._length, self._length + num_new
        self._ids[0, :num_new] = tokens
        self._positions[0, :num_new] = range(past, end)
        self._last[0] = end - 1
        self._total[0] = end
        self._first_row[0] = -num_rows
        if self._num_bound != (num_new, num_rows) or not self._is_on_host:
            self._bind_step(num_new, num_rows)
        if not self._is_on_host and self._provider not in _CACHE_DEVICES:
            for name, cache in self._caches.items():
                self._binding.bind_ortvalue_input(name, cache)
        if self._has_mask:
            self._bind_mask(end)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise ModelFault(f"ONNX Runtime failed in a step of {num_new} tokens after {past}: {error}") from error
        if not self._is_on_host:
            self._binding.synchronize_outputs()
        self._length = end
        return self._logits[0, -num_rows:].astype(np.float32, copy=False)

    def _bind_step(self, num_new: int, num_rows: int) -> None:
        self._bind("input_ids", self._ids[:, :num_new])
        if self._has_positions:
            self._bind("position_ids", self._positions[:, :num_new])
        if not self._has_mask:
            self._bind("seqlens_k", self._last)
            self._bind("total_sequence_length", self._total)
        if self._selects_rows:
            self._bind("first_row", self._first_row)
        rows = num_rows if self._selects_rows else num_new
        self._logits = np.empty((1, rows, self._limits.vocab_size), self._logits.dtype)
        self._binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(self._logits))
        self._num_bound = (num_new, num_rows)

    def _bind_mask(self, length: int) -> None:
        if length >= (num_made := len(self._masks)):
            # Many at once: one at a time, between steps, takes ten times as long.
            lengths = range(num_made, min(length + _MAX_STEP, self._ones.size) + 1)
            self._ones[:, : lengths[-1]] = 1
            self._masks += [ort.OrtValue.ortvalue_from_numpy(self._ones[:, :each]) for each in lengths]
        self._binding.bind_ortvalue_input("attention_mask", self._masks[length])

    def _bind(self, name: str, array: NDArray[Any]) -> None:
        self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        self._binding = None
        self._session = None
        self._masks = []
        self._caches = {}
