"""Reads and writes files of measured ranks, which bench.ranks makes and simulations play."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from outrider.export.report.simulation.ranks import MOST_GUESSES, Picked, Ranks
from outrider.models.errors import ConfigError


def read_ranks(path: Path) -> Ranks:
    """The data of a file: JSON, a list of texts, each a list of [rank, [gap, gap, ...]]. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Ranks(tuple(tuple(Picked(int(rank), _checked(gaps)) for rank, gaps in text) for text in found))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no ranks of picks ({error}); make it with python -m bench.ranks") from error


def write_ranks(ranks: Ranks, path: Path) -> None:
    """Writes what `read_ranks` reads."""
    text = json.dumps([[[rank, gaps] for rank, gaps in text] for text in ranks.texts], separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")


def _checked(gaps: Sequence[float]) -> tuple[float, ...]:
    if len(gaps) != MOST_GUESSES - 1 or not all(math.isfinite(gap) and gap >= 0.0 for gap in gaps):
        raise ValueError(f"the gaps are {gaps}; expected {MOST_GUESSES - 1} numbers, 0 or more")
    return tuple(map(float, gaps))
