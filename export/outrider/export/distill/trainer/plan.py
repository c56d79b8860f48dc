"""Holds every choice of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.export.distill.trainer.optim import CHECKPOINT_EVERY_S, Rates


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the parts of the loss.

    divergence: forward KL, replaced by match probability in the course of the run if `match` is not 0. cross_entropy:
    of the target's own tokens, throughout.
    """

    divergence: float = 1.0
    match: float = 2.0
    cross_entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class DistillPlan:
    """Budget (minutes of wall clock or steps, one of the two), shapes and weights of a distillation.

    temperatures: those whose normalizers the pool has. Each step trains at one of them, drawn with
    `temperature_shares`, or evenly where that is empty.
    """

    seed: int
    minutes: float | None = None
    steps: int | None = None
    rates: Rates = field(default_factory=lambda: Rates(muon=0.015, adamw=2e-3, weight_decay=0.01))
    weights: Weights = Weights()
    rows_per_step: int = 16
    pool_rows: tuple[int, ...] = ()
    """Rows that each of several pools gives to every step, in their order, in place of `rows_per_step`."""
    rows_per_pass: int = 16
    """Rows that go through the draft at once; a step's gradients are added up over its passes."""
    temperatures: tuple[float, ...] = (0.5, 0.8, 1.0)
    temperature_shares: tuple[float, ...] = ()
    blend: tuple[float, float] = (0.1, 0.4)
    """Shares of the budget between which the loss moves from divergence to match probability."""
    least_divergence: float = 0.05
    """Share of the divergence at the end."""
    skip_positions: int = 16
    """Positions at the start of a long prompt that are not trained on: a draft mostly has that much context."""
    match_k: int = 24
    average_decay: float = 0.998
    evaluations: int = 10
    """How often the average of the weights is judged on validation rows, if there are any; the best is kept."""
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    is_compiled: bool = True

    def divergence_share(self, progress: float) -> float:
        """How much of the loss is divergence at `progress` in [0, 1]; the rest is match probability."""
        if self.weights.match == 0.0:
            return 1.0
        start, end = self.blend
        share = min(1.0, max(0.0, (progress - start) / (end - start)))
        return 1.0 - share * (1.0 - self.least_divergence)
