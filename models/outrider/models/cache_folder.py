"""Names the directory for what Outrider can make again, and places in a home directory."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from outrider.models.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """The path, with a home directory in place of `~` or `~user`. Raises ConfigError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{path} cannot be used: {Path(path).parts[0]} is no known home directory; name the whole path"
        ) from None


def default_cache_dir() -> Path:
    """$OUTRIDER_CACHE, or else "outrider" in this platform's cache directory. Raises ConfigError as `expanded`."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return expanded(chosen)
    return platformdirs.user_cache_path("outrider", appauthor=False)
