"""Optimizes models under a budget of minutes or steps, over which learning rates decay.

Muon updates the weight matrices inside the layers, AdamW the embeddings and norms. Knows nothing of models beyond their
parameters, and nothing of data.
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
    """A stage's minutes of wall clock, or its steps; time used is carried across resumed runs."""

    minutes: float | None
    steps: int | None = None
    used_s: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        """Seconds used, those of earlier runs included."""
        return self.used_s + time.monotonic() - self._started

    def exclude(self, seconds: float) -> None:
        """Does not count `seconds` (compilation, say) against the budget."""
        self.used_s -= seconds

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
