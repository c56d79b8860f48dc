"""Where Outrider keeps what can be made again."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_cache_dir() -> Path:
    """$OUTRIDER_CACHE, or "outrider" in the place where this platform keeps what can be made again."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "outrider" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
