"""Reads a model's shape from its configuration as transformers instantiates it, whatever names its family uses.

config.json alone does not tell: what it leaves out has a default of the family, and keys that a family does not know
(another family's window, say) have no effect. Knows no files.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream
from outrider.export.source.family_facts import MORE_THAN_TEXT
from outrider.models.errors import ExportError

LONGEST_CHECKED: Final = 1024
"""Windows and original lengths up to this are checked with real sequences; sequences end at a longer window."""

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
_SIZES: Final = (*_LAYERS, *_HIDDEN, *_HEADS, *_KV_HEADS, *_POSITIONS, "vocab_size", "head_dim")
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
_MAX_LAYERS: Final = 10_000
"""Configurations list something for each layer: a mistyped number must not fill the memory."""

_IS_STATEFUL: Final = "outrider_is_stateful"
"""Key for transformers' own mark of models whose cache cannot be cut back; added to its reading of a configuration."""

_MSCALE_FAMILIES: Final = ("phimoe",)
"""Families whose every rotary scaling depends on the longest position of a step, whatever its type."""
_ORIGINAL: Final = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes.

    family: its model_type. positions: its longest sequence. longest: the longest that an export shall have; None for
    the model's. window: positions that its windowed layers attend, the present one included; None where every layer
    attends everything. windows: all that its configuration names, in use or not. is_tied: whether input and output
    embeddings are one tensor. original_positions: all positions before rotary scaling that the configuration names,
    where some models change their frequencies. facts: the decoder's configuration as transformers understands it,
    without keys that the family does not know; everything is decided by it.
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
    windows: tuple[int, ...] = ()
    original_positions: tuple[int, ...] = ()
    longest: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def checked_windows(self) -> tuple[int, ...]:
        """The windows that the check must go beyond, as sequences get there."""
        return tuple(window for window in self.windows if window < self.max_positions and window <= LONGEST_CHECKED)

    @property
    def crossed_originals(self) -> tuple[int, ...]:
        """The original lengths that sequences cross."""
        return tuple(original for original in self.original_positions if original < self.max_positions)

    @property
    def max_positions(self) -> int:
        """The longest sequence of an export: it ends at the window in use if the check does not go beyond that."""
        ends = [self.positions, self.longest or self.positions]
        if self.window is not None and self.window > LONGEST_CHECKED:
            ends.append(self.window)
        return min(ends)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about an export, a sentence each."""
        if self.max_positions == self.positions:
            return ()
        is_asked = self.max_positions == self.longest
        why = "as asked for" if is_asked else "its sliding window is longer than the check can test"
        return (f"sequences end at {self.max_positions:,} tokens of the model's {self.positions:,}: {why}",)


def read_shape(path: Path, config: Mapping[str, Any], longest: int | None = None) -> ModelShape:
    """The shape of the model in directory `path`, whose config.json is `config`.

    longest: the longest sequence that an export shall have; None for the model's. Raises ExportError for a model that
    is not a decoder, is unknown to transformers, keeps a state that cannot be cut back, has rotary scaling that changes
    with the longest text within `longest`, or has invalid sizes.
    """
    if config.get("is_encoder_decoder"):
        raise ExportError(f"{path} is an encoder-decoder; expected a decoder")
    written = config.get("text_config") or config
    for name in _SIZES:
        if written.get(name) is not None:
            _size(path, written, (name,))
    for name, found in ((name, part.get(name)) for part in _nested(config) for name in _LAYERS):
        if isinstance(found, int) and found > _MAX_LAYERS:
            raise ExportError(f"{path}: in config.json {name} is beyond {_MAX_LAYERS:,}; expected a number of layers")
    facts = _read_facts(path, config)
    _require_keys_and_values(path, facts)
    hidden, heads = _size(path, facts, _HIDDEN), _size(path, facts, _HEADS)
    # Bloom's configuration has no positions, but the files of some say what it was trained on.
    positions = _size(path, facts, _POSITIONS, _size(path, written, ("seq_length",), ALIBI_POSITIONS))
    if longest is not None and longest > positions:
        raise ExportError(
            f"{path} takes {positions:,} tokens, --max-positions is {longest:,}; give at most {positions}"
        )
    _require_steady_rope(path, facts, written, min(positions, longest or positions))
    head_size = facts.get("head_dim") or hidden // heads
    window = _window(path, facts)
    named = [written[name] for name in _WINDOWS if _is_length(written.get(name))]
    return ModelShape(
        family=str(facts["model_type"]),
        layers=_size(path, facts, _LAYERS),
        hidden_size=hidden,
        heads=heads,
        kv_heads=_size(path, facts, _KV_HEADS, heads),
        head_size=_size(path, {"head_dim": head_size}, ("head_dim",)),
        intermediate_size=_feed_forward(path, facts, 4 * hidden),
        vocab_size=_size(path, facts, ("vocab_size",)),
        positions=positions,
        window=window,
        is_tied=bool(facts.get("tie_word_embeddings", False)),
        windows=tuple(sorted({*named, *([] if window is None else [window])})),
        original_positions=tuple(sorted({*_originals(path, facts), *_originals(path, written)})),
        longest=longest,
        facts=facts,
    )


def _nested(config: Any) -> Iterator[Mapping[str, Any]]:
    """The object and all inside it: of a model with several parts each has layers."""
    waiting = [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rotary parameters: one for all layers, or one for each kind of layer."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def _rope_kinds(config: Mapping[str, Any]) -> list[str]:
    kinds = (part.get("rope_type", part.get("type")) for part in _ropes(config))
    return [str(kind) for kind in kinds if kind not in (None, "default")]


def _require_steady_rope(path: Path, facts: Mapping[str, Any], written: Mapping[str, Any], longest: int) -> None:
    """Raises ExportError for rotary scaling whose frequencies change within `longest` positions.

    They would depend on the longest position of a step, so on other sequences of a batch. transformers' rule
    (`dynamic_rope_update`) is on the type after its configuration classes have replaced it: Phi-3's "su" and "yarn"
    become "longrope". That changes beyond the original length, "dynamic" beyond the model's positions only.
    """
    kinds = _rope_kinds(facts)
    changing = [kind for kind in kinds if kind == "longrope" or facts.get("model_type") in _MSCALE_FAMILIES]
    original = min(_originals(path, facts), default=None)
    if not changing or (original is not None and longest <= original):
        return
    spelled = [kind for kind in _rope_kinds(written) if kind not in changing]
    origin = f" (config.json says {spelled[0]}, which transformers reads as {changing[0]})" if spelled else ""
    advice = f": --max-positions {original} exports it for texts up to that length" if original else ""
    beyond = f" beyond the original length of {original:,}" if original else ""
    raise ExportError(
        f"{path} has {changing[0]} rotary scaling{origin}, which changes for texts{beyond}, so that cached and fresh "
        f"results differ, and so do sequences in one batch{advice}"
    )


def _originals(path: Path, config: Mapping[str, Any]) -> Iterator[int]:
    """The positions before rotary scaling that the configuration names."""
    for part in (*_ropes(config), config):
        if part.get(_ORIGINAL) is not None:
            yield _size(path, part, (_ORIGINAL,))


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


def _read_facts(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's configuration as transformers understands it; its aliases under the names that we look for."""
    with quiet_upstream(f"reading the configuration of {path.name}"):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        )

        family = str(config.get("model_type"))
        if family in CONFIG_MAPPING_NAMES and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            kind = "an encoder" if family in MODEL_FOR_MASKED_LM_MAPPING_NAMES else "no language model"
            raise ExportError(f"{path} is a {family!r} model, {kind}: it generates no text; expected a decoder")
        found = instantiate(path, config)
        text = found.get_text_config(decoder=True)
        own = {part.name for part in dataclasses.fields(type(text))}
        aliases = (*_LAYERS[:1], *_HIDDEN[:1], *_HEADS[:1], *_KV_HEADS[:1], *_FEED_FORWARD[:1], *_POSITIONS[:1])
        names = [
            name
            for name in (*aliases, "head_dim", "vocab_size")
            if name in text.attribute_map or hasattr(type(text), name)
        ]
        facts = {name: getattr(text, name, None) for name in (*sorted(own), *names)}
        is_stateful = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(found)], "_is_stateful", False)
        known = {name: value for name, value in facts.items() if value is not None}
        marks = {_IS_STATEFUL: is_stateful, MORE_THAN_TEXT: text is not found}
        return known | marks | {"model_type": text.model_type}


