"""Completes the extras when the metadata is built: where `reference` comes from depends on what is built.

In a clone it is the folder beside this file, so `pip install ".[all]"` needs no index. A package index takes no paths:
a release (OUTRIDER_RELEASE set) and an sdist, which lacks the folder, require that distribution by its version.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

OLDEST = (3, 11)
if sys.version_info < OLDEST:
    # pip compares `requires-python` only after it has resolved all extras, which takes pages and can fail.
    sys.exit(
        f"outrider needs Python 3.11 or newer; this is {platform.python_version()}. Make the environment with another: "
        "python3.11 -m venv .venv"
    )


class CustomMetadataHook(MetadataHookInterface):
    """The extras of pyproject.toml's table of this hook, and `reference`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the optional dependencies in `metadata`."""
        folder = Path(self.root, "reference")
        is_release = bool(os.environ.get("OUTRIDER_RELEASE")) or not folder.is_dir()
        source = f"=={metadata['version']}" if is_release else f" @ {folder.as_uri()}"
        extras: dict[str, list[str]] = self.config["optional-dependencies"]
        metadata["optional-dependencies"] = {**extras, "reference": [f"outrider-reference{source}"]}
