"""Trains Medusa-style heads on a frozen target's own text (Cai et al. 2024, arXiv 2401.10774, "Medusa-1").

A head is one residual block in front of the target's LM head, which all heads share and which is not trained: so K
heads add K * (H + 1) * H numbers. Each block begins at zero, where it guesses as the target does for the next token.
Knows neither bundles nor prompts.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.export.distill.trainer.optim import Budget, rate_scale
from outrider.export.distill.trainer.pool import Pool, shuffled
from outrider.export.distill.trainer.rollout import Rollout
from outrider.export.progress import Event, Report, Stop

ROWS_PER_STEP: Final = 16
_LATER: Final = 0.8  # weight of a head's loss relative to the head before it, as in the paper
_WARM_UP: Final = 0.05  # share of the budget
_CHUNK: Final = 1024  # places whose logits are computed at once


class Heads(nn.Module):
    """weight: [K, H, H], bias: [K, H] fp32. unembedding: [V, H], unembedding_bias: [V], the target's, frozen."""

    unembedding: Tensor
    unembedding_bias: Tensor

    def __init__(self, count: int, unembedding: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        vocab, size = unembedding.shape
        self.weight = nn.Parameter(torch.zeros(count, size, size))
        self.bias = nn.Parameter(torch.zeros(count, size))
        self.register_buffer("unembedding", unembedding.detach().float())
        self.register_buffer("unembedding_bias", torch.zeros(vocab) if bias is None else bias.detach().float())
        self.count = count

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """[..., V] of one head from hidden states [..., H]."""
        state = hidden + functional.silu(functional.linear(hidden, self.weight[head], self.bias[head]))
        return functional.linear(state, self.unembedding, self.unembedding_bias)


class HiddenStates:
    """Reads what a model's LM head gets: the last hidden state, after the final norm. The model stays as it is.

    is_reduced: whether the model is in bf16: then the heads' products are, too, in training.
    """

    def __init__(self, model: Any, num_ids: int) -> None:
        self._model = model
        self._head: Any = model.get_output_embeddings()
        self._num_ids = num_ids
        self._seen: list[Tensor] = []
        self.is_reduced = bool(model.dtype == torch.bfloat16)

    def make_heads(self, count: int) -> Heads:
        """Untrained heads in front of this model's LM head."""
        return Heads(count, self._head.weight, getattr(self._head, "bias", None)).to(self._model.device)

    @torch.no_grad()
    def of(self, ids: Tensor) -> Tensor:
        """[rows, length, H] fp32 for ids [rows, length], whose rows end with padding."""
        self._seen.clear()
        hook = self._head.register_forward_pre_hook(lambda module, given: self._seen.append(given[0]))
        try:
            self._model(input_ids=ids.long().clamp(0, self._num_ids - 1).to(self._model.device), use_cache=False)
        finally:
            hook.remove()
        return self._seen.pop().float()


def train_heads(
    states: HiddenStates,
    heads: Heads,
    pool: Pool,
    budget: Budget,
    rate: float,
    seed: int,
    report: Report,
    stop: Stop,
) -> tuple[int, int]:
    """Trains for the budget, or until `stop` says so; returns steps and tokens read.

    AdamW with a warm-up and a fall to zero.
    """
    optimizer = torch.optim.AdamW([heads.weight, heads.bias], lr=rate, weight_decay=0.0)
    num_steps, num_tokens, share = 0, 0, 0.0
    size = min(ROWS_PER_STEP, len(pool))
    while share < 1.0 and not stop():
        rows = pool.take(shuffled(len(pool), seed, num_steps * size, size))
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_scale(share, _WARM_UP)
        optimizer.zero_grad()
        losses = _step(states, heads, rows)
        optimizer.step()
        num_steps, num_tokens = num_steps + 1, num_tokens + int(rows.ends.sum())
        share = budget.progress(num_steps)
        text = f"step {num_steps}, loss by head {' '.join(f'{loss:.2f}' for loss in losses)}"
        report(Event("heads", share, text, is_news=num_steps % 50 == 0))
    return num_steps, num_tokens


def _step(states: HiddenStates, heads: Heads, rows: Rollout) -> list[float]:
    """Adds the gradients of a batch; returns each head's loss."""
    hidden = states.of(rows.ids)
    losses = []
    for head in range(heads.count):
        labels, is_own = _labels(rows, head)
        is_own = is_own.to(hidden.device)
        chosen, labels = hidden[:, : labels.shape[1]][is_own], labels.to(hidden.device)[is_own]  # [places, H], [places]
        total = 0.0
        for part, wanted in zip(torch.split(chosen, _CHUNK), torch.split(labels, _CHUNK), strict=True):
            with torch.autocast(part.device.type, torch.bfloat16, enabled=states.is_reduced):
                logits = heads.logits(part, head)
            loss = functional.cross_entropy(logits.float(), wanted, reduction="sum") / max(1, len(labels))
            (loss * _LATER**head).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        losses.append(total)
    return losses


def _labels(rows: Rollout, head: int) -> tuple[Tensor, Tensor]:
    """[rows, places] each: the token that the head guesses from each place, and whether the target wrote it."""
    ahead = head + 2
    labels = rows.ids[:, ahead:].long()
    position = torch.arange(ahead, rows.ids.shape[1])
    return labels, (position >= rows.starts[:, None]) & (position < rows.ends[:, None])


@torch.no_grad()
def measure_heads(states: HiddenStates, heads: Heads, pool: Pool) -> tuple[int, list[tuple[float, float, float]]]:
    """Over a held-out pool: the places tested, and each head's shares: likeliest right, in chain, among five."""
    top1, chain, top5 = np.zeros((3, heads.count))
    tested = 0
    for first in range(0, len(pool), ROWS_PER_STEP):
        rows = pool.take(np.arange(first, min(first + ROWS_PER_STEP, len(pool))))
        hidden = states.of(rows.ids)
        # Places from which every head guesses a token that the target wrote.
        _, is_own = _labels(rows, heads.count - 1)
        length = is_own.shape[1]
        is_first = _labels(rows, 0)[1][:, :length] & is_own
        tested += int(is_first.sum())
        in_chain = torch.ones(int(is_first.sum()), dtype=torch.bool)
        for head in range(heads.count):
            wanted = _labels(rows, head)[0][:, :length][is_first]
            guessed = heads.logits(hidden[:, :length][is_first.to(hidden.device)], head).topk(5, dim=-1).indices.cpu()
            hits = guessed == wanted[:, None]
            in_chain &= hits[:, 0]
            top1[head] += int(hits[:, 0].sum())
            chain[head] += int(in_chain.sum())
            top5[head] += int(hits.any(dim=1).sum())
    shares = np.stack([top1, chain, top5], axis=1) / max(1, tested)
    return tested, [(float(a), float(b), float(c)) for a, b, c in shares]
