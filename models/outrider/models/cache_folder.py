"""Names the directory for what Outrider can make again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def default_cache_dir() -> Path:
    """$OUTRIDER_CACHE, or else "outrider" in this platform's cache directory."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("outrider", appauthor=False)
