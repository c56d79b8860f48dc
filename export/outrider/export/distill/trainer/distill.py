"""Distils a draft on its target's own text, towards the picks that it is tested on.

Works for any pair of Hugging Face causal models with one tokenizer. The text is a pool (see `pool`) with the target's
likeliest next tokens at every position, so the target itself need not be in memory. The draft is trained by forward KL
divergence early, and late by the probability that draft and target pick the same token under shared noise, optionally
with cross-entropy of the target's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from transformers import PreTrainedModel

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.files import load_tensors, save_tensors
from outrider.export.distill.trainer.losses import Agreement, BackwardPass, Masks, measure_agreement, weighted_loss
from outrider.export.distill.trainer.optim import Budget, DistillPlan, MatrixOptimizer, moving_average, rate_scale
from outrider.export.distill.trainer.pool import Pool, shuffled
from outrider.export.distill.trainer.rollout import Rollout
from outrider.export.progress import Event, Report, Stop, never, silent
from outrider.models.errors import ModelFault

LOG_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of the average of the weights on the validation rows, after `step` steps."""

    step: int
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended. best_step: of the weights that the student has now. judged: on the validation rows, if any."""

    is_complete: bool
    steps: int
    used_s: float
    best_step: int
    judged: tuple[Judged, ...]


def distill(
    student: PreTrainedModel,
    pool: Pool | Sequence[Pool],
    plan: DistillPlan,
    checkpoint: Path,
    *,
    num_ids: int | None = None,
    validation: Pool | None = None,
    report: Report = silent,
    stop: Stop = never,
) -> TrainingResult:
    """Trains `student` in place on the pool, which was sampled with normalizers at `plan.temperatures`.

    Of several pools, whose rows may differ in length, every step takes `plan.pool_rows`.
    It ends with the average of its late weights; with `validation` rows, with the best average that was judged on them.
    The state is written to `checkpoint` every few minutes and on `stop`, and continued from there; at the end
    it holds, under "model", the weights of `student`. With a budget of steps the result does
    not depend on how often the run was interrupted. Under `torchrun` each process has its own part of the pool and of
    every step's rows. num_ids: tokens of the tokenizer; None for all that the model has.

    Raises `ValueError` when the plan names not exactly one budget, or rows for another number of pools.
    """
    pools = (pool,) if isinstance(pool, Pool) else tuple(pool)
    run = _Run(student, pools, plan, checkpoint, num_ids, validation, report)
    if run.resume():
        return run.outcome(is_complete=True, used_s=run.budget.used_s)
    run.start()
    while run.progress < 1.0:
        if stop():
            run.save()
            return run.outcome(is_complete=False, used_s=run.budget.elapsed_s())
        run.train()
        run.keep_up()
    run.finish()
    return run.outcome(is_complete=True, used_s=run.budget.elapsed_s())


class _Run:
    """Everything around the steps: the budget, judging, the state on the disk, and reporting."""

    def __init__(
        self,
        student: PreTrainedModel,
        pools: Sequence[Pool],
        plan: DistillPlan,
        checkpoint: Path,
        num_ids: int | None,
        validation: Pool | None,
        report: Report,
    ) -> None:
        if (plan.minutes is None) == (plan.steps is None):
            raise ValueError(f"the budget is {plan.minutes} minutes and {plan.steps} steps; expected one of them")
        self.budget = Budget(plan.minutes, plan.steps)
        self.progress = 0.0
        self._num_ids, self._plan, self._validation, self._report = num_ids, plan, validation, report
        optimizer, average = MatrixOptimizer(student, plan.rates), moving_average(student, plan.average_decay)
        self._trainer = Trainer(student, optimizer, average, pools, plan, num_ids, self._news)
        self._path = checkpoint
        self._judged: list[Judged] = []
        self._is_first = True
        self._logged = self._saved = time.monotonic()

    def resume(self) -> bool:
        """Restores the state on the disk, if there is one; returns whether that run was finished."""
        if not self._path.exists():
            return False
        state = load_tensors(self._path)
        self._trainer.student.load_state_dict(state["model"])
        self._trainer.step, self.budget.used_s = state["step"], state["used_s"]
        self._judged = [Judged(found["step"], Agreement(**found["agreement"])) for found in state["judged"]]
        if not state["is_final"]:
            self._trainer.optimizer.load_state_dict(state["optimizer"])
            self._trainer.average.load_state_dict(state["average"])
        return bool(state["is_final"])

    def start(self) -> None:
        """Judges the student's first weights, or reports where the run continues."""
        self._advance()
        if self._trainer.step:
            self._news(f"resumed at step {self._trainer.step}, {self.budget.used_s / 60:.1f} minutes used")
        if not self._judged:
            self._judge()

    def train(self) -> None:
        """One step; compilation in the first step does not count against the budget."""
        began = time.monotonic()
        self._trainer.train(self.progress)
        if self._is_first and self._trainer.backward.is_compiled:
            self.budget.used_s -= time.monotonic() - began
        self._is_first = False
        self._advance()

    def keep_up(self) -> None:
        """Judges, saves and reports when each is due."""
        now = time.monotonic()
        is_due = self._validation is not None and len(self._judged) / self._plan.evaluations <= self.progress < 1.0
        if is_due:
            self._judge()
        if is_due or now - self._saved > self._plan.checkpoint_every_s:
            self._saved = now
            self.save()
        is_news = now - self._logged > LOG_EVERY_S
        self._logged = now if is_news else self._logged
        self._tell(self._trainer.describe(), is_news=is_news)

    def save(self) -> None:
        """Writes the state of an unfinished run."""
        optimizer, average = self._trainer.optimizer.state_dict(), self._trainer.average.state_dict()
        self._write({"optimizer": optimizer, "average": average, "is_final": False})

    def finish(self) -> None:
        """Judges the last weights, gives the student the best judged ones, or else the average's, and writes them."""
        self._judge()
        if self._best is None:
            weights = self._trainer.average.module.state_dict()
        else:
            weights = load_tensors(self._best_path(self._best))
        self._trainer.student.load_state_dict(weights)
        self._write({"is_final": True})
        epochs = " and ".join(f"{times:.1f}" for times in self._trainer.epochs())
        self._news(f"done: {self._trainer.step} steps, {epochs} times over the pool")

    def outcome(self, *, is_complete: bool, used_s: float) -> TrainingResult:
        """The present result of the run."""
        best_step = self._trainer.step if self._best is None else self._best.step
        return TrainingResult(is_complete, self._trainer.step, used_s, best_step, tuple(self._judged))

    @property
    def _best(self) -> Judged | None:
        """The trained weights with the highest match bound, the earliest of equals; the start does not count."""
        trained = [found for found in self._judged if found.step]
        return max(trained, key=lambda found: found.agreement.mean_match, default=None)

    def _advance(self) -> None:
        self.progress = self.budget.progress(self._trainer.step)  # all processes agree on it, so all must call it

    def _judge(self) -> None:
        """Judges the average on the validation rows, if there are any, and keeps its weights if they are the best."""
        if self._validation is None:
            return
        plan, model = self._plan, self._trainer.average.module
        agreement = measure_agreement(
            model, self._validation, plan.temperatures, self._num_ids, plan.rows_per_pass, plan.skip_positions
        )
        found = Judged(self._trainer.step, agreement)
        self._judged.append(found)
        best = ""
        if self._best is found:
            best = ", the best so far"
            if parallel.rank() == 0:
                save_tensors(model.state_dict(), self._best_path(found))
        self._news(f"step {found.step}: validation KL {agreement.mean_kl:.4f}, match {agreement.mean_match:.4f}{best}")

    def _write(self, more: dict[str, Any]) -> None:
        if parallel.rank() != 0:
            return
        state = {
            "model": self._trainer.student.state_dict(),
            "step": self._trainer.step,
            "used_s": self.budget.elapsed_s(),
            "pool_rows": sum(map(len, self._trainer.pools)) * parallel.size(),
            "judged": [{"step": found.step, "agreement": asdict(found.agreement)} for found in self._judged],
        }
        save_tensors(state | more, self._path)
        kept = None if self._best is None or more["is_final"] else self._best_path(self._best)
        for path in self._path.parent.glob(f"{self._path.stem}.best-*.pt"):
            if path != kept:
                path.unlink()

    def _best_path(self, found: Judged) -> Path:
        return self._path.with_name(f"{self._path.stem}.best-{found.step}.pt")

    def _news(self, text: str) -> None:
        self._tell(text, is_news=True)

    def _tell(self, text: str, *, is_news: bool) -> None:
        if parallel.rank() == 0:
            self._report(Event("train", self.progress, text, is_news))


