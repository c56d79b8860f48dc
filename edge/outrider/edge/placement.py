"""Where a draft runs: what the user asked for, what the bundle was made for and what is here, made one.

A bundle was let through by a numerical check in one runtime (`manifest.report.parity`), and converters and runtimes
can be silently wrong, so it is never run in another: not in ONNX Runtime instead of OpenVINO, and not in OpenVINO's
paged attention instead of its NPU path, although both read the same files. Another *device* of the same runtime is
allowed, and said. Nothing is replaced in silence: a missing device is an error, not a slower device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from outrider.edge.devices import CUDA, RUNTIME_NAMES, FoundRuntime, ModelRuntime, require_device
from outrider.models.errors import BundleError, ConfigError
from outrider.models.manifest import Device, Manifest

DraftRuntime = Literal["openvino", "onnxruntime", "ngram"]

EMULATED_NPU: Final = "NPU path emulated on the CPU"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What the user said about the draft; None leaves it to the bundle. Raises ConfigError for a contradiction."""

    runtime: DraftRuntime | None = None
    device: Device | None = None
    emulate_npu: bool = False

    def __post_init__(self) -> None:
        if self.runtime == "ngram" and (self.device or self.emulate_npu):
            raise ConfigError("n-gram lookup has no model, so no device runs it; leave --draft-device and the like out")
        if self.emulate_npu and self.device not in (None, "npu"):
            raise ConfigError(
                f"--emulate-npu runs the NPU path, and --draft-device asks for {self.device}; leave one of them out"
            )
        if self.emulate_npu and self.runtime == "onnxruntime":
            raise ConfigError("the NPU path that --emulate-npu runs is OpenVINO's; leave --runtime onnxruntime out")
        if (self.runtime, self.device) == ("onnxruntime", "npu"):
            raise ConfigError("drafts for an NPU run with OpenVINO; leave --runtime onnxruntime out")

    @property
    def wanted_device(self) -> Device | None:
        """The device that was asked for, in one way or the other."""
        return "npu" if self.emulate_npu else self.device


AS_BUNDLED: Final = DraftChoice()
"""All left to the bundle."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What drafts, and on what.

    device, precision: None without a model. provider: what really runs it, as its runtime tells once it is loaded; an
    execution provider in ONNX Runtime. max_positions: longest sequence that it drafts for, likewise. notes: what the
    user should know, whole sentences.
    """

    runtime: DraftRuntime
    device: Device | None = None
    is_emulated: bool = False
    precision: str | None = None
    provider: str | None = None
    max_positions: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def device_name(self) -> str:
        """As `RuntimeOptions.device` wants it."""
        assert self.device is not None, "n-gram lookup runs on no device"
        return CUDA if (self.runtime, self.device) == ("onnxruntime", "gpu") else self.device.upper()

    @property
    def words(self) -> str:
        """For people."""
        if self.runtime == "ngram" or self.device is None:
            return "n-gram lookup, no model"
        provider = f" ({self.provider})" if self.runtime == "onnxruntime" and self.provider else ""
        name = RUNTIME_NAMES[self.runtime]
        where = f"{name}'s {EMULATED_NPU}" if self.is_emulated else f"{name} on the {self.device.upper()}"
        return f"{self.precision}, {where}{provider}"

    def as_json(self) -> dict[str, object]:
        """As plain data; the keys are part of what `--json` promises."""
        return {
            "runtime": self.runtime,
            "device": self.device,
            "provider": self.provider,
            "precision": self.precision,
            "is_emulated": self.is_emulated,
            "max_positions": self.max_positions,
            "notes": list(self.notes),
        }


def place_draft(manifest: Manifest, choice: DraftChoice, found: FoundRuntime | None = None) -> Placement:
    """Where the draft of `manifest` runs.

    found: the devices of its runtime, if they are known already. Raises ConfigError, with the export command that makes
    the right bundle, where this one may not run as was asked; RuntimeUnavailable where the device is not here.
    """
    if choice.runtime == "ngram":
        return Placement("ngram")
    runtime, made_for = _drafting_runtime(manifest), manifest.device
    device = choice.wanted_device or made_for
    if choice.runtime is not None and choice.runtime != runtime:
        raise _other_bundle(manifest, choice.runtime, choice.wanted_device or "cpu")
    if device != made_for and "npu" in (device, made_for):
        raise _other_bundle(manifest, "openvino" if device == "npu" else runtime, device)
    if not choice.emulate_npu:
        require_device(runtime, device, found)
    placement = Placement(runtime, device, choice.emulate_npu, manifest.precision)
    return replace(placement, notes=tuple(_notes(manifest, placement)))


def require_asked_device(choice: DraftChoice) -> None:
    """Raises RuntimeUnavailable if a device that was named is not here: before there is a bundle, or work to lose."""
    if choice.runtime != "ngram" and choice.device is not None and not choice.emulate_npu:
        # Where only the device was named, bundles are made for OpenVINO.
        require_device(choice.runtime or "openvino", choice.device)


def _drafting_runtime(manifest: Manifest) -> ModelRuntime:
    if manifest.runtime == "openvino":
        return "openvino"
    if manifest.runtime == "onnxruntime":
        return "onnxruntime"
    raise BundleError(f"{manifest.name} was made for {manifest.runtime}, which runs no drafts; export it as a draft")


def _other_bundle(manifest: Manifest, runtime: ModelRuntime, device: Device) -> ConfigError:
    emulated = (
        ", or try its NPU path on the CPU with --emulate-npu" if (manifest.device, device) == ("npu", "cpu") else ""
    )
    return ConfigError(
        f"{manifest.name} is a bundle for {manifest.runtime} on {manifest.device} and was checked as such; {runtime} "
        f"on {device} runs other code. Make a bundle for that with `outrider-export draft MODEL --device {device} "
        f"--runtime {runtime}`{emulated}"
    )


def _notes(manifest: Manifest, placement: Placement) -> list[str]:
    checked_on = manifest.report.parity.checked_on
    place = EMULATED_NPU if placement.is_emulated else placement.device_name
    # The export says "CPU in place of a GPU; not run on hardware": where it ran comes first.
    checked_at = checked_on.partition(";")[0].partition(" in place of ")[0]
    if checked_at == place:
        return []
    return [
        f"the bundle's numerical check ran on: {checked_on}. It drafts on: {place}, unchecked there. The text stays "
        "the target's; a wrong draft only makes it slower"
    ]
