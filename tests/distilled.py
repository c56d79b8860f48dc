"""Rows of a small model's own texts, as training stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outrider.export.distill.trainer import (
    rollout,
)
from outrider.export.distill.trainer.files import save_json, save_tensors
from outrider.export.distill.trainer.pool import Pool

torch = pytest.importorskip("torch")


def sample(
    model: Any, stop_ids: Sequence[int] = (), top_k: int = 300, length: int = 24, seed: int = 3
) -> rollout.Rollout:
    """Two rows of 24 tokens after prompts of 4 and 9."""
    plan = rollout.PoolPlan(
        0, row_length=length, temperatures=(0.5, 1.0), top_k=top_k, num_ids=300, stop_ids=tuple(stop_ids)
    )
    prompts = [list(range(5, 9)), list(range(20, 29))]
    generator = torch.Generator().manual_seed(seed)
    rows = rollout.sample_rows(model, prompts, torch.tensor([1.0, 1.0]), plan, generator)
    assert rows is not None
    return rows


def stored_pool(folder: Path, rows: Sequence[rollout.Rollout]) -> Pool:
    """A finished pool of the rows, one part each."""
    for number, part in enumerate(rows):
        save_tensors(asdict(part), folder / f"part-{number:05d}.pt")
    made = {"parts": len(rows), "rows": sum(len(part) for part in rows), "is_complete": True}
    save_json(made, folder / "pool.json")
    return Pool(folder)
