"""Runs the steps of distillation: which rows, at which temperature, with which weights. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from transformers import PreTrainedModel

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.losses import Masks, weighted_loss
from outrider.export.distill.trainer.optim import MatrixOptimizer, rate_scale
from outrider.export.distill.trainer.order import shuffled
from outrider.export.distill.trainer.plan import DistillPlan
from outrider.export.distill.trainer.pool import Pool
from outrider.export.distill.trainer.rollout import Rollout
from outrider.models.errors import ModelFault

Pass = Callable[..., tuple[Tensor, Tensor]]
"""Takes a model and inputs; returns a loss and the figures to report."""


class BackwardPass:
    """Calls a `Pass` and adds the gradients of its loss to the model's.

    The first call tries compilation. If it fails, `tell` gets the reason and the same call runs without it, so an error
    that has another cause is still raised.
    """

    def __init__(self, function: Pass, *, is_compiled: bool, tell: Callable[[str], None]) -> None:
        self._plain = function
        self._function: Pass = torch.compile(function, dynamic=False) if is_compiled else function
        self._is_tried = not is_compiled
        self._tell = tell
        self.is_compiled = is_compiled

    def __call__(self, model: nn.Module, *inputs: Any) -> Tensor:
        """Runs the pass and returns the figures to report. On the first call the model must have no gradients."""
        if self._is_tried:
            return self._run(model, *inputs)
        self._is_tried = True
        try:
            return self._run(model, *inputs)
        except Exception as error:
            self._function = self._plain
            self.is_compiled = False
            model.zero_grad(set_to_none=True)
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            self._tell(
                f"torch.compile does not work here ({type(error).__name__}: {reason}); training continues without it, "
                "slower, with the same result (usually a C++ compiler is missing)"
            )
        return self._run(model, *inputs)

    def _run(self, model: nn.Module, *inputs: Any) -> Tensor:
        loss, facts = self._function(model, *inputs)
        torch.autograd.backward(loss)
        return facts


_SMOOTHING = 0.95


class Trainer:
    """Trains `student` step by step. A step is a function of its number and of the state alone."""

    def __init__(
        self,
        student: PreTrainedModel,
        optimizer: MatrixOptimizer,
        average: AveragedModel,
        pools: Sequence[Pool],
        plan: DistillPlan,
        num_ids: int,
        tell: Callable[[str], None],
    ) -> None:
        self.student = student
        self.optimizer = optimizer
        self.average = average
        self.step = 0
        self._pools = tuple(pools)
        self._plan = plan
        self._num_ids = num_ids
        self._pass = BackwardPass(weighted_loss, is_compiled=plan.is_compiled, tell=tell)
        self._rows_per_step = _rows_per_step(plan, len(self._pools))
        self._recent = np.zeros(3)

    @property
    def is_compiled(self) -> bool:
        """Whether steps run through `torch.compile`."""
        return self._pass.is_compiled

    @property
    def pool_rows(self) -> int:
        """Rows of this process's pools."""
        return sum(len(pool) for pool in self._pools)

    def train(self, progress: float) -> None:
        """One step at `progress` in [0, 1] of the budget. Raises ModelFault when the training diverges."""
        plan = self._plan
        random = np.random.default_rng([plan.seed, 3, self.step, parallel.rank()])
        choice = int(random.choice(len(plan.temperatures), p=plan.temperature_shares or None))
        drawn = self._rows()
        masks = [Masks.of(rows, plan.skip_positions) for rows in drawn]
        known = _count(mask.known for mask in masks)
        counts = torch.stack([known, known, _count(mask.written for mask in masks)]).clamp(min=1)
        share = plan.divergence_share(progress)
        wanted = (plan.weights.divergence * share, -plan.weights.match * (1.0 - share), plan.weights.cross_entropy)
        weights = torch.tensor(wanted, device=counts.device) / counts
        parts = torch.zeros(3, device=counts.device)
        temperature = torch.tensor(plan.temperatures[choice], device=counts.device)
        for rows in drawn:
            for first in range(0, len(rows), plan.rows_per_pass):
                some = rows.take(slice(first, first + plan.rows_per_pass))
                log_norm = some.log_norms[:, :, choice]
                parts += self._pass(self.student, some, log_norm, temperature, weights, plan, self._num_ids)
        self._remember(parts / counts)
        self.optimizer.step(rate_scale(progress, plan.rates.warmup))
        self.average.update_parameters(self.student)
        self.step += 1

    def describe(self) -> str:
        """The present state in words, with means over about the last twenty steps."""
        divergence, match, nats = self._recent
        entropy = f", cross-entropy {nats:.3f}" if self._plan.weights.cross_entropy else ""
        return f"step {self.step}: KL {divergence:.3f}, match {match:.4f}{entropy}"

    def epochs(self) -> tuple[float, ...]:
        """How many times every row of each pool has been seen, on average."""
        return tuple(self.step * size / len(pool) for size, pool in zip(self._rows_per_step, self._pools, strict=True))

    def _rows(self) -> list[Rollout]:
        """The rows of this step, of each pool apart because their lengths differ."""
        drawn = []
        for pool, size in zip(self._pools, self._rows_per_step, strict=True):
            numbers = shuffled(len(pool), self._plan.seed, self.step * size, size)
            drawn.append(pool.take(numbers).to(self.student.device))
        return drawn

    def _remember(self, parts: Tensor) -> None:
        found = parts.double().cpu().numpy()
        if not np.isfinite(found).all():
            raise ModelFault(f"the training diverged at step {self.step}; begin again with a lower --rate")
        self._recent = found if not self._recent.any() else _SMOOTHING * self._recent + (1.0 - _SMOOTHING) * found


def _rows_per_step(plan: DistillPlan, num_pools: int) -> tuple[int, ...]:
    """Rows of each pool that this process takes for a step."""
    rows = plan.pool_rows or (plan.rows_per_step,)
    if len(rows) != num_pools:
        raise ValueError(f"{num_pools} pools, and rows per step for {len(rows)}; give pool_rows one number per pool")
    return tuple(max(1, count // parallel.size()) for count in rows)


def _count(masks: Iterable[Tensor]) -> Tensor:
    return torch.stack([mask.sum() for mask in masks]).sum()
