"""Samples text from a target in batches, with the target's distribution at every position.

Works for any Hugging Face causal model. Prompts of one batch may differ in length: they are padded on the left while
the target writes, and every row begins with its prompt afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from outrider.export.progress import Stop, never

_BYTES = 1 << 30
"""Bound of the key/value cache, and of the logits: 1 GiB each."""
_MAX_ROWS = 256


def rollout_rows(config: PreTrainedConfig, row_length: int, bytes_per_value: int) -> int:
    """Rows to sample at once, 1 to 256: their keys and values, and three copies of a step's logits, fit."""
    text = config.get_text_config()
    kv_heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache: int = 2 * text.num_hidden_layers * kv_heads * head_size * bytes_per_value * row_length
    logits: int = 3 * 4 * text.vocab_size
    return max(1, min(_MAX_ROWS, _BYTES // max(cache, logits)))


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled rows and the target's distribution after each of their tokens.

    ids: `[rows, length]` int32; entries from a row's end on mean nothing. starts, ends: `[rows]` int32, where
    the target's own text begins and ends. temperatures: `[rows]` fp32, at which it was sampled. top_ids, top_logits:
    `[rows, length, k]` int32 and fp16, the likeliest next tokens, likeliest first. log_norms: `[rows, length, t]` fp32,
    the logarithm of the sum of `exp(logit / temperature)` over the tokenizer's vocabulary, for t temperatures. There
    is nothing for a row's last token.
    """

    ids: Tensor
    starts: Tensor
    ends: Tensor
    temperatures: Tensor
    top_ids: Tensor
    top_logits: Tensor
    log_norms: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor | slice) -> Rollout:
        """The rows of those numbers."""
        return Rollout(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device | str) -> Rollout:
        """The same on another device."""
        return Rollout(*(getattr(self, field.name).to(device) for field in fields(self)))


def concatenate(parts: Sequence[Rollout]) -> Rollout:
    """One rollout from many of the same length."""
    return Rollout(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Rollout)))


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How much text to sample, in minutes of wall clock, tokens or batches (one of the three), and how.

    rows: sampled at once, at temperatures spread evenly over `sample_between`. temperatures: those at which a draft can
    be trained, whose normalizers are recorded. top_k: likeliest tokens recorded at every position. num_ids: tokens of
    the tokenizer, None for all that the model has; logits beyond are padding and are never read. stop_ids: what ends a
    row, as its last token; without any, the target writes on after the end of a text.
    """

    seed: int
    minutes: float | None = None
    tokens: int | None = None
    batches: int | None = None
    row_length: int = 192
    rows: int = 256
    sample_between: tuple[float, float] = (0.5, 1.0)
    temperatures: tuple[float, ...] = (0.5, 0.8, 1.0)
    top_k: int = 64
    num_ids: int | None = None
    stop_ids: tuple[int, ...] = ()

    def bytes_per_token(self) -> int:
        """Bytes of a token of the pool on the disk."""
        return 4 + 6 * self.top_k + 4 * len(self.temperatures)


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as ids `[rows, longest]` int64, zeros before the shorter ones, and the mask of real tokens."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


class Decoder:
    """A batch that a model writes: logits of the prompts in pieces, then of one token per row at a time."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_ids: int | None) -> None:
        self._model = model
        self._num_ids = num_ids
        self._cache = DynamicCache(config=model.config)
        self._ids, self._mask = pad_left(prompts, model.device)
        self._positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)
        # Bloom takes no positions: it derives them from the attention mask.
        self._is_placed = "position_ids" in inspect.signature(model.forward).parameters

    def prefill(self) -> Iterator[Tensor]:
        """Logits after every token of the padded prompts: pieces `[rows, positions, num_ids]` fp32, in order."""
        rows, longest = self._ids.shape
        vocab_size: int = self._model.config.get_text_config().vocab_size
        step = max(1, _BYTES // (2 * 4 * rows * vocab_size))  # two copies of their fp32 logits fit
        for first in range(0, longest, step):
            yield self._pass(first, min(first + step, longest))

    def step(self, tokens: Tensor) -> Tensor:
        """Logits `[rows, num_ids]` fp32 after `tokens` `[rows, 1]` int64."""
        self._ids = tokens
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1
        return self._pass(0, 1)[:, 0]

    def _pass(self, first: int, last: int) -> Tensor:
        seen = self._mask.shape[1] - self._ids.shape[1] + last
        placed = {"position_ids": self._positions[:, first:last]} if self._is_placed else {}
        output = self._model(
            input_ids=self._ids[:, first:last],
            attention_mask=self._mask[:, :seen],
            past_key_values=self._cache,
            use_cache=True,
            **placed,
        )
        logits: Tensor = output.logits[..., : self._num_ids].float()
        return logits


@torch.inference_mode()
def sample_rows(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperatures: Tensor,
    plan: PoolPlan,
    generator: torch.Generator,
    stop: Stop = never,
) -> Rollout | None:
    """Continues each prompt, row `r` at `temperatures[r]`; None if `stop` says so.

    The whole row is recorded, its prompt included. Prompts are shorter than `plan.row_length`; `top_k` is capped by
    the vocabulary. `generator` is on the model's device.
    """
    decoder = Decoder(model, prompts, plan.num_ids)
    padded, _ = pad_left(prompts, model.device)
    longest = padded.shape[1]
    summaries = []
    for piece in decoder.prefill():
        summaries.append(_summary(piece, plan))
        last = piece[:, -1].clone()
    scale = temperatures[:, None].to(model.device)
    stops = torch.tensor(plan.stop_ids, device=model.device, dtype=torch.int64)
    columns = [padded]
    width = torch.full((len(prompts),), plan.row_length, device=model.device)
    for position in range(longest, plan.row_length):
        if stop():
            return None
        noise = -torch.empty_like(last).exponential_(generator=generator).log_()
        token = (last / scale + noise).argmax(dim=-1, keepdim=True)
        columns.append(token)
        is_end = torch.isin(token[:, 0], stops)
        width = torch.where(is_end & (width == plan.row_length), position + 1, width)
        if position == plan.row_length - 1 or bool((width <= position + 1).all()):
            break
        last = decoder.step(token)
        summaries.append(_summary(last[:, None], plan))
    return _left_aligned(prompts, columns, summaries, width, temperatures, plan.row_length)


def _summary(logits: Tensor, plan: PoolPlan) -> tuple[Tensor, Tensor, Tensor]:
    values, ids = logits.topk(min(plan.top_k, logits.shape[-1]), dim=-1)
    highest = values[..., :1]
    norms = [torch.exp_((logits - highest).div_(temperature)).sum(dim=-1).log_() for temperature in plan.temperatures]
    scales = torch.tensor(plan.temperatures, device=logits.device)
    return ids.to(torch.int32), values.to(torch.float16), torch.stack(norms, dim=-1) + highest / scales


def _left_aligned(
    prompts: Sequence[Sequence[int]],
    columns: Sequence[Tensor],
    summaries: Sequence[tuple[Tensor, Tensor, Tensor]],
    width: Tensor,
    temperatures: Tensor,
    length: int,
) -> Rollout:
    """Moves every row to the left by its padding; entries beyond its end are copies and are never trained on."""
    ids = torch.cat(list(columns), dim=1).to(torch.int32)
    padding = columns[0].shape[1] - torch.tensor([len(prompt) for prompt in prompts], device=ids.device)
    source = torch.arange(length, device=ids.device) + padding[:, None]

    def moved(tensor: Tensor) -> Tensor:
        index = source.clamp(max=tensor.shape[1] - 1)
        shape = (*index.shape, *[1] * (tensor.ndim - 2))
        return tensor.gather(1, index.reshape(shape).expand(*index.shape, *tensor.shape[2:])).cpu()

    top_ids, top_logits, norms = (moved(torch.cat(part, dim=1)) for part in zip(*summaries, strict=True))
    return Rollout(
        ids=moved(ids),
        starts=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
        ends=(width - padding).to(torch.int32).cpu(),
        temperatures=temperatures.float().cpu(),
        top_ids=top_ids,
        top_logits=top_logits,
        log_norms=norms,
    )
