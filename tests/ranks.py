"""Measured ranks of targets' picks among a draft's guesses, which simulations and the emulated pair are held to."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.export.report.simulation.ranks import Picked, Ranks

DATA = Path(__file__).parent / "data"


def read_ranks(name: str) -> Ranks:
    """The data of a file: JSON, a list of texts, each a list of [rank, [gap of the best score to the 2nd .. 8th]].

    `reference_ranks_0.8` and `reference_ranks_0.0` are the reference pair's, `ranks_0.8` its first draft's; made by
    `bench.ranks` of commit 93bffa1c.
    """
    texts = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return Ranks(tuple(tuple(Picked(rank, tuple(gaps)) for rank, gaps in text) for text in texts))
