"""Text sampled from a target in batches, with what distillation needs to know of the target at every position.

Works for any Hugging Face causal model. Rows of one batch have one length, so no padding or mask is involved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from outrider.models.distillation.attention import batch_decoding

TEMPERATURES = (0.5, 0.8, 1.0)
"""The temperatures at which normalizers are recorded, hence at which a draft can be trained to match."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled rows and the target's distribution after each of their tokens.

    ids: `[rows, length]` int32. top_ids, top_logits: `[rows, length, k]` int32 and fp16, the likeliest next tokens,
    likeliest first. log_norms: `[rows, length, len(TEMPERATURES)]` fp32, the logarithm of the sum of
    `exp(logit / temperature)` over the whole vocabulary.
    """

    ids: Tensor
    top_ids: Tensor
    top_logits: Tensor
    log_norms: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def concatenate(parts: Sequence[Rollout]) -> Rollout:
    """One rollout from many of the same length."""
    return Rollout(
        ids=torch.cat([part.ids for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top_logits=torch.cat([part.top_logits for part in parts]),
        log_norms=torch.cat([part.log_norms for part in parts]),
    )


def _summary(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    values, ids = logits.topk(k, dim=-1)
    highest = values[..., :1]
    norms = [torch.exp_((logits - highest).div_(temperature)).sum(dim=-1).log_() for temperature in TEMPERATURES]
    scales = torch.tensor(TEMPERATURES)
    return ids.to(torch.int32), values.to(torch.float16), torch.stack(norms, dim=-1) + highest / scales


def sample_rows(
    model: PreTrainedModel, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator, k: int = 64
) -> Rollout:
    """Continues `prompts` `[rows, prompt_length]` int64 to `length` tokens each, row `r` at `temperatures[r]`.

    The whole row is summarized, its prompt included. `k` is capped by the vocabulary.
    """
    with torch.inference_mode(), batch_decoding(model):
        return _sample_rows(model, prompts, length, temperatures, generator, k)


def _sample_rows(
    model: PreTrainedModel, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator, k: int
) -> Rollout:
    cache = DynamicCache(config=model.config)
    output = model(input_ids=prompts, past_key_values=cache, use_cache=True)
    logits = output.logits.float()
    k = min(k, logits.shape[-1])
    parts = [_summary(logits, k)]
    columns = [prompts]
    scale = temperatures[:, None]
    last = logits[:, -1]
    for position in range(prompts.shape[1], length):
        noise = -torch.empty_like(last).exponential_(generator=generator).log_()
        token = (last / scale + noise).argmax(dim=-1, keepdim=True)
        columns.append(token)
        if position == length - 1:
            break
        last = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].float()
        parts.append(_summary(last[:, None], k))
    # The last token's own successor is never asked for: its summary repeats the one before and is masked in training.
    ids, values, norms = parts[-1]
    parts.append((ids[:, -1:], values[:, -1:], norms[:, -1:]))
    top_ids, top_logits, norms = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    return Rollout(torch.cat(columns, dim=1).to(torch.int32), top_ids, top_logits, norms)


def batches(
    prompts: Sequence[Sequence[int]], rows: int, seed: int, granularity: int = 4
) -> Iterator[tuple[Tensor, int]]:
    """Endless batches `[rows, length]` int64 of prompts of like length, with the batch's number.

    Prompts are cut to the next lower multiple of `granularity`, so that those of like length share a batch; each
    length is drawn as often as there are prompts of it.
    """
    buckets: dict[int, list[Sequence[int]]] = {}
    for prompt in prompts:
        cut = len(prompt) // granularity * granularity
        if cut:
            buckets.setdefault(cut, []).append(prompt[:cut])
    if not buckets:
        raise ValueError(f"no prompt has the {granularity} tokens that a batch needs at least")
    random = np.random.default_rng(seed)
    lengths = sorted(buckets)
    shares = np.array([len(buckets[length]) for length in lengths], dtype=np.float64)
    number = 0
    while True:
        length = int(random.choice(lengths, p=shares / shares.sum()))
        bucket = buckets[length]
        picks = random.choice(len(bucket), size=rows, replace=rows > len(bucket))
        yield torch.tensor([list(bucket[pick]) for pick in picks], dtype=torch.int64), number
        number += 1
