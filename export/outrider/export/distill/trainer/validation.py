"""Measures a draft against its target on rows that it is not trained on, to choose the best checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.export.distill.trainer.losses import Masks, agreement, draft_logits
from outrider.export.distill.trainer.pool import Pool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Means over positions, by temperature: forward KL in nats, and a lower bound of the share of equal picks."""

    temperatures: tuple[float, ...]
    kl: tuple[float, ...]
    match: tuple[float, ...]

    @property
    def mean_match(self) -> float:
        """The match bound's mean over the temperatures: the measure of a checkpoint."""
        return float(np.mean(self.match))

    @property
    def mean_kl(self) -> float:
        """The divergence's mean over the temperatures."""
        return float(np.mean(self.kl))


@torch.no_grad()
def measure_agreement(
    student: PreTrainedModel,
    pool: Pool,
    temperatures: Sequence[float],
    num_ids: int,
    rows_per_pass: int,
    skip: int = 16,
    match_k: int = 24,
) -> Agreement:
    """Goes once over the pool, which was sampled with normalizers at `temperatures`."""
    sums = torch.zeros(3, len(temperatures), dtype=torch.float64)
    for first in range(0, len(pool), rows_per_pass):
        rows = pool.take(np.arange(first, min(first + rows_per_pass, len(pool)))).to(student.device)
        logits = draft_logits(student, rows.ids.long(), num_ids)
        known = Masks.of(rows, skip).known
        for index, temperature in enumerate(temperatures):
            divergence, match = agreement(
                logits,
                rows.top_ids[:, :-1].long(),
                rows.top_logits[:, :-1],
                rows.log_norms[:, :-1, index],
                torch.tensor(temperature, device=student.device),
                match_k,
            )
            found = [float((value * known).sum()) for value in (divergence, match, torch.ones_like(match))]
            sums[:, index] += torch.tensor(found, dtype=torch.float64)
    kl, matched = (sums[:2] / sums[2]).tolist()
    return Agreement(tuple(temperatures), tuple(kl), tuple(matched))
