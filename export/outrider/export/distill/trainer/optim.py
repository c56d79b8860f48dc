"""Holds every choice of a training run, and optimizes models under its budget of minutes or steps.

Learning rates decay over the budget. Muon updates the weight matrices inside the layers, AdamW the embeddings and
norms. Knows nothing of models beyond their parameters, and nothing of data.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from outrider.export.distill.trainer import parallel

CHECKPOINT_EVERY_S = 240.0
SKIP_POSITIONS = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates and weight decay, the same for the whole stage."""

    muon: float = 0.02
    adamw: float = 3e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup: float = 0.04
    """Share of the stage over which the rates rise linearly; afterwards they fall linearly to zero."""
    adjust: str = "original"
    """How Muon's rate depends on a matrix's shape, as torch names it: "match_rms_adamw" makes a step as long as one of
    AdamW's at the same rate."""

    @classmethod
    def like_adamw(cls, rate: float) -> Rates:
        """One rate for all, in the terms in which AdamW's rates are usually given; for fine-tuning."""
        return cls(muon=rate, adamw=rate, weight_decay=0.01, adjust="match_rms_adamw")


class MatrixOptimizer:
    """Muon for two-dimensional weights except embeddings, AdamW for everything else, under one `step`."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        tables = _vocabulary_tables(model)
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in model.parameters():
            (matrices if parameter.ndim == 2 and id(parameter) not in tables else others).append(parameter)
        self.rates = rates
        self._parameters = [*matrices, *others]
        self._muon = torch.optim.Muon(
            matrices, lr=rates.muon, momentum=0.95, weight_decay=rates.weight_decay, adjust_lr_fn=rates.adjust
        )
        self._adamw = torch.optim.AdamW(others, lr=rates.adamw, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, scale: float) -> None:
        """Averages the gradients over the processes, clips them, steps at `scale` times the peak rates, clears them."""
        parallel.average_gradients(self._parameters)
        torch.nn.utils.clip_grad_norm_(self._parameters, self.rates.clip_norm)
        for optimizer, rate in ((self._muon, self.rates.muon), (self._adamw, self.rates.adamw)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        """Everything that `load_state_dict` needs to continue."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def _vocabulary_tables(model: nn.Module) -> set[int]:
    """Ids of the parameters with one row per token or position, whatever a family calls them."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {id(module.weight) for module in [*tables, head] if module is not None}


@dataclass(slots=True)
class Budget:
    """A stage's minutes of wall clock, or its steps; time used is carried across resumed runs.

    used_s: of earlier runs, less what does not count (compilation, say).
    """

    minutes: float | None
    steps: int | None = None
    used_s: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        """Seconds used, those of earlier runs included."""
        return self.used_s + time.monotonic() - self._started

    def progress(self, step: int = 0) -> float:
        """Share of the budget used before step `step`, in [0, 1]; the same in every process."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.minutes is not None
        return parallel.agree(min(1.0, self.elapsed_s() / (60.0 * self.minutes)))


def rate_scale(progress: float, warmup: float) -> float:
    """The multiplier of the peak rates at `progress` in [0, 1]: up over `warmup`, then linearly down to zero."""
    if progress < warmup:
        return max(0.02, progress / warmup)
    return max(0.0, (1.0 - progress) / (1.0 - warmup))


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """The exponential moving average of a model's parameters, with a horizon that grows to `1 / (1 - decay)` steps."""

    def update(average: Any, present: Any, num_averaged: Tensor | int) -> None:
        count = int(num_averaged) + 1
        torch._foreach_lerp_(average, present, 1.0 - min(decay, count / (count + 10.0)))

    return AveragedModel(model, multi_avg_fn=update)


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
    skip_positions: int = SKIP_POSITIONS
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
