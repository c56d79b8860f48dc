"""Gives Outrider's version, also to a checkout that runs without being installed."""

from __future__ import annotations

import importlib.metadata


def outrider_version() -> str:
    """Outrider's version; "source" for a checkout that is not installed."""
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return "source"