def instantiate(path: Path, config: Mapping[str, Any]) -> Any:
    """transformers' configuration object of a model in directory `path` whose config.json is `config`.

    Raises ExportError for a family that is not built into transformers: code that comes with a model is never run.
    """
    with quiet_upstream(f"reading the configuration of {path.name}"):
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        family, version = config.get("model_type"), transformers.__version__
        if not isinstance(family, str) or family not in CONFIG_MAPPING:
            code = ", and the code that comes with it (auto_map in config.json) is never run" * ("auto_map" in config)
            raise ExportError(
                f"{path} is a {family!r} model (model_type in config.json), which transformers {version} does not have "
                f"built in{code}; choose a model of a family that it has"
            )
        kept = {name: value for name, value in config.items() if name != "auto_map"}
        with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
            Path(directory, "config.json").write_text(json.dumps(kept), encoding="utf-8")
            try:
                found = transformers.AutoConfig.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
            except ImportError:
                raise  # a package is missing, and the configuration may be right
            except Exception as error:
                reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                raise ExportError(
                    f"{path}: transformers cannot read config.json ({reason[0].strip()}): its values do not belong "
                    "together; get it again from where the model comes from"
                ) from error
        found.name_or_path = str(path)
        return found


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
    """The smallest window in use; None where every layer attends everything."""
    if config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types") or config.get("attention_layers") or config.get("attention_types")
    if kinds is not None and not any(word in str(kinds) for word in _WINDOWED_LAYERS):
        return None
    found = [_size(path, config, (name,)) for name in _WINDOWS if config.get(name)]
    return min(found, default=None)
