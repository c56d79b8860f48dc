"""Distillation of a draft on its target: on the target's own text, towards the picks that it will be tested on.

Works for any pair of Hugging Face causal models with one tokenizer: give it models and tokenized prompts. It first
samples a pool of text from the target, recording the target's likeliest next tokens at every position, so that the
target is not needed again. Then the draft is trained on the pool: forward KL divergence early, and late the
probability itself that draft and target pick the same token under shared noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.models.distillation import parallel
from outrider.models.distillation.optim import CHECKPOINT_EVERY_S, Average, Budget, MatrixOptimizer, Rates, rate_scale
from outrider.models.distillation.rollout import TEMPERATURES, Rollout, batches, concatenate, sample_rows


@dataclass(frozen=True, slots=True)
class DistillPlan:
    """Minutes, shapes and weights of a distillation.

    Rows are sampled at temperatures spread evenly over `sample_between`; each step trains at one of
    `rollout.TEMPERATURES`, drawn with `temperature_shares`.
    """

    pool_minutes: float
    minutes: float
    seed: int
    rates: Rates = field(default_factory=lambda: Rates(muon=0.015, adamw=2e-3, weight_decay=0.01))
    row_length: int = 192
    rows_per_rollout: int = 256
    rows_per_step: int = 16
    sample_between: tuple[float, float] = (0.5, 1.0)
    temperature_shares: tuple[float, ...] = (0.2, 0.65, 0.15)
    blend: tuple[float, float] = (0.1, 0.4)
    """Shares of the budget between which the loss moves from divergence to match probability."""
    least_divergence: float = 0.05
    """Weight of the divergence at the end."""
    skip_positions: int = 16
    """Positions at the start of a row that are not trained on: a draft always has that much context."""
    top_k: int = 64
    match_k: int = 24
    average_decay: float = 0.998


def sample_pool(
    teacher: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    plan: DistillPlan,
    report: Callable[[str], None] = print,
) -> Rollout:
    """Samples rows from the teacher until `plan.pool_minutes` are used: `[num_rows, plan.row_length]`.

    Under `torchrun` each process samples its own share.
    """
    budget = Budget(plan.pool_minutes)
    seed = plan.seed + 1000 * parallel.rank()
    generator = torch.Generator().manual_seed(seed)
    low, high = plan.sample_between
    temperatures = torch.linspace(low, high, plan.rows_per_rollout)
    usable = [prompt for prompt in prompts if len(prompt) < plan.row_length]
    parts: list[Rollout] = []
    for batch, number in batches(usable, plan.rows_per_rollout, seed):
        parts.append(sample_rows(teacher, batch, plan.row_length, temperatures, generator, plan.top_k))
        rows = (number + 1) * plan.rows_per_rollout
        report(f"{budget.elapsed_s() / 60:6.2f} min  pool of {rows} rows, {rows * plan.row_length / 1e6:.2f}M tokens")
        if budget.progress() >= 1.0:
            break
    return concatenate(parts)


def match_bound(log_p: Tensor, log_q: Tensor, rest_p: Tensor, rest_q: Tensor) -> Tensor:
    """A lower bound of the probability that shared Gumbel noise makes both distributions pick the same token.

    With the same exponential race the probability is `sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)` (Daliri, Musco and
    Suresh 2024, arXiv 2408.07978). Here `log_p` and `log_q`, `[..., k]`, are the log-probabilities of k tokens and
    `rest_p`, `rest_q`, `[...]`, the mass of all others, of which only the losses are counted. Returns `[...]`.
    """
    ratio_p = log_p[..., None, :] - log_p[..., :, None]
    ratio_q = log_q[..., None, :] - log_q[..., :, None]
    among = torch.exp(torch.maximum(ratio_p, ratio_q).clamp(max=60.0)).sum(dim=-1)
    others = rest_p[..., None] * torch.exp(-log_p.clamp(min=-60.0)) + rest_q[..., None] * torch.exp(
        -log_q.clamp(min=-60.0)
    )
    return (1.0 / (among + others)).sum(dim=-1)


def distill_losses(
    student: nn.Module,
    ids: Tensor,
    top_ids: Tensor,
    top_logits: Tensor,
    log_norm: Tensor,
    temperature: Tensor,
    skip: int,
    match_k: int,
) -> tuple[Tensor, Tensor]:
    """Mean forward KL in nats and mean match bound, at one temperature, over the rows' positions from `skip` on.

    ids `[rows, length]`; top_ids, top_logits `[rows, length, k]`; log_norm `[rows, length]` at that temperature. Tokens
    outside the k likeliest count as one.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = student(input_ids=ids, use_cache=False).logits
    scaled = logits[:, skip:-1].float() / temperature
    log_p = top_logits[:, skip:-1].float() / temperature - log_norm[:, skip:-1, None]
    log_q = scaled.gather(-1, top_ids[:, skip:-1]) - torch.logsumexp(scaled, dim=-1, keepdim=True)
    rest_p = (1.0 - log_p.exp().sum(dim=-1)).clamp(min=1e-5)
    rest_q = (1.0 - log_q.exp().sum(dim=-1)).clamp(min=1e-5)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1) + rest_p * (rest_p.log() - rest_q.log())
    log_p, log_q = log_p[..., :match_k], log_q[..., :match_k]
    rest_p = (1.0 - log_p.exp().sum(dim=-1)).clamp(min=1e-5)
    rest_q = (1.0 - log_q.exp().sum(dim=-1)).clamp(min=1e-5)
    return divergence.mean(), match_bound(log_p, log_q, rest_p, rest_q).mean()


