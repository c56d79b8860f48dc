"""Decides where a draft runs, from the user's options, the bundle and the devices that are here.

A bundle passed its numerical check in one runtime (`manifest.report.parity`). Converters and runtimes can be silently
wrong, so it never runs in another: not in ONNX Runtime instead of OpenVINO, and not in OpenVINO's paged attention
instead of its NPU path, although both read the same files. Another *device* of the same runtime is allowed, with a note
to the user. Nothing is replaced in silence: a missing device is an error, not a slower device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

from outrider.edge.devices.discovery import (
    PROVIDER_DEVICES,
    RUNTIME_NAMES,
    FoundRuntime,
    ModelRuntime,
    require_device,
)
from outrider.models.bundle.manifest import Device, Manifest
from outrider.models.errors import BundleError, ConfigError

DraftRuntime = Literal["openvino", "onnxruntime", "ngram"]

_ASKED_DEVICE: Final = re.compile(r"cpu|(?:gpu|npu)(?:\.[0-9]{1,3})?")

EMULATED_NPU: Final = "NPU path emulated on the CPU"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The user's options for the draft; None leaves it to the bundle. Raises ConfigError for a contradiction.

    device: "cpu", "gpu" or "npu"; with a number where there are several ("gpu.1"). provider: an execution provider of
    ONNX Runtime by its full name, or "prefer-npu", in place of a device.
    """

    runtime: DraftRuntime | None = None
    device: str | None = None
    emulate_npu: bool = False
    provider: str | None = None

    def __post_init__(self) -> None:
        if self.device is not None:
            object.__setattr__(self, "device", self.device.lower())
            if not _ASKED_DEVICE.fullmatch(self.device.lower()):
                raise ConfigError(
                    f"--draft-device is {self.device!r}; expected cpu, gpu or npu, or one of several by its number, "
                    "such as gpu.1"
                )
        if self.runtime == "ngram" and (self.device or self.emulate_npu or self.provider):
            raise ConfigError(
                "n-gram lookup has no model, so no device runs it; leave out --draft-device and --emulate-npu"
            )
        if self.emulate_npu and self.device not in (None, "npu"):
            raise ConfigError(
                f"--emulate-npu runs the NPU path, and --draft-device asks for {self.device}; leave one of them out"
            )
        if self.emulate_npu and (self.runtime == "onnxruntime" or self.provider):
            raise ConfigError(
                "--emulate-npu runs OpenVINO's NPU path; leave out --runtime onnxruntime, or the execution provider"
            )
        if self.provider and self.runtime == "openvino":
            raise ConfigError(
                f"--draft-device {self.provider} is what ONNX Runtime runs a draft on; leave out --runtime openvino"
            )

    @property
    def wanted_device(self) -> Device | None:
        """The kind of device that the user asked for."""
        if self.device is None:
            return "npu" if self.emulate_npu else None
        return cast(Device, self.device.partition(".")[0])

    @property
    def wanted_index(self) -> int | None:
        """Its number among several; None: any."""
        _, _, number = (self.device or "").partition(".")
        return int(number) if number else None

    @property
    def wanted_runtime(self) -> DraftRuntime | None:
        """The runtime that the user asked for, by name or by one of its providers."""
        return "onnxruntime" if self.provider else self.runtime


