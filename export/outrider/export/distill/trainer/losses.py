"""Computes how far a draft's distribution is from its target's, and how often their picks differ.

As losses to train on, and as figures on rows that it is not trained on, by which the best checkpoint is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.export.distill.trainer.optim import DistillPlan
from outrider.export.distill.trainer.pool import Pool
from outrider.export.distill.trainer.rollout import Rollout

_BYTES = 2 << 30
"""Bound of the logits and their gradients in one pass of training."""


def training_rows(row_length: int, vocab_size: int, per_step: int) -> int:
    """The largest divisor of `per_step` whose rows' logits, four copies in fp32, fit; at least 1."""
    fitting = _BYTES // (4 * 4 * row_length * vocab_size)
    return max(rows for rows in range(1, per_step + 1) if per_step % rows == 0 and (rows == 1 or rows <= fitting))


@dataclass(frozen=True, slots=True)
class Masks:
    """Which positions count, `[rows, length - 1]` bool: position t is where the token at t + 1 is predicted.

    known: the target's distribution is known and the context long enough. written: the next token is the target's own.
    """

    known: Tensor
    written: Tensor

    @classmethod
    def of(cls, rows: Rollout, skip: int) -> Masks:
        """The masks of rows; the first `skip` positions are left out if they are before the target's own text."""
        position = torch.arange(rows.ids.shape[1] - 1, device=rows.ids.device)
        starts, ends = rows.starts[:, None], rows.ends[:, None]
        is_inside = position + 1 < ends
        return cls(is_inside & (position >= (starts - 1).clamp(max=skip)), is_inside & (position + 1 >= starts))


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


def draft_logits(student: nn.Module, ids: Tensor, num_ids: int | None) -> Tensor:
    """Logits `[rows, length - 1, num_ids]` for all tokens of `ids` `[rows, length]` but the first, bf16 inside."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits: Tensor = student(input_ids=ids, use_cache=False).logits
    return logits[:, :-1, :num_ids].float()


def agreement(
    logits: Tensor, top_ids: Tensor, top_logits: Tensor, log_norm: Tensor, temperature: Tensor, match_k: int
) -> tuple[Tensor, Tensor]:
    """Forward KL in nats and match bound at one temperature, each `[rows, positions]`.

    logits `[rows, positions, vocabulary]`, the draft's; top_ids, top_logits `[rows, positions, k]` and log_norm
    `[rows, positions]`, the target's. Tokens outside the k likeliest count as one.
    """
    scaled = logits / temperature
    log_p = top_logits.float() / temperature - log_norm[..., None]
    log_q = scaled.gather(-1, top_ids) - torch.logsumexp(scaled, dim=-1, keepdim=True)
    rest_p, rest_q = _rest(log_p), _rest(log_q)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1) + rest_p * (rest_p.log() - rest_q.log())
    log_p, log_q = log_p[..., :match_k], log_q[..., :match_k]
    return divergence, match_bound(log_p, log_q, _rest(log_p), _rest(log_q))


def _rest(log_p: Tensor) -> Tensor:
    return (1.0 - log_p.exp().sum(dim=-1)).clamp(min=1e-5)


def weighted_loss(
    student: nn.Module,
    rows: Rollout,
    log_norm: Tensor,
    temperature: Tensor,
    weights: Tensor,
    plan: DistillPlan,
    num_ids: int | None,
) -> tuple[Tensor, Tensor]:
    """The loss, and its three parts `[3]`: sums over positions of forward KL, match bound and cross-entropy, in nats.

    The first two at `temperature`, whose normalizers are `log_norm` `[rows, length]`, over known positions (`Masks`);
    the last over written ones, of the token that the target wrote, at the temperature at which it was drawn, and 0
    unless the plan gives it a weight. The loss is their sum with `weights` `[3]`.
    """
    ids = rows.ids.long()
    logits = draft_logits(student, ids, num_ids)
    masks = Masks.of(rows, plan.skip_positions)
    top_ids, top_logits = rows.top_ids[:, :-1].long(), rows.top_logits[:, :-1]
    divergence, match = agreement(logits, top_ids, top_logits, log_norm[:, :-1], temperature, plan.match_k)
    nats = torch.zeros((), device=ids.device)
    if plan.weights.cross_entropy:
        drawn_at = logits / rows.temperatures[:, None, None]
        each = functional.cross_entropy(drawn_at.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        nats = (each * masks.written.flatten()).sum()
    parts = torch.stack([(divergence * masks.known).sum(), (match * masks.known).sum(), nats])
    return (parts * weights).sum(), parts.detach()


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
    num_ids: int | None,
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
