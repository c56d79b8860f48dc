"""Speeds up generation in large batches on a CPU: attention as one matrix product per group of heads.

torch's fused CPU kernel takes ten times as long when every row has one new token and heads share keys. All other cases
go to the ordinary implementation, and so do models whose attention is more than scaled dot products (a soft cap, sinks,
their own attention): only families known to be plain are changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "outrider_grouped"
PLAIN_FAMILIES = ("llama", "qwen2", "qwen3")


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of `query` `[rows, heads, new, size]` to key and value `[rows, kv_heads, past + new, size]`.

    `attention_mask`, if any, is boolean, `[rows, 1, new, past + new]`. Returns `[rows, new, heads, size]`.
    """
    rows, heads, new, size = query.shape
    if new != 1:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    kv_heads, length = key.shape[1:3]
    scale = options.get("scaling") or size**-0.5
    grouped = query.reshape(rows * kv_heads, heads // kv_heads, size) * scale
    scores = torch.bmm(grouped, key.reshape(rows * kv_heads, length, size).transpose(1, 2))
    if attention_mask is not None:
        hidden = attention_mask.logical_not().expand(rows, kv_heads, 1, length).reshape(rows * kv_heads, 1, length)
        scores = scores.masked_fill(hidden, float("-inf"))
    picked = torch.bmm(torch.softmax(scores, dim=-1), value.reshape(rows * kv_heads, length, size))
    return picked.reshape(rows, 1, heads, size), None


@contextmanager
def batch_decoding(model: PreTrainedModel) -> Iterator[None]:
    """While it is open, `model` generates with `grouped_attention`, where that is the same function and faster."""
    before = model.config._attn_implementation
    if model.config.model_type not in PLAIN_FAMILIES or before != "sdpa" or model.device.type != "cpu":
        yield
        return
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
