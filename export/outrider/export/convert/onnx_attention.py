"""Exports attention of transformers models as ONNX Runtime's `GroupQueryAttention`.

transformers calls attention through one interface for all families; during an export a function registered there writes
the operator. The operator keeps each layer's keys and values in one buffer that is past and present at once, applies
the sliding window and the soft cap, and needs no mask. Rotary embedding and norms of queries and keys come before it,
in the family's own code. Bloom and GPT-Neo do not use the interface: their attention is replaced by the same operator
here.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import torch
import transformers
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from outrider.models.errors import ExportError

_MULTIPLE: Final = 8  # of which the operator takes head sizes
_NAME: Final = "outrider_group_query_attention"
# Arguments of some families' attention that the operator, as written here, would ignore.
_UNKNOWN: Final = ("attention_bias", "head_mask", "position_bias", "s_aux", "sinks")


@dataclass(slots=True)
class Recording:
    """One pass through the model. Without `pasts` it only records the shapes.

    pasts: of each layer, keys and values [1, kv_heads, positions, head_size]. last_position: int32 [1], total: int32
    [1], of the tokens in the cache after the step. shapes: (kv_heads, head_size) of each layer, presents: its keys
    and values after the step.
    """

    pasts: Sequence[tuple[Any, Any]] | None = None
    last_position: Any = None
    total: Any = None
    shapes: list[tuple[int, int]] = field(default_factory=list)
    presents: list[tuple[Any, Any]] = field(default_factory=list)


_recording: Recording | None = None


@contextlib.contextmanager
def recording_attention(model: Any, recording: Recording) -> Iterator[Recording]:
    """While it is open, a pass through the transformers model writes its attention into `recording`."""
    global _recording
    transformers.AttentionInterface.register(_NAME, _attend)
    replace = _REPLACED.get(model.config.model_type)
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, model.config, "_attn_implementation", model.config._attn_implementation)
        # An implementation without a mask function of its own is given no masks.
        model.config._attn_implementation = "eager" if replace else _NAME
        for module, name, function in replace(model) if replace else ():
            undo.enter_context(patch.object(module, name, types.MethodType(function, module)))
        _recording = recording
        try:
            yield recording
        finally:
            _recording = None


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """transformers' attention function: query [1, heads, n, head_size], key and value of the new tokens alone.

    Returns [1, n, heads, head_size], and None for the weights.
    """
    if attention_mask is not None or any(others.get(name) is not None for name in _UNKNOWN):
        raise ExportError(f"{type(module).__name__} has a mask, bias or sink, which GroupQueryAttention would ignore")
    return _group_query_attention(query, key, value, scaling, sliding_window, softcap), None


def _group_query_attention(
    query: Any,
    key: Any,
    value: Any,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    bias: Any = None,
) -> Any:
    assert _recording is not None
    _, heads, num_new, head_size = query.shape
    kv_heads = key.shape[1]
    if value.shape != key.shape or head_size != key.shape[3]:
        raise ExportError(
            f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in size; GroupQueryAttention needs one"
        )
    padding = -head_size % _MULTIPLE  # zeros change no score, and values that are zero are cut off again
    layer = len(_recording.shapes)
    _recording.shapes.append((int(kv_heads), int(head_size) + padding))
    if _recording.pasts is None:
        return torch.zeros_like(query).transpose(1, 2)
    past_key, past_value = _recording.pasts[layer]
    parts = [torch.nn.functional.pad(part, (0, padding)) if padding else part for part in (query, key, value)]
    rows = [part.transpose(1, 2).reshape(1, num_new, -1) for part in parts]
    inputs = [*rows, past_key, past_value, _recording.last_position, _recording.total]
    if bias is not None:
        inputs += [None, None, None, bias]  # after cosines, sines and positions
    found, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        {
            "num_heads": int(heads),
            "kv_num_heads": int(kv_heads),
            "scale": float(head_size**-0.5 if scaling is None else scaling),
            "local_window_size": int(window or -1),
            "softcap": float(softcap or 0.0),
            "do_rotary": 0,
        },
        dtypes=(query.dtype,) * 3,
        shapes=([1, num_new, heads * (head_size + padding)], past_key.shape, past_value.shape),
        version=1,
    )
    _recording.presents.append((present_key, present_value))
    return found.reshape(1, num_new, heads, head_size + padding)[..., :head_size]


Replacement = tuple[Any, str, Any]
"""A module, the name of one of its methods, and the function that stands in for it."""


def _replace_gpt_neo(model: Any) -> list[Replacement]:
    """GPT-Neo: no scaling of the scores; local layers have a window."""

    def attend(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[Any, None]:
        window = model.config.window_size if self.attention_type == "local" else None
        return _group_query_attention(query, key, value, 1.0, window).transpose(1, 2), None

    return [(block.attn.attention, "_attn", attend) for block in model.transformer.h]


def _replace_bloom(model: Any) -> list[Replacement]:
    """Bloom: a bias that grows with the key's position, with one slope per head (ALiBi, arXiv 2108.12409)."""

    def biases(self: Any, attention_mask: Any, num_heads: int, dtype: Any) -> Any:
        slopes = build_alibi_tensor(torch.ones(1, 2), num_heads, dtype)[:, 0, 1]
        assert _recording is not None
        if _recording.pasts is None:
            return slopes[None, :, None, None]
        total = _recording.total.item()
        torch._check(total >= 1)  # type: ignore[no-untyped-call]
        return (slopes[:, None] * torch.arange(total)[None]).to(dtype)[None, :, None, :]  # [1, heads, 1, total]

    def attend(self: Any, hidden_states: Any, residual: Any, alibi: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        bias = alibi.expand(1, alibi.shape[1], query.shape[2], alibi.shape[3])
        found = _group_query_attention(query, key, value, self.inv_norm_factor, None, None, bias)
        return self.dense(found.reshape(1, query.shape[2], -1)) + residual, None

    layers = [(block.self_attention, "forward", attend) for block in model.transformer.h]
    return [(model.transformer, "build_alibi_tensor", biases), *layers]


_REPLACED: Final = {"bloom": _replace_bloom, "gpt_neo": _replace_gpt_neo}
