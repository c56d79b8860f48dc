"""Reads a model's shape from its config.json, whatever names its family uses.

Knows no files but the directory for which transformers is asked for defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream
from outrider.export.source.family_facts import FAMILIES
from outrider.models.errors import ExportError

LONGEST_CHECKED_WINDOW: Final = 1024
"""Sliding windows up to this size are checked beyond the window; with a longer window, sequences end at it."""

ALIBI_POSITIONS: Final = 2048
"""The longest sequence of a model without positions (ALiBi) whose config does not give its training length.

Such models run beyond their training length, with worse text. Bloom was trained on 2048.
"""

_LAYERS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS: Final = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_FEED_FORWARD: Final = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_WINDOWS: Final = (
    "sliding_window",
    "window_size",
    "attention_window_size",
    "sliding_window_size",
    "attention_chunk_size",
)
_WINDOWED_LAYERS: Final = ("sliding", "chunked", "local")
_STATELESS_LAYERS: Final = ("attention", "dense", "sparse", "moe")
"""Words in the kinds of layers that keep keys and values, or nothing."""

_IS_STATEFUL: Final = "outrider_is_stateful"
"""Key for transformers' own mark of models whose cache cannot be cut back; added to its reading of a configuration."""

_MSCALE_FAMILIES: Final = ("phimoe",)
"""Families whose every rotary scaling depends on the longest position of a step, whatever its type."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes.

    family: its model_type. positions: its longest sequence. window: positions that its windowed layers attend, the
    present one included; None where every layer attends everything. is_tied: whether input and output embeddings
    are one tensor. original_positions: positions before rotary scaling, where some models change their frequencies;
    None where the model has none.
    """

    family: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    positions: int
    window: int | None
    is_tied: bool
    original_positions: int | None = None

    @property
    def checked_window(self) -> int | None:
        """The window that the check must go beyond; None if no checked sequence gets beyond one."""
        if self.window is None or self.window >= self.positions or self.window > LONGEST_CHECKED_WINDOW:
            return None
        return self.window

    @property
    def max_positions(self) -> int:
        """The longest sequence of an export: it ends at the window if the check does not go beyond it."""
        if self.window is not None and self.window > LONGEST_CHECKED_WINDOW:
            return min(self.positions, self.window)
        return self.positions


