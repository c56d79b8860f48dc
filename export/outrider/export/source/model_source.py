"""The source of an export: a Hugging Face directory, local or from the hub, looked at without loading its weights.

Refuses what cannot be exported rightly, before any work is done: pickled weights, files that do not belong together
or are not whole, attention that changes with length, weights that are quantized already.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.export.source.config_reader import ModelShape, read_shape
from outrider.export.source.hub import resolve_model
from outrider.export.source.weight_files import check_weights, find_weight_files
from outrider.models.bundle import hash_file
from outrider.models.errors import ExportError
from outrider.models.manifest import Architecture, Source
from outrider.models.tokenizer import Tokenizer


def _reference_root() -> Path | None:
    spec = importlib.util.find_spec("outrider.reference")
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None


REFERENCE_ROOT: Final = _reference_root()
"""Where the reference pair is; None where the distribution outrider-reference is not installed."""

_CHANGING_ROPE: Final = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A directory that can be exported. weight_files are its safetensors, sorted; config is config.json.

    window: the sliding window that the check must go beyond, None for none. notes: what the user should know of how
    the model will be exported, a sentence each.
    """

    path: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    tokenizer: Tokenizer
    architecture: Architecture
    window: int | None = None
    notes: tuple[str, ...] = ()

    def describe(self) -> Source:
        """Name, revision and the hash of configuration and weights; reads every byte of the weights."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in self.weight_files:
            digest.update(f"\n{path.name} {hash_file(path)}".encode())
        return Source(name=self.name, revision=self.revision, weights_sha256=digest.hexdigest())

    @property
    def runtime_config(self) -> dict[str, Any]:
        """config.json for a runtime that reads nothing from it but the longest sequence: under the usual name."""
        longest = {"max_position_embeddings": self.architecture.max_positions}
        if "text_config" in self.config:
            longest = {"text_config": self.config["text_config"] | longest}
        return self.config | longest


def read_source(model: str | Path, revision: str | None = None) -> SourceModel:
    """Looks at a model: a directory, or a hub id, which is downloaded into the hub's cache.

    revision: of a hub id. Raises ExportError or TokenizerError saying what is wrong with it.
    """
    path = resolve_model(model, revision)
    config = _read_config(path)
    _check_config(path, config)
    weight_files = find_weight_files(path)
    shape = read_shape(path, config)
    name, commit = _name(path)
    tokenizer = Tokenizer.from_dir(path, name=name)
    if tokenizer.size > shape.vocab_size:
        raise ExportError(
            f"{path}: the tokenizer has {tokenizer.size} ids, the model only {shape.vocab_size}; these files do "
            "not belong together"
        )
    parameters = check_weights(path, weight_files, shape, config)
    return SourceModel(
        path,
        name,
        commit,
        config,
        weight_files,
        tokenizer,
        _architecture(shape, tokenizer.size, parameters),
        shape.checked_window,
        _notes(shape),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{path} has no config.json; expected a Hugging Face model directory") from None
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ExportError(f"{path / 'config.json'} holds no object; expected a model's configuration")
    if config.get("text_config") is None:  # null is the same as none
        config.pop("text_config", None)
    _require_object(path, config, "text_config")
    return config


def _require_object(path: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object of that name, empty where there is none or null."""
    found = config.get(name)
    if found is not None and not isinstance(found, dict):
        raise ExportError(f"{path}: config.json says {name} is {found!r}; expected an object or null")
    return found or {}


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    if (path / "adapter_config.json").is_file():
        raise ExportError(
            f"{path} has an adapter (adapter_config.json), which changes the model when it is run; expected one whole "
            "model: merge the two first (in peft: merge_and_unload, then save_pretrained)"
        )
    text = config.get("text_config") or config
    if config.get("quantization_config") or text.get("quantization_config"):
        raise ExportError(f"{path} is quantized already; export the original model, in FP32, FP16 or BF16")
    rope = _require_object(path, text, "rope_scaling") or _require_object(path, text, "rope_parameters")
    # One for all layers, or one for each kind of layer.
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = part.get("rope_type", part.get("type"))
        if kind in _CHANGING_ROPE:
            raise ExportError(
                f"{path} has {kind} rotary scaling, which changes with the length of the text and would make "
                "cached and fresh results differ; set rope_scaling to null (shorter context) or to yarn"
            )


def _name(path: Path) -> tuple[str, str | None]:
    """The directory's name; in a hub cache, the model's id and the commit."""
    if path.parent == REFERENCE_ROOT:
        return f"outrider-reference-{path.name}", None
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/"), path.name
    return path.name, None


def _architecture(shape: ModelShape, tokenizer_size: int, parameters: int) -> Architecture:
    return Architecture(
        name=shape.family,
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tokenizer_size=tokenizer_size,
        max_positions=shape.max_positions,
        parameters=parameters,
    )


def _notes(shape: ModelShape) -> tuple[str, ...]:
    if shape.max_positions == shape.positions:
        return ()
    return (
        f"sequences end at {shape.max_positions:,} tokens of the model's {shape.positions:,}: its sliding window is "
        "longer than the check goes beyond",
    )
