"""Trains a causal language model on next tokens of a stream, by wall clock, with checkpoints.

Works for any Hugging Face causal model on the CPU: bfloat16 autocast over fp32 weights, the loss compiled together
with the model, which on a CPU is several times faster than plain fp32. Knows nothing of the pair or its files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.optim import CHECKPOINT_EVERY_S, Budget, MatrixOptimizer, Rates, rate_scale
from training.data import Windows, scoring_windows


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and in what shape to train. A `phase` of context length begins at its share of the budget."""

    minutes: float
    rates: Rates
    seed: int
    tokens_per_step: int = 6144
    phases: tuple[tuple[float, int], ...] = ((0.0, 256), (0.9, 512))

    def context(self, progress: float) -> int:
        """The context length at `progress` in [0, 1]."""
        return [length for start, length in self.phases if start <= progress][-1]


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats of `ids[:, 1:]` given what precedes; `ids` is `[batch, length + 1]` int64."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = model(input_ids=ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def quick_loss(model: nn.Module, stream: NDArray[np.uint16], length: int = 256, rows: int = 64) -> float:
    """Mean held-out cross-entropy in nats over `rows` windows spread over the stream: for progress lines only."""
    windows = scoring_windows(stream, length)
    windows = windows[:: max(1, len(windows) // rows)][:rows]
    return float(np.mean([next_token_loss(model, part).item() for part in torch.split(windows, 16)]))


def pretrain(
    model: nn.Module,
    stream: NDArray[np.uint16],
    heldout: NDArray[np.uint16],
    plan: Plan,
    checkpoint: Path,
    report: Callable[[str], None] = print,
) -> None:
    """Trains `model` in place; writes `checkpoint` every few minutes and continues from it if it exists."""
    optimizer = MatrixOptimizer(model, plan.rates)
    budget = Budget(plan.minutes)
    step = tokens = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, tokens, budget.used_s = state["step"], state["tokens"], state["used_s"]
        report(f"resumed at step {step}, {budget.used_s / 60:.1f} of {plan.minutes:.1f} minutes used")
    compiled = torch.compile(next_token_loss, dynamic=False)
    windows = {length: Windows(stream, length, plan.seed + length) for _, length in plan.phases}
    seen: set[int] = set()
    saved = logged = time.monotonic()
    average = math.nan
    while (progress := budget.progress()) < 1.0:
        length = plan.context(progress)
        began = time.monotonic()
        number = step * parallel.size() + parallel.rank()
        batch = windows[length].batch(number, max(1, plan.tokens_per_step // length // parallel.size()))
        loss = compiled(model, batch)
        torch.autograd.backward(loss)
        optimizer.step(rate_scale(progress, plan.rates.warmup))
        if length not in seen:
            seen.add(length)
            budget.used_s -= time.monotonic() - began
        step, tokens = step + 1, tokens + batch[:, 1:].numel() * parallel.size()
        average = loss.item() if math.isnan(average) else 0.95 * average + 0.05 * loss.item()
        now = time.monotonic()
        if now - logged > 30 and parallel.rank() == 0:
            logged = now
            report(f"{budget.elapsed_s() / 60:6.2f} min  step {step}  {tokens / 1e6:.2f}M tokens  loss {average:.3f}")
        if now - saved > CHECKPOINT_EVERY_S:
            saved = now
            _save(checkpoint, model, optimizer, step, tokens, budget)
            if parallel.rank() == 0:
                report(f"held-out loss {quick_loss(model, heldout):.3f}")
    _save(checkpoint, model, optimizer, step, tokens, budget)
    if parallel.rank() == 0:
        report(f"done: {step} steps, {tokens / 1e6:.2f}M tokens, held-out loss {quick_loss(model, heldout):.3f}")


def _save(path: Path, model: nn.Module, optimizer: MatrixOptimizer, step: int, tokens: int, budget: Budget) -> None:
    if parallel.rank() != 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "tokens": tokens,
        "used_s": budget.elapsed_s(),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)
