"""Runs a `SequenceRuntime` on the NPU plugin's path for language models, or on that path emulated on the CPU.

An NPU runs static shapes only. The plugin makes two models of a stateful IR, one for a whole prompt and one for a few
tokens on a cache, and chooses by the first position: several tokens from position 0 on are a prompt. A smaller position
cuts its cache back; it ignores what lies beyond only if the attention mask says so, so every mask here spans the whole
cache. This module works around a silent fault of the plugin (2026.4.1): a cache that is cut back right after a prompt,
before any cached step, keeps the *last* tokens of the prompt instead of the first. One cached step at the prompt's end
moves all keys and values over; it is run, and discarded, when such a cut is extended.

Knows nothing of weights (INT8, full INT8 and FP32 all run) or of compiling: see `npu_compile`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import ModelLimits, OneSequence, Reading, RuntimeOptions, longest_sequence
from outrider.models.runtimes.npu_compile import compile_for_npu, compiled_shapes, port_names
from outrider.models.runtimes.openvino_graph import find_ir, shared_tensor

_PASS_SPEED: Final = 8
"""Tokens of a prompt's pass per token of a cached step in the same time, until both were measured."""
_STEPS_PER_CALL: Final = 8
"""Cached steps after which a long text may be left."""


class OpenVinoNpuRuntime(OneSequence):
    """One sequence of at most `limits.max_positions` tokens, for the lengths of `options.static_shapes`.

    provider: the device that runs the model, in words.
    """

    full_advice = "export the draft with longer static shapes"

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Compiles the stateful IR at `path` (directory or .xml), or takes it from `options.cache_dir`.

        The first time takes seconds on a CPU and minutes on an NPU.
        Raises BundleError when the files are missing or are not a stateful decoder, ConfigError for an option out of
        range, RuntimeUnavailable when there is no NPU and `options.emulate_npu` is off.
        """
        asked = options.static_shapes
        if asked is None:
            raise ConfigError("an NPU runs static shapes only; give static_shapes from the bundle's manifest")
        shapes = compiled_shapes(asked)
        xml = find_ir(path)
        self._prompt_len, self._step_len = shapes.prompt_len, shapes.step_len
        # The cached model's new tokens take the last positions, so these hold no past.
        self._capacity = shapes.max_positions - shapes.step_len
        longest = min(longest_sequence(xml.parent, options), asked.max_positions, self._capacity)
        compiled = compile_for_npu(xml, shapes, options)
        super().__init__(ModelLimits(compiled.output("logits").partial_shape[-1].get_length(), longest))
        self.provider = "NPU path emulated on the CPU" if options.emulate_npu else "NPU"
        self._request: Any = compiled.create_infer_request()
        self._has_beams = "beam_idx" in port_names(compiled.inputs)
        self._num_unmoved = 0  # tokens of a prompt with no cached step after it yet
        self._mask = np.ones(self._capacity + self._step_len, np.int64)  # past, then a step's new tokens
        self._bound: tuple[Any, ...] = ()  # the request reads this memory but does not keep it alive
        self._pass_s = self._step_s = math.inf  # the fastest so far

    def cheapest_reading(self, num_shared: int, num_tokens: int) -> Reading:
        """Whether to run what is missing in cached steps, or everything again, which a pass reads from an empty cache.

        Compares the fastest pass and step so far.
        """
        pass_steps = self._prompt_len / (self._step_len * _PASS_SPEED)
        if math.isfinite(self._pass_s) and math.isfinite(self._step_s):
            pass_steps = self._pass_s / self._step_s
        going_on = self._num_steps(num_tokens - num_shared) + (0 < num_shared < self._num_unmoved)
        again = pass_steps + self._num_steps(num_tokens - self._prompt_len)
        if num_shared and going_on <= again:
            return Reading(num_shared, self._step_len * _STEPS_PER_CALL)
        return Reading(0, self._prompt_len)

    def _num_steps(self, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._step_len))

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the next call.

        From an empty cache, up to `prompt_len` tokens go in one pass; everything else in steps of `step_len`.
        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than `limits.max_positions`.
        """
        self._check_new(tokens)
        num_prompt = self._num_prompt(tokens)
        row = self._prefill(tokens[:num_prompt]) if num_prompt else None
        for rows in self._steps(tokens[num_prompt:]):
            row = rows[-1]
        assert row is not None
        return row

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32.

        The prompt's pass gives the last row only, so from an empty cache the prompt runs twice: in cached steps for the
        other rows, then as in `extend`, for the last row and for the keys and values to keep.
        """
        self._check_new(tokens)
        num_prompt = self._num_prompt(tokens)
        pieces: list[NDArray[np.float32]] = []
        if num_prompt:
            pieces += [rows.copy() for rows in self._steps(tokens[: num_prompt - 1])]
            self._length = 0
            pieces.append(self._prefill(tokens[:num_prompt])[None].copy())
        pieces += [rows.copy() for rows in self._steps(tokens[num_prompt:])]
        return np.concatenate(pieces)

    def _num_prompt(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` go through the prompt's model, which needs an empty cache and more than one token."""
        return min(len(tokens), self._prompt_len) if self._length == 0 and len(tokens) > 1 else 0

    def _prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        before = time.perf_counter()
        self._infer(tokens, np.ones((1, len(tokens)), np.int64))
        self._pass_s = min(self._pass_s, time.perf_counter() - before)
        self._num_unmoved = len(tokens)
        row: NDArray[np.float32] = self._logits()[-1]
        return row

    def _steps(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Runs cached steps; yields the logits after each token, in pieces that the next piece overwrites."""
        begin = 0
        while begin < len(tokens):
            if 0 < self._length < self._num_unmoved:
                self._move_prompt()
            # The plugin would take several tokens at position 0 for a prompt.
            piece = tokens[begin : begin + (self._step_len if self._length else 1)]
            self._mask[: self._length] = 1
            self._mask[self._length : self._capacity] = 0
            before = time.perf_counter()
            self._infer(piece, self._mask[None, : self._capacity + len(piece)])
            self._step_s = min(self._step_s, time.perf_counter() - before)
            self._num_unmoved = 0
            begin += len(piece)
            yield self._logits()[-len(piece) :]

    def _move_prompt(self) -> None:
        """Runs a token after the prompt, so that the plugin moves the whole prompt to the cached model."""
        kept, self._length = self._length, self._num_unmoved
        for _ in self._steps([0]):
            pass
        self._length = kept

    def _infer(self, tokens: Sequence[int], mask: NDArray[np.int64]) -> None:
        past, end = self._length, self._length + len(tokens)
        tensors: dict[str, NDArray[Any]] = {
            "input_ids": np.array([tokens], np.int64),
            "position_ids": np.arange(past, end, dtype=np.int64)[None],
            "attention_mask": mask,
        }
        if self._has_beams:
            tensors["beam_idx"] = np.zeros(1, np.int32)
        self._bound = tuple(tensors.values())
        for name, array in tensors.items():
            self._request.set_tensor(name, shared_tensor(array))
        self._request.infer(share_outputs=True)
        self._length = end

    def _logits(self) -> NDArray[np.float32]:
        """The rows of the longest possible step, aligned to the last: [step_len, vocab_size] float32."""
        logits: NDArray[np.float32] = self._request.get_tensor("logits").data[0]
        return logits

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        self._request = None
        self._bound = ()
