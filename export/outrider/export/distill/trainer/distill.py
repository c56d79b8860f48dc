"""Distils a draft on its target's own text, towards the picks that it is tested on.

Works for any pair of Hugging Face causal models with one tokenizer. The text is a pool (see `pool`) with the target's
likeliest next tokens at every position, so the target itself need not be in memory. The draft is trained by forward KL
divergence early, and late by the probability that draft and target pick the same token under shared noise, optionally
with cross-entropy of the target's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.checkpoint import Checkpoint, Judged
from outrider.export.distill.trainer.optim import Average, Budget, MatrixOptimizer
from outrider.export.distill.trainer.plan import DistillPlan
from outrider.export.distill.trainer.pool import Pool
from outrider.export.distill.trainer.progress import Event, Report, Stop, never, silent
from outrider.export.distill.trainer.training import Trainer
from outrider.export.distill.trainer.validation import measure_agreement

LOG_EVERY_S = 30.0


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
    temperatures: Sequence[float],
    plan: DistillPlan,
    checkpoint: Path | None = None,
    *,
    num_ids: int | None = None,
    validation: Pool | None = None,
    report: Report = silent,
    stop: Stop = never,
) -> TrainingResult:
    """Trains `student` in place on the pool, which was sampled with normalizers at `temperatures`.

    Of several pools, whose rows may differ in length, every step takes `plan.pool_rows`.
    It ends with the average of its late weights; with `validation` rows, with the best average that was judged on them.
    With a `checkpoint` the state is written there every few minutes and on `stop`, and continued from there; at the end
    it holds, under "model", the weights of `student`. With a budget of steps the result does
    not depend on how often the run was interrupted. Under `torchrun` each process has its own part of the pool and of
    every step's rows. num_ids: tokens of the tokenizer; None for all that the model has.

    Raises `ValueError` when the plan names not exactly one budget, or rows for another number of pools.
    """
    pools = (pool,) if isinstance(pool, Pool) else tuple(pool)
    run = _Run(student, pools, temperatures, plan, checkpoint, num_ids, validation, report)
    if run.state.resume():
        return run.outcome(is_complete=True, used_s=run.budget.used_s)
    run.start()
    while run.progress < 1.0:
        if stop():
            run.state.save()
            return run.outcome(is_complete=False, used_s=run.budget.elapsed_s())
        run.train()
        run.keep_up()
    run.finish()
    return run.outcome(is_complete=True, used_s=run.budget.elapsed_s())


class _Run:
    """Everything around the steps: the budget, judging, saving and reporting."""

    def __init__(
        self,
        student: PreTrainedModel,
        pools: Sequence[Pool],
        temperatures: Sequence[float],
        plan: DistillPlan,
        checkpoint: Path | None,
        num_ids: int | None,
        validation: Pool | None,
        report: Report,
    ) -> None:
        if (plan.minutes is None) == (plan.steps is None):
            raise ValueError(f"the budget is {plan.minutes} minutes and {plan.steps} steps; expected one of them")
        self.num_ids = num_ids or student.config.get_text_config().vocab_size
        self.temperatures = tuple(temperatures)
        self.plan = plan
        self.validation = validation
        self.report = report
        self.budget = Budget(plan.minutes, plan.steps)
        self.trainer = Trainer(
            student,
            MatrixOptimizer(student, plan.rates),
            Average(student, plan.average_decay),
            pools,
            self.temperatures,
            plan,
            self.num_ids,
            self._news,
        )
        self.state = Checkpoint(checkpoint, self.trainer, self.budget)
        self.progress = 0.0
        self._is_first = True
        self._logged = self._saved = time.monotonic()

    def start(self) -> None:
        """Judges the student's first weights, or reports where the run continues."""
        self._advance()
        if self.trainer.step:
            self._news(f"resumed at step {self.trainer.step}, {self.budget.used_s / 60:.1f} minutes used")
        if not self.state.judged:
            self._judge()

    def train(self) -> None:
        """One step; compilation in the first step does not count against the budget."""
        began = time.monotonic()
        self.trainer.train(self.progress)
        if self._is_first and self.trainer.is_compiled:
            self.budget.exclude(time.monotonic() - began)
        self._is_first = False
        self._advance()

    def keep_up(self) -> None:
        """Judges, saves and reports when each is due."""
        now = time.monotonic()
        judgements = len(self.state.judged)
        is_due = self.validation is not None and judgements / self.plan.evaluations <= self.progress < 1.0
        if is_due:
            self._judge()
        if is_due or now - self._saved > self.plan.checkpoint_every_s:
            self._saved = now
            self.state.save()
        is_news = now - self._logged > LOG_EVERY_S
        self._logged = now if is_news else self._logged
        self._tell(self.trainer.describe(), is_news=is_news)

    def finish(self) -> None:
        """Judges the last weights and gives the student the best."""
        self._judge()
        self.state.finish()
        epochs = " and ".join(f"{times:.1f}" for times in self.trainer.epochs())
        self._news(f"done: {self.trainer.step} steps, {epochs} times over the pool")

    def outcome(self, *, is_complete: bool, used_s: float) -> TrainingResult:
        """The present result of the run."""
        best = self.state.best
        return TrainingResult(
            is_complete=is_complete,
            steps=self.trainer.step,
            used_s=used_s,
            best_step=self.trainer.step if best is None else best.step,
            judged=tuple(self.state.judged),
        )

    def _advance(self) -> None:
        self.progress = self.budget.progress(self.trainer.step)  # all processes agree on it, so all must call it

    def _judge(self) -> None:
        """Judges the average on the validation rows, if there are any."""
        if self.validation is None:
            return
        with self.trainer.average.in_place_of(self.trainer.student):
            found = measure_agreement(
                self.trainer.student, self.validation, self.temperatures, self.num_ids, self.plan.rows_per_pass
            )
            is_best = self.state.add(Judged(self.trainer.step, found))
        best = ", the best so far" if is_best else ""
        self._news(f"step {self.trainer.step}: validation KL {found.mean_kl:.4f}, match {found.mean_match:.4f}{best}")

    def _news(self, text: str) -> None:
        self._tell(text, is_news=True)

    def _tell(self, text: str, *, is_news: bool) -> None:
        if parallel.rank() == 0:
            self.report(Event("train", self.progress, text, is_news))
