"""Repairs transformers and optimum-intel while a model is exported.

Each repair says what is wrong without it. None is trusted: the numerical check decides about the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

# A larger difference would fail the check at FP32 by attention alone.
_SAME: Final = 1e-4
_PROBE_TOKENS: Final = 24


@contextlib.contextmanager
def repaired_upstream(model: Any) -> Iterator[None]:
    """Applies all repairs that converting `model`, a transformers model, to OpenVINO needs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_any_version())
        if model.config.model_type == "gpt_neo":
            stack.enter_context(sliding_gpt_neo(model))
        yield


def choose_attention(model: Any) -> None:
    """Switches `model` from plain to fused attention where the two compute the same.

    OpenVINO recognises fused attention only, and turns it into paged attention. But "sdpa" silently leaves out what it
    cannot do (Gemma 2's soft-capping); such a model keeps plain attention: correct, but it cannot be paged.
    """
    import torch

    tokens = torch.arange(_PROBE_TOKENS)[None] % model.get_input_embeddings().weight.shape[0]
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            return  # the family has its own attention, which the converter knows
        delta = (model(input_ids=tokens, use_cache=False).logits - expected).abs().max()
        if delta > _SAME * expected.abs().max():
            model.set_attn_implementation("eager")


@contextlib.contextmanager
def _any_version() -> Iterator[None]:
    """optimum-intel 2.1.0 refuses Gemma 2 and 3 with transformers > 5.0, but converts them correctly with 5.5."""
    from optimum.exporters.openvino import convert

    real = convert.is_transformers_version

    def is_version(operation: str, version: str) -> bool:
        return bool(operation != ">" and real(operation, version))

    with _replaced(convert, "is_transformers_version", is_version):
        yield


@contextlib.contextmanager
def sliding_gpt_neo(model: Any) -> Iterator[None]:
    """GPT-Neo's local layers with the sliding-window mask that other families have.

    Its own mask is a buffer of the module, cut to size. OpenVINO does not recognise it when it turns attention into
    paged attention: local layers then silently attend everything beyond the window.
    """
    import torch
    from optimum.exporters.openvino import model_patcher
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    from transformers.models.gpt_neo import modeling_gpt_neo

    def create_masks(**arguments: Any) -> tuple[Any, Any]:
        return create_causal_mask(**arguments), create_sliding_window_causal_mask(**arguments)

    def attend(
        self: Any, query: Any, key: Any, value: Any, attention_mask: tuple[Any, Any], head_mask: None = None
    ) -> tuple[Any, None]:
        mask = attention_mask[1] if self.attention_type == "local" else attention_mask[0]
        # Not scaled by the root of the head size: the weights were trained without.
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
        return attended, None

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(modeling_gpt_neo, "create_causal_mask", create_masks))
        stack.enter_context(_replaced(model_patcher, "_gpt_neo_attn_sdpa", attend))
        stack.enter_context(_replaced(model.config, "sliding_window", model.config.window_size))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    had, before = hasattr(owner, name), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