def distill(
    student: PreTrainedModel,
    pool: Rollout,
    plan: DistillPlan,
    checkpoint: Path | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Trains `student` in place on the pool for `plan.minutes`; it ends with the average of its late weights.

    Under `torchrun` each process has its own part of the pool and of every step's rows.

    With a `checkpoint` the state is written there every few minutes and taken up again; at the end it holds, under
    "model", the weights that `student` has.
    """
    optimizer = MatrixOptimizer(student, plan.rates)
    average = Average(student, plan.average_decay)
    budget = Budget(plan.minutes)
    step = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        student.load_state_dict(state["model"])
        if state["is_final"]:
            return
        optimizer.load_state_dict(state["optimizer"])
        average.load_state_dict(state["average"])
        step, budget.used_s = state["step"], state["used_s"]

    def save(is_final: bool) -> None:
        if checkpoint is not None and parallel.rank() == 0:
            state = {
                "model": student.state_dict(),
                "optimizer": optimizer.state_dict(),
                "average": average.state_dict(),
                "step": step,
                "used_s": budget.elapsed_s(),
                "pool_rows": len(pool) * parallel.size(),
                "is_final": is_final,
            }
            partial = checkpoint.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(checkpoint)

    rows_per_step = max(1, plan.rows_per_step // parallel.size())
    compiled = torch.compile(distill_losses, dynamic=False)
    random = np.random.default_rng([plan.seed, step, parallel.rank()])
    order = np.empty(0, dtype=np.int64)
    is_compiled = False
    logged = saved = time.monotonic()
    sums = np.zeros(3)
    while (progress := budget.progress()) < 1.0:
        began = time.monotonic()
        if len(order) < rows_per_step:
            order = np.concatenate([order, random.permutation(len(pool))])
        rows, order = torch.from_numpy(order[:rows_per_step].copy()), order[rows_per_step:]
        choice = int(random.choice(len(TEMPERATURES), p=plan.temperature_shares))
        divergence, match = compiled(
            student,
            pool.ids[rows].long(),
            pool.top_ids[rows].long(),
            pool.top_logits[rows],
            pool.log_norms[rows, :, choice],
            torch.tensor(TEMPERATURES[choice]),
            plan.skip_positions,
            plan.match_k,
        )
        weight = divergence_weight(progress, plan)
        torch.autograd.backward(weight * divergence + (1.0 - weight) * 2.0 * (1.0 - match))
        optimizer.step(rate_scale(progress, plan.rates.warmup))
        average.update(student)
        step += 1
        if not is_compiled:
            is_compiled = True
            budget.exclude(time.monotonic() - began)
        if TEMPERATURES[choice] == 0.8:
            sums += (divergence.item(), match.item(), 1.0)
        if time.monotonic() - logged > 30 and parallel.rank() == 0:
            logged = time.monotonic()
            kl, hit = sums[:2] / max(1.0, sums[2])
            sums[:] = 0.0
            report(f"{budget.elapsed_s() / 60:6.2f} min  step {step}  at T 0.8: KL {kl:.3f}, match {hit:.4f}")
        if time.monotonic() - saved > CHECKPOINT_EVERY_S:
            saved = time.monotonic()
            save(is_final=False)
    average.copy_to(student)
    save(is_final=True)
    report(f"done: {step} steps, {step * rows_per_step / len(pool):.1f} times over the pool")


def divergence_weight(progress: float, plan: DistillPlan) -> float:
    """How much of the loss is divergence at `progress` in [0, 1]; the rest is match probability."""
    start, end = plan.blend
    share = min(1.0, max(0.0, (progress - start) / (end - start)))
    return 1.0 - share * (1.0 - plan.least_divergence)
