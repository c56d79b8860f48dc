"""Exports the reference pair, by the exporter's own command: for `outrider demo` and as the default draft of `run`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.edge.devices.placement import DraftChoice
from outrider.models.child_command import run_child_command
from outrider.models.errors import RuntimeUnavailable
from outrider.models.extras import is_installed
from outrider.models.manifest import StaticShapes

REFERENCE: Final = "reference"
"""The word that stands for the reference draft where a bundle is expected."""

WIDENED_MB: Final = 700.0
"""Size of the widened target; `outrider-cloud serve reference` serves the same one."""

EXPORTER: Final = ("outrider.export", "outrider.reference", "torch", "transformers", "optimum", "nncf")
"""The packages without which nothing is exported."""

NPU_SHAPES: Final = StaticShapes(prompt_len=128, response_len=576)
"""Lengths of a reference draft for an NPU: prompts of up to 128 tokens and texts of up to 576."""


@dataclass(frozen=True, slots=True)
class ReferencePair:
    """Where the two bundles are."""

    draft: Path
    target: Path


def export_reference_pair(choice: DraftChoice, widen_mb: float = WIDENED_MB) -> ReferencePair:
    """The pair's bundles in the user's cache, exported if they are not there yet; progress on standard error.

    choice: what drafts. widen_mb: size of the target; 0 leaves it as it is. Raises RuntimeUnavailable where the
    exporter fails.
    """
    printed = run_child_command(
        ["-m", "outrider.export.cli", *export_arguments(choice, widen_mb)],
        "the reference pair was not exported; the lines above say why",
    )
    places = json.loads(printed)
    return ReferencePair(Path(places["draft"]), Path(places["target"]))


def export_arguments(choice: DraftChoice, widen_mb: float) -> Sequence[str]:
    """Arguments of `outrider-export` for the pair that `choice` drafts with."""
    device = choice.wanted_device or "cpu"
    arguments = ["pair", REFERENCE, "--cached", "--json", "--widen", f"{widen_mb:g}", "--draft-device", device]
    if choice.wanted_runtime not in (None, "ngram"):
        arguments += ["--draft-runtime", str(choice.wanted_runtime)]
    if device == "npu":
        arguments += ["--prompt-len", str(NPU_SHAPES.prompt_len), "--response-len", str(NPU_SHAPES.response_len)]
    return arguments


def default_draft(choice: DraftChoice) -> Path:
    """The reference draft's bundle. Raises RuntimeUnavailable where it cannot be exported."""
    if missing := next((name for name in EXPORTER if not is_installed(name)), None):
        raise RuntimeUnavailable(
            f"no draft is given, and the reference draft cannot be exported here: the package {missing!r} is not "
            "installed. Name a draft bundle with --draft"
        )
    return export_reference_pair(choice).draft
