"""Exports the reference pair by the exporter's own command, started as a child process.

For the two commands that need the pair and must not import the exporter: `outrider` (demo, and the default draft of
run) and `outrider-cloud serve reference`. Both ask with the same arguments, so the pair is exported once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.models.bundle.manifest import StaticShapes
from outrider.models.process import with_parent
from outrider.models.process.child_command import run_child_command

REFERENCE: Final = "reference"
"""The word that stands for the reference pair where a model or a bundle is expected."""
AUTO: Final = "auto"
"""The word for the pulled draft that fits the verifier's target, or else the reference draft."""

WIDENED_MB: Final = 700.0
"""Size of the widened reference target in FP32, 10^6 bytes."""

EXPORTER_PACKAGES: Final = ("outrider.export", "outrider.reference", "torch", "transformers", "optimum", "nncf")
"""The packages that the export needs."""

DEFAULT_VERIFIER_URL: Final = "http://127.0.0.1:8000"
"""Where `outrider-cloud serve` listens and `outrider run` asks, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ReferencePair:
    """Where the two bundles are."""

    draft: Path
    target: Path


def export_reference_pair(
    widen_mb: float = WIDENED_MB,
    draft_device: str = "cpu",
    draft_runtime: str | None = None,
    draft_shapes: StaticShapes | None = None,
) -> ReferencePair:
    """The pair's bundles in the user's cache, exported if they are not there yet; progress on standard error.

    widen_mb: size of the target; 0 leaves it as it is. draft_runtime, draft_shapes: None takes the device's default.
    Raises RuntimeUnavailable where the exporter fails.
    """
    arguments = export_arguments(widen_mb, draft_device, draft_runtime, draft_shapes)
    printed = run_child_command(
        ["-P", "-m", with_parent.__name__, "outrider.export.cli", *arguments],
        "the reference pair was not exported; the lines above say why",
    )
    places = json.loads(printed)
    return ReferencePair(Path(places["draft"]), Path(places["target"]))


def export_arguments(
    widen_mb: float, draft_device: str, draft_runtime: str | None, draft_shapes: StaticShapes | None
) -> Sequence[str]:
    """Arguments of `outrider-export` for that pair."""
    arguments = ["pair", REFERENCE, "--cached", "--json", "--widen", f"{widen_mb:g}", "--draft-device", draft_device]
    if draft_runtime is not None:
        arguments += ["--draft-runtime", draft_runtime]
    if draft_shapes is not None:
        arguments += ["--prompt-len", str(draft_shapes.prompt_len), "--response-len", str(draft_shapes.response_len)]
    return arguments
