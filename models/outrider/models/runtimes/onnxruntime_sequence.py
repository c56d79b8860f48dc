"""Runs a `SequenceRuntime` on ONNX Runtime: the device's draft on the CPU, or on another execution provider.

Keys and values of each layer are one buffer, bound as past and as present: a step writes its rows in place, and
rollback is a smaller number. On the host everything is bound once, over memory that changes in place; only another
number of new tokens is bound again (and the attention mask of an onnxruntime-genai graph, whose length carries the
length of the cache). For a device with its own memory, inputs are bound in every step: binding copies them there.

The cache grows with the sequence: on the host it is copied, on a device with its own memory the text runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.runtimes.base import OneSequence, OpenSequences, RuntimeOptions, cache_positions, telling_of_memory
from outrider.models.runtimes.onnxruntime_branches import MAX_BRANCHES, BranchRows, lazy_zeros
from outrider.models.runtimes.onnxruntime_providers import CPU, CUDA, DIRECTML
from outrider.models.runtimes.onnxruntime_session import OnnxModel, load_onnx_model

ort.disable_telemetry_events()  # Windows builds report their use by default

# A longer prompt runs in pieces: memory for activations grows with the piece, and ONNX Runtime never returns it.
_MAX_STEP: Final = 256
# Where caches live, as ONNX Runtime names memory. For other providers they live on the host and are bound, and so
# copied if necessary, in every step.
_CACHE_DEVICES: Final = {CUDA: "cuda", DIRECTML: "dml"}


class OnnxRuntimeSequence(OneSequence):
    """One sequence of at most `limits.max_positions` tokens.

    provider: the execution provider that runs the model's matrix products, for example "CPUExecutionProvider".
    max_branches: that one call takes at most; 1, which is none, where graph or device take one sequence at a time.
    """

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the model at `path` (directory or .onnx); raises as `load_onnx_model` does."""
        self._open = OpenSequences(options.num_sequences)
        self._begin(load_onnx_model(path, options))

    def open_sequence(self) -> OnnxRuntimeSequence:
        """Another, empty sequence of the same model with a cache of its own, which is freed when it is closed.

        Raises ConfigError beyond `num_sequences` of the options.
        """
        assert self._model is not None, "the runtime is closed"
        another = OnnxRuntimeSequence.__new__(OnnxRuntimeSequence)
        another._open = self._open
        another._begin(self._model)
        return another

    def _begin(self, model: OnnxModel) -> None:
        self._open.add()
        self._is_closed = False
        super().__init__(model.limits)
        self._model = model
        self.provider = model.provider
        self._has_mask = "attention_mask" in model.inputs
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
        self._is_on_host = model.provider == CPU
        self._cache_device = _CACHE_DEVICES.get(model.provider)
        self._ran: list[int] = []  # the tokens in the cache, where they would run again
        self._host_caches: list[NDArray[Any]] = []
        self._num_positions = cache_positions(0, 0, longest)  # that the cache has room for
        with telling_of_memory(longest):
            self._ones = lazy_zeros((1, longest if self._has_mask else 1), np.dtype(np.int64))
            self._caches = self._bind_caches(model, self._num_positions)
        self._rows = BranchRows(model, self._host_caches) if self._is_on_host and model.takes_batches else None
        self.max_branches = 1 if self._rows is None else MAX_BRANCHES

    def _bind_caches(self, model: OnnxModel, num_positions: int) -> dict[str, Any]:
        """Binds caches for so many positions; returns them by their input names. All are made before one is bound."""
        host: list[NDArray[Any]] = []
        values = {}
        for cache in model.caches:
            shape = (1, cache.heads, num_positions, cache.head_size)
            if self._cache_device is None:
                host.append(lazy_zeros(shape, model.dtype))
                values[cache.past] = ort.OrtValue.ortvalue_from_numpy(host[-1])
            else:
                values[cache.past] = ort.OrtValue.ortvalue_from_shape_and_type(
                    shape, model.dtype, self._cache_device, model.device_id
                )
        for cache in model.caches:
            self._binding.bind_ortvalue_input(cache.past, values[cache.past])
            self._binding.bind_ortvalue_output(cache.present, values[cache.past])
        self._host_caches[:] = host  # in place: branches have the same list
        return values

    def _reserve(self, num_positions: int) -> None:
        """Makes room in the cache for so many positions. Raises ConfigError where memory does not suffice."""
        if num_positions <= self._num_positions:
            return
        size = cache_positions(num_positions, self._num_positions, self.limits.max_positions)
        old, held = list(self._host_caches), self._length
        with telling_of_memory(size):
            self._caches = self._bind_caches(self._model, size)
        self._num_positions = size
        for source, target in zip(old, self._host_caches, strict=True):
            target[:, :, :held] = source[:, :, :held]
        if self._cache_device is not None and held:
            ran, self._length = self._ran[:held], 0
            try:
                self._run(ran, 1)
            except BaseException:
                self._ran, self._num_positions = ran, 0  # the next call makes room again, and tries again
                raise
            finally:
                self._length = held

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the next call.

        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than `limits.max_positions`.
        """
        if self._rows is None or not self._rows.nodes:
            row: NDArray[np.float32] = self._run(tokens, 1)[0]
            return row
        self._check_new(tokens)
        self._reserve(self._length + len(tokens))
        start = self._length
        try:
            num_kept = self._rows.extend(tokens, start)
            self._length += num_kept
            row = self._run(tokens[num_kept:], 1)[0]
        except BaseException:
            self._length = start
            self._rows.truncate(start)
            raise
        return row

    def extend_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits after each branch of the sequence, which stays as it is: [B, vocab_size] float32.

        The array is reused by the next call. A branch with several new tokens takes a step for each. Raises ConfigError
        when a branch would be longer than `limits.max_positions`.
        """
        assert self._rows is not None, "this graph or device runs no branches"
        assert 0 < len(branches) <= MAX_BRANCHES, f"{len(branches)} branches"
        for branch in branches:
            self._check_new(branch)
        return self._rows.run(branches, self._length)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on, and all branches if that shortens the sequence."""
        is_shorter = length < self._length
        super().truncate(length)
        if is_shorter and self._rows is not None:
            self._rows.truncate(length)

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32."""
        if self._rows is not None:
            self._rows.truncate(self._length)
        pieces = [tokens[start : start + _MAX_STEP] for start in range(0, len(tokens), _MAX_STEP)]
        self._check_new(tokens)
        return np.concatenate([self._run(piece, len(piece)).copy() for piece in pieces])

    def _run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        self._check_new(tokens)
        self._reserve(self._length + len(tokens))
        start = self._length
        try:
            while len(tokens) > _MAX_STEP:  # only the last token's logits are needed
                self._step(tokens[:_MAX_STEP], 1)
                tokens = tokens[_MAX_STEP:]
            return self._step(tokens, num_rows)
        except BaseException:
            self._length = start
            raise

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
        if not self._is_on_host and self.provider not in _CACHE_DEVICES:
            for name, cache in self._caches.items():
                self._binding.bind_ortvalue_input(name, cache)
        if self._has_mask:
            self._bind_mask(end)
        try:
            self._model.session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's errors share no other base
            raise ModelFault(f"ONNX Runtime failed in a step of {num_new} tokens after {past}: {error}") from error
        if not self._is_on_host:
            self._binding.synchronize_outputs()
        self._length = end
        if self._cache_device is not None:
            self._ran[past:] = tokens
        return self._logits[0, -num_rows:].astype(np.float32, copy=False)

    def _bind_step(self, num_new: int, num_rows: int) -> None:
        self._bind("input_ids", self._ids[:, :num_new])
        if "position_ids" in self._model.inputs:
            self._bind("position_ids", self._positions[:, :num_new])
        if not self._has_mask:
            self._bind("seqlens_k", self._last)
            self._bind("total_sequence_length", self._total)
        if self._model.selects_rows:
            self._bind("first_row", self._first_row)
        rows = num_rows if self._model.selects_rows else num_new
        self._logits = np.empty((1, rows, self.limits.vocab_size), self._logits.dtype)
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
        """Releases cache and model, which lives as long as one of its sequences; safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._open.number -= 1
        self._binding = None
        self._model = None  # type: ignore[assignment]
        self._rows = None
        self._masks = []
        self._caches = {}
        self._host_caches = []
