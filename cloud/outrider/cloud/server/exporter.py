"""Exports the reference target for `serve reference`, by the exporter's own command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from outrider.models.child_command import run_child_command
from outrider.models.extras import require_packages
from outrider.models.places import default_cache_dir

REFERENCE: Final = "reference"
"""The word that stands for the reference target where a bundle is expected."""

WIDENED_MB: Final = 700
_NEEDED: Final = ("outrider.export", "outrider.reference", "torch", "transformers", "optimum", "nncf")


def export_reference_target() -> Path:
    """The widened reference target's bundle in the user's cache, exported if it is not there yet.

    Raises RuntimeUnavailable where the exporter is not installed, or fails.
    """
    require_packages(_NEEDED, "exporting the reference target", "export")
    print(
        f"Serves the reference target, widened to {WIDENED_MB} MB so that a step takes as long as a large model's; its "
        "text does not change.\nThe first time it is exported, which takes one to three minutes; it is kept in "
        f"{default_cache_dir()}.",
        file=sys.stderr,
        flush=True,
    )
    arguments = ("pair", REFERENCE, "--widen", str(WIDENED_MB), "--cached", "--json")
    printed = run_child_command(
        ["-m", "outrider.export.cli", *arguments], "the reference target was not exported; the lines above say why"
    )
    return Path(json.loads(printed)["target"])
