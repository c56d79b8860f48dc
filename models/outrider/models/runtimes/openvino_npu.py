"""`SequenceRuntime` on the NPU plugin's path for language models, or on that path emulated on the CPU.

An NPU runs static shapes only. The plugin makes two models of a stateful IR, one for a whole prompt and one for a few
tokens on a cache, and tells them apart by the first position: several tokens from position 0 on are a prompt. Its cache
is cut back by sending a smaller position; what lies beyond is ignored only if the attention mask says so, therefore
every mask here spans the whole cache. Two things that the plugin (2026.4.1) does silently wrong are kept from the
caller:

* A cache that is cut back right after a prompt, before any cached step, keeps the *last* tokens of the prompt instead
  of the first. One cached step at the prompt's end moves the keys and values over in full; it is run, and forgotten,
  when such a cut is extended.
* A cache in u8 or i8 gives wrong logits; it is refused.

Knows nothing of weights: INT8, full INT8 and FP32 all run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.manifest import StaticShapes
from outrider.models.runtimes.base import ModelLimits, RuntimeOptions
from outrider.models.runtimes.openvino_graph import failure_reason, find_ir, longest_sequence, shared_tensor

_KV_PRECISIONS: Final = ("auto", "f16", "f32")


class OpenVinoNpuRuntime:
    """One sequence of at most `limits.max_positions` tokens, for the lengths of `options.static_shapes`."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Compiles the stateful IR at `path` (directory or .xml), or takes it from `options.cache_dir`.

        The first time takes seconds on a CPU and minutes on an NPU.
        Raises BundleError when the files are missing or are not a stateful decoder, ConfigError for an option out of
        range, RuntimeUnavailable when there is no NPU and `options.emulate_npu` is off.
        """
        asked = options.static_shapes
        if asked is None:
            raise ConfigError("an NPU runs static shapes only; give static_shapes, as the bundle's manifest has them")
        shapes = compiled_shapes(asked)
        xml = find_ir(path)
        self._prompt_len, self._step_len = shapes.prompt_len, shapes.step_len
        # The cached model's own tokens take the last of the positions, so these hold no past.
        self._capacity = shapes.max_positions - shapes.step_len
        longest = min(longest_sequence(xml, options), asked.max_positions, self._capacity)
        compiled = _compile(xml, shapes, options)
        self._limits = ModelLimits(compiled.output("logits").partial_shape[-1].get_length(), longest)
        self._is_emulated = options.emulate_npu
        self._request: Any = compiled.create_infer_request()
        self._has_beams = any("beam_idx" in port.get_names() for port in compiled.inputs)
        self._length = 0
        self._num_unmoved = 0  # tokens of a prompt that no cached step has followed yet
        self._mask = np.ones(self._capacity + self._step_len, np.int64)  # past, then a step's own tokens
        self._bound: tuple[Any, ...] = ()  # the request reads this memory and does not keep it alive

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary size and longest sequence."""
        return self._limits

    @property
    def length(self) -> int:
        """Tokens now in the cache."""
        return self._length

    @property
    def provider(self) -> str:
        """What really runs the model."""
        return "NPU path emulated on the CPU" if self._is_emulated else "NPU"

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the next
        call.

        From an empty cache, up to `prompt_len` tokens go in one pass; everything else in steps of `step_len`.
        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than `limits.max_positions`.
        """
        self._check(tokens)
        num_prompt = self._num_prompt(tokens)
        row = self._prefill(tokens[:num_prompt]) if num_prompt else None
        for rows in self._steps(tokens[num_prompt:]):
            row = rows[-1]
        assert row is not None
        return row

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32.

        The prompt's pass gives the last row only, so from an empty cache the prompt runs twice: in cached steps for
        the other rows, then as `extend` would run it, for the last row and for the keys and values that stay.
        """
        self._check(tokens)
        num_prompt = self._num_prompt(tokens)
        pieces: list[NDArray[np.float32]] = []
        if num_prompt:
            pieces += [rows.copy() for rows in self._steps(tokens[: num_prompt - 1])]
            self._length = 0
            pieces.append(self._prefill(tokens[:num_prompt])[None].copy())
        pieces += [rows.copy() for rows in self._steps(tokens[num_prompt:])]
        return np.concatenate(pieces)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` at most the present one. Touches no tensor."""
        assert 0 <= length <= self._length, f"truncate to {length} of {self._length} tokens"
        self._length = length

    def _check(self, tokens: Sequence[int]) -> None:
        assert len(tokens) and min(tokens) >= 0 and max(tokens) < self._limits.vocab_size, f"token ids {tokens}"
        if (end := self._length + len(tokens)) > self._limits.max_positions:
            raise ConfigError(
                f"{end} tokens do not fit the {self._limits.max_positions} positions of this runtime; stop earlier, "
                "or export the draft with longer static shapes"
            )

    def _num_prompt(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` go through the prompt's model: it wants an empty cache and more than one token."""
        return min(len(tokens), self._prompt_len) if self._length == 0 and len(tokens) > 1 else 0

    def _prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._infer(tokens, np.ones((1, len(tokens)), np.int64))
        self._num_unmoved = len(tokens)
        row: NDArray[np.float32] = self._logits()[-1]
        return row

    def _steps(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Cached steps: the logits after each token, in pieces that the next piece overwrites."""
        begin = 0
        while begin < len(tokens):
            if 0 < self._length < self._num_unmoved:
                self._move_prompt()
            # Several tokens at position 0 would be taken for a prompt.
            piece = tokens[begin : begin + (self._step_len if self._length else 1)]
            self._mask[: self._length] = 1
            self._mask[self._length : self._capacity] = 0
            self._infer(piece, self._mask[None, : self._capacity + len(piece)])
            self._num_unmoved = 0
            begin += len(piece)
            yield self._logits()[-len(piece) :]

    def _move_prompt(self) -> None:
        """Runs any token after the prompt, so that the plugin moves all of the prompt to the cached model."""
        kept, self._length = self._length, self._num_unmoved
        for _ in self._steps([0]):
            pass
        self._length = kept

    def _infer(self, tokens: Sequence[int], mask: NDArray[np.int64]) -> None:
        past, end = self._length, self._length + len(tokens)
        tensors = {
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
        """As many rows as a step has at most, aligned to the last: [step_len, vocab_size] float32."""
        logits: NDArray[np.float32] = self._request.get_tensor("logits").data[0]
        return logits

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        self._request = None
        self._bound = ()


def compiled_shapes(shapes: StaticShapes) -> StaticShapes:
    """What the plugin makes of the asked lengths: it rounds prompt and response up to 64, steps of several to 8.

    Raises ConfigError when the response has no room for one step.
    """
    step_len = 1 if shapes.step_len == 1 else _up(shapes.step_len, 8)
    rounded = StaticShapes(
        prompt_len=_up(shapes.prompt_len, 64), response_len=_up(shapes.response_len, 64), step_len=step_len
    )
    if rounded.step_len >= rounded.response_len:
        raise ConfigError(
            f"a step of {rounded.step_len} tokens leaves no room in a response of {rounded.response_len}; expected a "
            "step_len well below response_len"
        )
    return rounded


def npu_properties(shapes: StaticShapes, options: RuntimeOptions) -> dict[str, str]:
    """What an IR is compiled with for an NPU; `options.properties` has the last word. ConfigError for bad options."""
    if options.kv_precision not in _KV_PRECISIONS:
        raise ConfigError(
            f"kv_precision is {options.kv_precision!r}; expected one of {', '.join(_KV_PRECISIONS)} on the NPU's path, "
            "whose u8 cache gives wrong logits"
        )
    properties = {
        "NPU_USE_NPUW": "YES",
        "NPUW_LLM": "YES",
        "NPUW_LLM_MAX_PROMPT_LEN": str(shapes.prompt_len),
        "NPUW_LLM_MIN_RESPONSE_LEN": str(shapes.response_len),
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": str(shapes.step_len),
        # One device, said outright: with a list the plugin would go on to the next in silence.
        "NPUW_DEVICES": "CPU" if options.emulate_npu else "NPU",
        # Compiled whole: slower to compile, quicker to run, and cut into repeated blocks, as is the default, some
        # models fail ("Model references undeclared parameters"), the bundled draft among them.
        "NPUW_ONLINE_PIPELINE": "NONE",
    }
    if options.kv_precision != "auto":
        properties["KV_CACHE_PRECISION"] = options.kv_precision
    if options.cache_dir is not None:
        properties["CACHE_DIR"] = options.cache_dir
    return properties | options.properties


def npu_core(options: RuntimeOptions) -> Any:
    """An OpenVINO core to compile for an NPU with, its own because the emulation changes how it treats the CPU.

    Raises RuntimeUnavailable when there is no NPU and no emulation was asked for.
    """
    core = ov.Core()
    if options.emulate_npu:
        # Set on the device, because a model that comes from the cache has forgotten what it was compiled with; the
        # default, bf16, is off by 0.04 where f32 is off by 0.001. Pinned threads of two processes would meet.
        emulated: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": "NO"}
        if options.num_threads:
            emulated["INFERENCE_NUM_THREADS"] = options.num_threads
        core.set_property("CPU", emulated)
    elif not any(device.split(".")[0] == "NPU" for device in core.available_devices):
        raise RuntimeUnavailable(
            f"OpenVINO finds no NPU on this machine, only {', '.join(core.available_devices) or 'no device'}; install "
            "the NPU's driver (on Linux the user also needs access to /dev/accel), run the draft on the CPU "
            "(--draft-device cpu), or try the NPU's path on the CPU with --emulate-npu"
        )
    return core


def _compile(xml: Path, shapes: StaticShapes, options: RuntimeOptions) -> Any:
    if options.num_threads < 0:
        raise ConfigError(f"num_threads is {options.num_threads}; expected 0 (the runtime's choice) or more")
    if options.device != "CPU" and options.device.split(".")[0] != "NPU":
        raise ConfigError(f"device is {options.device!r}; expected NPU, or NPU.0 and the like where there are several")
    properties = npu_properties(shapes, options)
    core = npu_core(options)
    model = core.read_model(xml)
    if not model.get_variables():
        raise BundleError(
            f"{xml} keeps no cache of its own; expected the stateful decoder that `outrider-export` or optimum-intel's "
            "default text-generation export writes"
        )
    device = "NPU" if options.device == "CPU" else options.device  # "CPU" is what nobody chose: the default
    try:
        return core.compile_model(model, device, properties)
    except RuntimeError as error:
        raise RuntimeUnavailable(
            f"OpenVINO cannot compile {xml} for the NPU: {failure_reason(error)}; update the NPU's driver, or run the "
            "draft on the CPU (--draft-device cpu)"
        ) from error


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
