"""Exports the reference target for `outrider-cloud serve reference`."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.models.extras import require_packages
from outrider.models.places import default_cache_dir
from outrider.models.reference_export import EXPORTER_PACKAGES, WIDENED_MB, export_reference_pair


def export_reference_target() -> Path:
    """The widened reference target's bundle in the user's cache, exported if it is not there yet.

    Raises RuntimeUnavailable where the exporter is not installed, or fails.
    """
    require_packages(EXPORTER_PACKAGES, "exporting the reference target", "export")
    print(
        f"Serves the reference target, widened to {WIDENED_MB:g} MB: a step takes as long as a large model's; the text "
        "does not change.\nThe first time it is exported, which takes one to three minutes; it is kept in "
        f"{default_cache_dir()}.",
        file=sys.stderr,
        flush=True,
    )
    return export_reference_pair().target
