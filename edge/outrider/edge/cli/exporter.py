"""Exports the reference pair for `outrider demo`, and the default draft of `outrider run`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from outrider.edge.devices.placement import DraftChoice
from outrider.models.bundle import reference_export
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.bundle.reference_export import EXPORTER_PACKAGES, WIDENED_MB, ReferencePair
from outrider.models.errors import RuntimeUnavailable
from outrider.models.process.extras import is_installed

NPU_SHAPES: Final = StaticShapes(prompt_len=128, response_len=576)
"""Lengths of a reference draft for an NPU: prompts of up to 128 tokens and texts of up to 576."""


def export_reference_pair(choice: DraftChoice, widen_mb: float = WIDENED_MB) -> ReferencePair:
    """The pair that `choice` drafts with; as `reference_export.export_reference_pair`."""
    return reference_export.export_reference_pair(widen_mb, *draft_kind(choice))


def draft_kind(choice: DraftChoice) -> tuple[str, str | None, StaticShapes | None]:
    """Device, runtime and shapes to export the draft for; None takes the device's default."""
    device, runtime = choice.wanted_device or "cpu", choice.wanted_runtime
    return device, None if runtime == "ngram" else runtime, NPU_SHAPES if device == "npu" else None


def default_draft(choice: DraftChoice) -> Path:
    """The reference draft's bundle. Raises RuntimeUnavailable where it cannot be exported."""
    if missing := next((name for name in EXPORTER_PACKAGES if not is_installed(name)), None):
        raise RuntimeUnavailable(
            f"the reference draft cannot be exported here: the package {missing!r} is not installed. Get a draft "
            "from your server with `outrider pull`"
        )
    return export_reference_pair(choice).draft
