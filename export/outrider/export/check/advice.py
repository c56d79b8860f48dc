"""Advises what to try after a failed check: only what this role and device have, and what is not known to fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.export.recipes import RECIPES, ExportOptions, runtimes_for
from outrider.export.source.family_facts import runtime_obstacle
from outrider.models.manifest import Device, Precision

_WIDEST: Final[tuple[Precision, ...]] = ("fp32", "bf16", "fp16", "int8")
_OTHER_DEVICES: Final[tuple[Device, ...]] = ("cpu",)


@dataclass(frozen=True, slots=True)
class Advice:
    """finer: where the precision may be the cause. elsewhere: where the converter or the runtime is."""

    finer: str
    elsewhere: str


GENERAL: Final = Advice("try a wider precision", "try another runtime")
"""For a check that knows nothing of the options."""


def advise(options: ExportOptions, config: Mapping[str, Any]) -> Advice:
    """What to try instead of `options` for a model with this config.json."""
    elsewhere = _elsewhere(options, config)
    possible = RECIPES[options.role, options.device, options.resolved_runtime]
    widest = next(precision for precision in (*_WIDEST, *possible) if precision in possible)
    is_widest = options.resolved_precision in ("fp32", widest)
    return Advice(elsewhere if is_widest else f"try --precision {widest}", elsewhere)


def _elsewhere(options: ExportOptions, config: Mapping[str, Any]) -> str:
    for runtime in runtimes_for(options.role, options.device):
        if runtime != options.resolved_runtime and runtime_obstacle(config, runtime, options.device) is None:
            return f"try --runtime {runtime}"
    for device in _OTHER_DEVICES:
        runtimes = runtimes_for(options.role, device) if device != options.device else ()
        if any(runtime_obstacle(config, runtime, device) is None for runtime in runtimes):
            return f"try --device {device}"
    return f"no other runtime of a {options.role} on {options.device} is left: choose another model"
