"""Computes how many rows of text fit a memory bound, in generation and in training."""

from __future__ import annotations

from transformers import PreTrainedConfig

ROLLOUT_BYTES = 1 << 30
"""Bound of the key/value cache, and of the logits, while text is sampled: 1 GiB each."""

TRAINING_BYTES = 2 << 30
"""Bound of the logits and their gradients in one pass of training."""

MAX_ROLLOUT_ROWS = 256


def rollout_rows(config: PreTrainedConfig, row_length: int, bytes_per_value: int) -> int:
    """Rows to sample at once, 1 to 256: their keys and values, and three copies of a step's logits, fit."""
    text = config.get_text_config()
    kv_heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache: int = 2 * text.num_hidden_layers * kv_heads * head_size * bytes_per_value * row_length
    logits: int = 3 * 4 * text.vocab_size
    return max(1, min(MAX_ROLLOUT_ROWS, ROLLOUT_BYTES // max(cache, logits)))


def prefill_positions(rows: int, vocab_size: int) -> int:
    """Prompt positions to feed at once, so that two copies of their fp32 logits fit."""
    return max(1, ROLLOUT_BYTES // (2 * 4 * rows * vocab_size))


def training_rows(row_length: int, vocab_size: int, per_step: int) -> int:
    """The largest divisor of `per_step` whose rows' logits, four copies in fp32, fit; at least 1."""
    fitting = TRAINING_BYTES // (4 * 4 * row_length * vocab_size)
    return max(rows for rows in range(1, per_step + 1) if per_step % rows == 0 and (rows == 1 or rows <= fitting))
