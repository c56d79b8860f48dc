"""Lists the supported precisions per role, device and runtime (DESIGN section 7).

A row lists precisions, the default first. Whether a family works in a row is decided by exporting and checking it; what
is known of families beforehand is in `source/family_facts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from outrider.models.bundle.manifest import Device, Format, Precision, Role, StaticShapes
from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import TORCH_DTYPES, RuntimeOptions

RuntimeName = Literal["openvino", "onnxruntime", "torch"]
RECIPES: Final[dict[tuple[Role, Device, RuntimeName], tuple[Precision, ...]]] = {
    ("draft", "npu", "openvino"): ("int8", "int4", "w8a8"),
    ("draft", "cpu", "openvino"): ("int8", "int4", "fp32"),
    ("draft", "cpu", "onnxruntime"): ("int8", "int4", "fp32"),
    ("draft", "gpu", "openvino"): ("int4", "fp16"),
    ("draft", "gpu", "onnxruntime"): ("int4", "fp16"),
    ("target", "cpu", "openvino"): ("int8", "fp32"),
    ("target", "cpu", "torch"): ("fp32", "bf16", "fp16"),
    ("target", "gpu", "torch"): ("bf16", "fp16", "int8"),
    ("target", "gpu", "openvino"): ("fp16",),
}
"""Precisions by role, device and runtime. The first runtime of a role and a device is the default."""

_FORMATS: Final[dict[RuntimeName, Format]] = {
    "openvino": "openvino-ir",
    "onnxruntime": "onnx",
    "torch": "safetensors",
}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export a model.

    precision, runtime: None takes the default of RECIPES. widen_mb: widen the target to this many MB in FP32 first.
    name: of the bundle; None takes the source's. num_threads: for the check; 0 leaves it to the runtime.
    static_shapes: of a draft for an NPU; None takes their defaults. compiles_ahead: also make the NPU's blob, for
    npu_platform ("NPU4000"; None is this machine's own). max_positions: the longest sequence; None is the model's.
    Raises ConfigError for combinations that are not supported.
    """

    role: Role
    precision: Precision | None = None
    runtime: RuntimeName | None = None
    widen_mb: float | None = None
    name: str | None = None
    num_threads: int = 0
    overwrite: bool = False
    device: Device = "cpu"
    static_shapes: StaticShapes | None = None
    compiles_ahead: bool = False
    npu_platform: str | None = None
    max_positions: int | None = None

    def __post_init__(self) -> None:
        runtimes = runtimes_for(self.role, self.device)
        if not runtimes:
            raise ConfigError(f"a {self.role} cannot run on an {self.device.upper()}; use --device gpu or cpu")
        if self.resolved_runtime not in runtimes:
            raise ConfigError(
                f"{self.runtime} does not run a {self.role} on {self.device}; expected {' or '.join(runtimes)}"
            )
        possible = RECIPES[self.role, self.device, self.resolved_runtime]
        if self.precision is not None and self.precision not in possible:
            raise ConfigError(
                f"precision {self.precision} is not supported for a {self.role} on {self.device} with "
                f"{self.resolved_runtime}; expected {' or '.join(possible)}"
            )
        is_npu, shapes = self.device == "npu", self.static_shapes
        mistakes = {
            "only targets can be widened, to a positive number of megabytes": (
                self.widen_mb is not None and not (self.role == "target" and self.widen_mb > 0)
            ),
            f"lengths are fixed at export for an NPU only; leave them out for {self.device}": (
                shapes is not None and not is_npu
            ),
            "--step-len is more than a sequence holds; give at most the sum of --prompt-len and --response-len": (
                shapes is not None and shapes.step_len > shapes.max_positions
            ),
            f"only a model for an NPU is compiled ahead of time; leave --ahead-of-time out for {self.device}": (
                self.compiles_ahead and not is_npu
            ),
            f"--max-positions is {self.max_positions}; expected a positive number of tokens": (
                self.max_positions is not None and self.max_positions < 1
            ),
            "--npu-platform is for compiling ahead of time; add --ahead-of-time": (
                self.npu_platform is not None and not self.compiles_ahead
            ),
        }
        for message, is_made in mistakes.items():
            if is_made:
                raise ConfigError(message)

    @property
    def resolved_runtime(self) -> RuntimeName:
        """The runtime that will run it."""
        return self.runtime or runtimes_for(self.role, self.device)[0]

    @property
    def resolved_precision(self) -> Precision:
        """The precision that will be made."""
        return self.precision or RECIPES[self.role, self.device, self.resolved_runtime][0]

    @property
    def stored_precision(self) -> Precision:
        """Of the bundle's weights: the torch runtime quantizes what it loads."""
        is_quantized_later = (self.resolved_runtime, self.resolved_precision) == ("torch", "int8")
        return "bf16" if is_quantized_later else self.resolved_precision

    @property
    def label(self) -> str:
        """Short label of this export, such as "onnxruntime int4"."""
        return f"{self.resolved_runtime} {self.resolved_precision}"

    @property
    def resolved_shapes(self) -> StaticShapes | None:
        """The lengths that a model for an NPU is compiled for; None for other devices."""
        return (self.static_shapes or StaticShapes()) if self.device == "npu" else None

    def fitting(self, max_positions: int) -> ExportOptions:
        """The same options, with NPU lengths that were not chosen cut to the model's positions.

        Raises ConfigError for chosen lengths beyond the model's positions.
        """
        if self.device != "npu":
            return self
        shapes = self.static_shapes or StaticShapes()
        chosen = {"prompt_len", "response_len"} & shapes.model_fields_set
        needed = sum(getattr(shapes, name) if name in chosen else 1 for name in ("prompt_len", "response_len"))
        if chosen and needed > max_positions:
            asked = " and ".join(f"--{name.replace('_', '-')} {getattr(shapes, name):,}" for name in sorted(chosen))
            raise ConfigError(
                f"{asked} was given; the model takes {max_positions:,} tokens, prompt and response together"
            )
        if shapes.max_positions > max_positions:
            lengths = {
                frozenset(): (2 * max_positions // 3, max_positions - 2 * max_positions // 3),
                frozenset({"prompt_len"}): (shapes.prompt_len, max_positions - shapes.prompt_len),
                frozenset({"response_len"}): (max_positions - shapes.response_len, shapes.response_len),
            }
            prompt_len, response_len = (max(1, length) for length in lengths[frozenset(chosen)])
            shapes = StaticShapes(prompt_len=prompt_len, response_len=response_len, step_len=shapes.step_len)
        return replace(self, static_shapes=shapes)

    @property
    def format(self) -> Format:
        """The format that the runtime reads."""
        return _FORMATS[self.resolved_runtime]

    def runtime_options(self, device: str, *, emulate_npu: bool = False) -> RuntimeOptions:
        """The options with which the check opens the result on `device`, as the runtime names it."""
        dtype = {"dtype": TORCH_DTYPES[self.resolved_precision]} if self.resolved_runtime == "torch" else {}
        return RuntimeOptions(
            device=device,
            num_threads=self.num_threads,
            static_shapes=self.resolved_shapes,
            emulate_npu=emulate_npu,
            properties=dtype,
        )


def runtimes_for(role: Role, device: Device) -> tuple[RuntimeName, ...]:
    """The runtimes for `role` and `device`, the default first; () for none."""
    return tuple(runtime for made_for, on, runtime in RECIPES if (made_for, on) == (role, device))
