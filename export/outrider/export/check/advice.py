"""Advises what to try after a failed check: only what this role and device have, and what is not known to fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.export.check.measured import load_measured
from outrider.export.recipes import RECIPES, ExportOptions, runtimes_for
from outrider.export.source.family_facts import runtime_obstacle
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.errors import ExportError

ADVICE: Final = "nothing was written"
"""Begins the part of a message that advises; the table of families leaves it out."""

_WIDEST: Final[tuple[Precision, ...]] = ("fp32", "bf16", "fp16", "int8")
_OTHER_DEVICES: Final[tuple[Device, ...]] = ("cpu", "npu")


@dataclass(frozen=True, slots=True)
class Advice:
    """finer: where the precision may be the cause. elsewhere: where the converter or the runtime is."""

    finer: str
    elsewhere: str


GENERAL: Final = Advice("try a wider precision", "try another runtime")
"""For a check that knows nothing of the options."""


def require_runtime(options: ExportOptions, facts: Mapping[str, Any], name: str) -> None:
    """Raises ExportError if the runtime is known not to run a model with these facts correctly.

    name: of the model, for the message.
    """
    runtime, device = options.resolved_runtime, options.device
    reason = runtime_obstacle(facts, runtime, device)
    if reason is not None:
        elsewhere = advise(options, facts).elsewhere
        raise ExportError(f"{name} cannot run on {runtime} ({device}): {reason}; {ADVICE}: {elsewhere}")


def advise(options: ExportOptions, facts: Mapping[str, Any]) -> Advice:
    """What to try instead of `options` for a model with these facts."""
    elsewhere = _elsewhere(options, facts)
    possible = RECIPES[options.role, options.device, options.resolved_runtime]
    widest = next(precision for precision in (*_WIDEST, *possible) if precision in possible)
    is_widest = options.resolved_precision in ("fp32", widest)
    return Advice(elsewhere if is_widest else f"try --precision {widest}", elsewhere)


def _elsewhere(options: ExportOptions, facts: Mapping[str, Any]) -> str:
    """A way that was measured to work for this family, where any was measured."""
    family, table = str(facts.get("model_type")), load_measured()

    def runtimes_on(device: Device) -> list[str]:
        return [
            runtime
            for runtime in runtimes_for(options.role, device)
            if (device, runtime) != (options.device, options.resolved_runtime)
            and runtime_obstacle(facts, runtime, device) is None
            and table.works(family, options.role, device, runtime)
        ]

    for device in (options.device, *_OTHER_DEVICES):
        for runtime in runtimes_on(device):
            if device == options.device:
                return f"try --runtime {runtime}"
            is_default = runtime == runtimes_for(options.role, device)[0]
            return f"try --device {device}" + ("" if is_default else f" --runtime {runtime}")
    return f"no runtime that was measured runs a {options.role} of the family {family}: choose another model"