def read_shape(path: Path, config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model in directory `path`, whose config.json is `config`.

    Known families are read from `config` alone; for others, and for what a config leaves to defaults, transformers is
    asked, as it is for rotary scaling, whose type it may replace. Raises ExportError for a model that is not a
    decoder, is unknown to transformers, keeps a state that cannot be cut back, has rotary scaling that changes with
    the longest text, or has invalid sizes.
    """
    if config.get("is_encoder_decoder"):
        raise ExportError(f"{path} is an encoder-decoder; expected a decoder")
    text = config.get("text_config") or config
    _require_steady_rope(path, text)
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None or any(key not in text for key in family.needs) or _is_scaled(text):
        written, text = text, _with_defaults(path)
        _require_steady_rope(path, text, written)
        _require_keys_and_values(path, text)
    else:
        text = {**family.defaults, **text}
    hidden, heads = _size(path, text, _HIDDEN), _size(path, text, _HEADS)
    positions = _size(path, text, _POSITIONS, ALIBI_POSITIONS)
    original = _original_positions(path, text)
    head_size = text.get("head_dim") or hidden // heads
    return ModelShape(
        family=str(text["model_type"]),
        layers=_size(path, text, _LAYERS),
        hidden_size=hidden,
        heads=heads,
        kv_heads=_size(path, text, _KV_HEADS, heads),
        head_size=_size(path, {"head_dim": head_size}, ("head_dim",)),
        intermediate_size=_feed_forward(path, text, 4 * hidden),
        vocab_size=_size(path, text, ("vocab_size",)),
        positions=positions,
        window=_window(path, text),
        is_tied=bool(text.get("tie_word_embeddings", False)),
        original_positions=original if original is not None and original < positions else None,
    )


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rotary parameters: one for all layers, or one for each kind of layer."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def _rope_kinds(config: Mapping[str, Any]) -> list[str]:
    kinds = (part.get("rope_type", part.get("type")) for part in _ropes(config))
    return [str(kind) for kind in kinds if kind not in (None, "default")]


def _is_scaled(config: Mapping[str, Any]) -> bool:
    return bool(_rope_kinds(config))


def _require_steady_rope(path: Path, config: Mapping[str, Any], written: Mapping[str, Any] | None = None) -> None:
    """Raises ExportError for rotary scaling whose frequencies depend on the longest position of a step.

    In a batch they would depend on other sequences. transformers' rule (`dynamic_rope_update`) is on the type after
    its configuration classes have replaced it: Phi-3's "su" and "yarn" become "longrope". written: config.json as it
    is, where `config` is transformers' reading of it.
    """
    changing = [
        kind
        for kind in _rope_kinds(config)
        if "dynamic" in kind or kind == "longrope" or config.get("model_type") in _MSCALE_FAMILIES
    ]
    if not changing:
        return
    spelled = [kind for kind in _rope_kinds(written or {}) if kind not in changing]
    origin = f" (config.json says {spelled[0]}, which transformers reads as {changing[0]})" if spelled else ""
    original = _original_positions(path, config)
    shorter = f" and max_position_embeddings to {original}" if original else ""
    raise ExportError(
        f"{path} has {changing[0]} rotary scaling{origin}, which changes with the length of the text, so that cached "
        f"and fresh results differ, and so do sequences in one batch; set rope_scaling to null{shorter}, for a "
        "shorter context"
    )


def _original_positions(path: Path, config: Mapping[str, Any]) -> int | None:
    """The smallest positions before rotary scaling that the configuration names; None for none."""
    name = "original_max_position_embeddings"
    parts = [part for part in (*_ropes(config), config) if part.get(name) is not None]
    return min((_size(path, part, (name,)) for part in parts), default=None)


def _require_keys_and_values(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ExportError for layers that keep a running state: a rejected token cannot be taken out of one."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types") or ()
    states = [
        str(kind)
        for kind in (kinds if isinstance(kinds, list | tuple) else ())
        if kind == "linear_attention" or not any(word in str(kind) for word in _STATELESS_LAYERS)
    ]
    if states or config.get(_IS_STATEFUL):
        layers = f" ({states[0]} layers)" if states else ""
        raise ExportError(
            f"{path} is a {config.get('model_type')!r} model, which keeps a running state{layers}: rejected tokens "
            "cannot be taken out of it, so no runtime can speculate with it; choose a model whose layers all keep keys "
            "and values (attention)"
        )


def _with_defaults(path: Path) -> dict[str, Any]:
    """The decoder's configuration as transformers understands it; its aliases under the names that we look for."""
    with quiet_upstream(f"reading the configuration of {path.name}"):
        import transformers
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )

        try:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except ValueError as error:
            raise ExportError(
                f"transformers {transformers.__version__} cannot read the configuration of {path}: {error}. Only "
                "families built into transformers are exported: code that comes with a model is never run"
            ) from None
        if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ExportError(f"{path} is a {config.model_type!r} model, which generates no text; expected a decoder")
        text = config.get_text_config(decoder=True)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        aliases = (*_LAYERS[:1], *_HIDDEN[:1], *_HEADS[:1], *_KV_HEADS[:1], *_FEED_FORWARD[:1], *_POSITIONS[:1])
        found = {name: getattr(text, name, None) for name in (*aliases, "head_dim", "vocab_size")}
        known = {name: value for name, value in found.items() if value is not None}
        return {**text.to_dict(), **known, _IS_STATEFUL: getattr(kind, "_is_stateful", False)}


def _size(path: Path, config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    """The first of `names` that the configuration has with a value other than null."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ExportError(f"{path}: in config.json {name} is {value!r}; expected a positive whole number")
            return value
    if default is None:
        raise ExportError(f"{path}: config.json has no {names[0]}; expected the configuration of a decoder")
    return default


def _feed_forward(path: Path, config: Mapping[str, Any], default: int) -> int:
    """The feed-forward size; the largest where each layer has its own (Gemma 3n)."""
    name = _FEED_FORWARD[0]
    sizes = config.get(name)
    if isinstance(sizes, list) and sizes:
        return max(_size(path, {name: size}, (name,)) for size in sizes)
    return _size(path, config, _FEED_FORWARD, default)


def _window(path: Path, config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types") or config.get("attention_layers") or config.get("attention_types")
    if kinds is not None and not any(word in str(kinds) for word in _WINDOWED_LAYERS):
        return None
    found = [_size(path, config, (name,)) for name in _WINDOWS if config.get(name)]
    return min(found, default=None)