_SMOOTHING = 0.95


class Trainer:
    """Trains `student` step by step: which rows, at which temperature, with which weights. Knows no clock.

    A step is a function of its number and of the state alone.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        optimizer: MatrixOptimizer,
        average: AveragedModel,
        pools: Sequence[Pool],
        plan: DistillPlan,
        num_ids: int | None,
        tell: Callable[[str], None],
    ) -> None:
        self.student = student
        self.optimizer = optimizer
        self.average = average
        self.step = 0
        self.pools = tuple(pools)
        self._plan = plan
        self._num_ids = num_ids
        self.backward = BackwardPass(weighted_loss, is_compiled=plan.is_compiled, tell=tell)
        rows = plan.pool_rows or (plan.rows_per_step,)  # of each pool, for a step
        if len(rows) != len(pools):
            raise ValueError(
                f"{len(pools)} pools, and rows per step for {len(rows)}; give pool_rows one number per pool"
            )
        self._rows_per_step = tuple(max(1, count // parallel.size()) for count in rows)
        self._recent = np.zeros(3)

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
                parts += self.backward(self.student, some, log_norm, temperature, weights, plan, self._num_ids)
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
        return tuple(self.step * size / len(pool) for size, pool in zip(self._rows_per_step, self.pools, strict=True))

    def _rows(self) -> list[Rollout]:
        """The rows of this step, of each pool apart because their lengths differ."""
        drawn = []
        for pool, size in zip(self.pools, self._rows_per_step, strict=True):
            numbers = shuffled(len(pool), self._plan.seed, self.step * size, size)
            drawn.append(pool.take(numbers).to(self.student.device))
        return drawn

    def _remember(self, parts: Tensor) -> None:
        found = parts.double().cpu().numpy()
        if not np.isfinite(found).all():
            raise ModelFault(f"the training diverged at step {self.step}; begin again with a lower --rate")
        self._recent = found if not self._recent.any() else _SMOOTHING * self._recent + (1.0 - _SMOOTHING) * found


def _count(masks: Iterable[Tensor]) -> Tensor:
    return torch.stack([mask.sum() for mask in masks]).sum()