AS_BUNDLED: Final = DraftChoice()
"""All left to the bundle."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Runtime and device of the draft.

    device: its kind; None without a model, or while a provider has yet to choose. open_on: value for
    `RuntimeOptions.device`. provider: the device, or ONNX Runtime's execution provider, that the open runtime reports.
    max_positions: longest sequence that the open draft holds. notes: for the user, in full sentences.
    """

    runtime: DraftRuntime
    device: Device | None = None
    is_emulated: bool = False
    precision: str | None = None
    open_on: str = ""
    provider: str | None = None
    max_positions: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """For people."""
        if self.runtime == "ngram":
            return "n-gram lookup, no model"
        name = RUNTIME_NAMES[self.runtime]
        if self.is_emulated:
            return f"{self.precision}, {name}'s {EMULATED_NPU}"
        named = self.open_on if self.runtime == "openvino" and self.open_on else (self.device or "").upper()
        device = f" on the {named}" if self.device is not None else ""
        provider = f" ({self.provider})" if self.runtime == "onnxruntime" and self.provider else ""
        return f"{self.precision}, {name}{device}{provider}"

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

    found: the devices of its runtime, if they are known already. Raises ConfigError if the bundle may not run as asked,
    with the command that exports one that may; RuntimeUnavailable if the device is not here.
    """
    if choice.runtime == "ngram":
        return Placement("ngram")
    runtime, made_for = _drafting_runtime(manifest), manifest.device
    if choice.wanted_runtime is not None and choice.wanted_runtime != runtime:
        raise _other_bundle(manifest, choice.wanted_runtime, choice.wanted_device or "cpu")
    if choice.provider:
        device = PROVIDER_DEVICES.get(choice.provider)
        return Placement(runtime, device, precision=manifest.precision, open_on=choice.provider)
    wanted = choice.wanted_device or made_for
    if choice.emulate_npu and runtime != "openvino":
        raise _other_bundle(manifest, "openvino", "npu")
    if runtime == "openvino" and wanted != made_for and "npu" in (wanted, made_for):
        raise _other_bundle(manifest, runtime, wanted)
    index = choice.wanted_index
    if not choice.emulate_npu:
        require_device(runtime, wanted, found, index)
    open_on = wanted.upper() if index is None else f"{wanted.upper()}.{index}"
    return Placement(runtime, wanted, choice.emulate_npu, manifest.precision, open_on=open_on)


def opened_as(placement: Placement, manifest: Manifest, provider: str, max_positions: int) -> Placement:
    """The placement with what the open runtime reports; a note if the draft was not checked on this device.

    provider: what the runtime reports that it runs on.
    """
    device = placement.device
    if placement.runtime == "onnxruntime":
        device = PROVIDER_DEVICES.get(provider, device)
    ran_on = "CPU" if provider == "CPUExecutionProvider" else provider
    checked_on = manifest.report.parity.checked_on
    notes: tuple[str, ...] = ()
    # The export says "CPU in place of a GPU; not run on hardware": where it ran comes first.
    if checked_on.partition(";")[0].partition(" in place of ")[0] != ran_on:
        notes = (
            f"the bundle's numerical check ran on: {checked_on}. It drafts on: {ran_on}, unchecked there. The text "
            "stays the target's; a wrong draft only makes it slower",
        )
    return replace(placement, device=device, provider=provider, max_positions=max_positions, notes=notes)


def require_asked_device(choice: DraftChoice) -> None:
    """Raises RuntimeUnavailable if a device that was named is not here: before any export."""
    if choice.runtime != "ngram" and choice.wanted_device is not None and not choice.emulate_npu:
        # Where only the device was named, bundles are made for OpenVINO.
        require_device(choice.runtime or "openvino", choice.wanted_device, index=choice.wanted_index)


def _drafting_runtime(manifest: Manifest) -> ModelRuntime:
    if manifest.runtime not in RUNTIME_NAMES:
        raise BundleError(
            f"{manifest.name} was made for {manifest.runtime}, which runs no drafts; export it as a draft"
        )
    return manifest.runtime


def _other_bundle(manifest: Manifest, runtime: str, device: Device) -> ConfigError:
    # Drafts are made for an NPU in OpenVINO only; ONNX Runtime's for the CPU may be tried on one.
    made_for = "cpu" if (runtime, device) == ("onnxruntime", "npu") else device
    return ConfigError(
        f"{manifest.name} is a bundle for {manifest.runtime} on {manifest.device} and was checked as such; {runtime} "
        f"on {device} runs other code. Make a bundle for that with `outrider-export draft MODEL --device {made_for} "
        f"--runtime {runtime}`"
    )
