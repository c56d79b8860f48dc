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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes.

    family: its model_type. positions: its longest sequence. window: positions that its windowed layers attend, the
    present one included; None where every layer attends everything. is_tied: whether input and output embeddings
    are one tensor.
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
    asked. Raises ExportError for a model that is not a decoder, is unknown to transformers, or has invalid sizes.
    """
    if config.get("is_encoder_decoder"):
        raise ExportError(f"{path} is an encoder-decoder; expected a decoder")
    text = config.get("text_config") or config
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None or any(key not in text for key in family.needs):
        text = _with_defaults(path)
    else:
        text = {**family.defaults, **text}
    hidden, heads = _size(path, text, _HIDDEN), _size(path, text, _HEADS)
    head_size = text.get("head_dim") or hidden // heads
    return ModelShape(
        family=str(text["model_type"]),
        layers=_size(path, text, _LAYERS),
        hidden_size=hidden,
        heads=heads,
        kv_heads=_size(path, text, _KV_HEADS, heads),
        head_size=_size(path, {"head_dim": head_size}, ("head_dim",)),
        intermediate_size=_size(path, text, _FEED_FORWARD, 4 * hidden),
        vocab_size=_size(path, text, ("vocab_size",)),
        positions=_size(path, text, _POSITIONS, ALIBI_POSITIONS),
        window=_window(path, text),
        is_tied=bool(text.get("tie_word_embeddings", False)),
    )


def _with_defaults(path: Path) -> dict[str, Any]:
    """The decoder's configuration as transformers understands it; its aliases under the names that we look for."""
    with quiet_upstream(f"reading the configuration of {path.name}"):
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
        aliases = (*_LAYERS[:1], *_HIDDEN[:1], *_HEADS[:1], *_KV_HEADS[:1], *_FEED_FORWARD[:1], *_POSITIONS[:1])
        found = {name: getattr(text, name, None) for name in (*aliases, "head_dim", "vocab_size")}
        return {**text.to_dict(), **{name: value for name, value in found.items() if value is not None}}


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


def _window(path: Path, config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types") or config.get("attention_layers") or config.get("attention_types")
    if kinds is not None and not any(word in str(kinds) for word in _WINDOWED_LAYERS):
        return None
    found = [_size(path, config, (name,)) for name in _WINDOWS if config.get(name)]
    return min(found, default=None)
