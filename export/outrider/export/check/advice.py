"""Advises what to try after a failed check: only what this role and device have, and what is not known to fail.

That is known from the stored measurement of which families work in which way, which `tools.families` makes; the check's
bound on errors comes from it, too.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from outrider.export.recipes import RECIPES, ExportOptions, runtimes_for
from outrider.export.source.family_facts import MORE_THAN_TEXT, runtime_obstacle
from outrider.models.bundle.manifest import Device, Precision, Role
from outrider.models.errors import ExportError

MEASURED: Final = Path(__file__).with_name("support_table.json")

TINY_LAYERS: Final = 2
TINY_HIDDEN: Final = 64
"""Sizes of the tiny models that were measured: a model's errors grow with its own."""

WIDE: Final = (
    ("draft", "npu", "openvino", "int8"),
    ("draft", "cpu", "openvino", "int8"),
    ("draft", "cpu", "onnxruntime", "int8"),
    ("draft", "cpu", "onnxruntime", "fp32"),
    ("target", "cpu", "openvino", "fp32"),
    ("target", "cpu", "torch", "fp32"),
)
"""The ways in which every family is measured. A quantized export's graph is checked unquantized first: a draft that
works in INT8 works in FP32.
"""

Outcome = Literal["works", "wrong", "refused"]


class Cell(BaseModel):
    """One way of exporting a tiny model of one family.

    outcome: "works"; "wrong" where the result computes other logits, so that the check refuses it; "refused" where it
    cannot be made. error: largest |delta logit| over the largest |logit|, of the four kinds of step; 0 where
    refused. words: the message where it does not work, without its advice, else where it was checked.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    role: Role
    device: str
    runtime: str
    precision: Precision
    outcome: Outcome
    error: float
    words: str

    @property
    def way(self) -> str:
        """The column that the cell is in."""
        return f"{self.role} {self.device} {self.runtime} {self.precision}"


class SupportTable(BaseModel):
    """A measurement. left_out: why there is no tiny model of a family that transformers lists."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cells: tuple[Cell, ...]
    left_out: dict[str, str] = {}

    def rows(self) -> dict[str, dict[str, Cell]]:
        """By family, in the order of names, the cell of each way."""
        rows: dict[str, dict[str, Cell]] = {}
        for cell in sorted(self.cells, key=lambda cell: cell.family):  # stable: ways keep their order
            rows.setdefault(cell.family, {})[cell.way] = cell
        return rows

    def only(self, families: Sequence[str]) -> SupportTable:
        """The part of these families."""
        cells = tuple(cell for cell in self.cells if cell.family in families)
        return SupportTable(cells=cells, left_out={k: v for k, v in self.left_out.items() if k in families})

    def to_json(self) -> str:
        """The text of `support_table.json`."""
        return json.dumps(self.model_dump(), indent=1) + "\n"

    def works(self, family: str, role: Role, device: str, runtime: str) -> bool:
        """Whether a way of this role and runtime is known to work for the family, or nothing is known of it.

        On this device where it was measured there; most families' ways for a GPU were measured on CPUs only.
        """
        cells = [cell for cell in self.cells if (cell.family, cell.role, cell.runtime) == (family, role, runtime)]
        on_cpu = [cell for cell in cells if cell.device == "cpu"]
        cells = [cell for cell in cells if cell.device == device] or on_cpu
        return not cells or any(cell.outcome == "works" for cell in cells)

    def usual_error(self, role: Role, device: str, runtime: str, precision: Precision) -> float | None:
        """The median error of this recipe over all families that it works for; None if it was never measured.

        What is never exported (an NPU's graph before it is quantized) is compared with the runtime's other recipes.
        """
        cells = [cell for cell in self.cells if cell.outcome == "works"]
        cells = [cell for cell in cells if (cell.runtime, cell.precision) == (runtime, precision)]
        own = [cell.error for cell in cells if (cell.role, cell.device) == (role, device)]
        return statistics.median(own or [cell.error for cell in cells]) if cells else None


def works_somewhere(row: Mapping[str, Cell]) -> bool:
    """Whether some way takes the family."""
    return any(cell.outcome == "works" for cell in row.values())


@functools.cache
def load_measured() -> SupportTable:
    """The measurement stored with this version of Outrider."""
    table = SupportTable.model_validate_json(MEASURED.read_bytes())
    assert table.cells, f"{MEASURED} holds no measurement"
    return table


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
    ways = [
        (device, runtime)
        for device in (options.device, *_OTHER_DEVICES)
        for runtime in runtimes_for(options.role, device)
        if (device, runtime) != (options.device, options.resolved_runtime)
        and runtime_obstacle(facts, runtime, device) is None
        and table.works(family, options.role, device, runtime)
    ]
    if not ways and facts.get(MORE_THAN_TEXT):
        return f"export a checkpoint of its text model ({family}) alone"
    if not ways:
        return f"no runtime that was measured runs a {options.role} of the family {family}: choose another model"
    device, runtime = ways[0]
    if device == options.device:
        return f"try --runtime {runtime}"
    is_default = runtime == runtimes_for(options.role, device)[0]
    return f"try --device {device}" + ("" if is_default else f" --runtime {runtime}")
