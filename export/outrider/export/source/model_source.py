"""Reads the source of an export, a Hugging Face directory or hub id, without loading its weights.

Refuses before any work what cannot be exported correctly: pickled weights, incomplete files or files that do not belong
together, token ids outside the vocabulary, weights that are quantized already, and what `read_shape` refuses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.export.source.config_reader import ModelShape, read_shape
from outrider.export.source.hub import resolve_model
from outrider.export.source.weight_files import check_weights, find_weight_files
from outrider.models.bundle.bundle import hash_file
from outrider.models.bundle.manifest import Architecture, Source
from outrider.models.errors import ExportError
from outrider.models.text.tokenizer import SHARED_FILES, Tokenizer, own_file


def _reference_root() -> Path | None:
    spec = importlib.util.find_spec("outrider.reference")
    return Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None


REFERENCE_ROOT: Final = _reference_root()
"""Where the reference pair is; None where the distribution outrider-reference is not installed."""

TEXT_FILES: Final = (
    *SHARED_FILES,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Configuration and tokenizer: what is copied of a model besides its weights."""
_TOKEN_IDS: Final = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A directory that can be exported. weight_files are its safetensors, sorted.

    config: config.json, in a form that transformers reads. shape: what that says of the decoder.
    """

    path: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    tokenizer: Tokenizer
    architecture: Architecture
    shape: ModelShape

    def describe(self) -> Source:
        """Name, revision and the hash of configuration and weights; reads every byte of the weights."""
        return _describe(self.name, self.revision, self.config, self.weight_files)

    @property
    def runtime_config(self) -> dict[str, Any]:
        """config.json with the longest sequence under its usual name, for runtimes that read nothing else from it."""
        longest = {"max_position_embeddings": self.architecture.max_positions}
        if "text_config" in self.config:
            longest = {"text_config": self.config["text_config"] | longest}
        return self.config | longest


def read_source(model: str | Path, max_positions: int | None = None) -> SourceModel:
    """Reads a model directory, or a hub id, which is downloaded into the hub's cache.

    max_positions: the longest sequence that its export shall have; None for the model's. Raises
    ExportError or TokenizerError.
    """
    path = resolve_model(model)
    _check_files(path)
    config = read_config(path)
    _check_config(path, config)
    token_ids = _read_token_ids(path, config)
    weight_files = find_weight_files(path)
    shape = read_shape(path, config, max_positions)
    name, commit = _name(path)
    tokenizer = Tokenizer.from_dir(path, name=name, limit=shape.vocab_size)
    if tokenizer.size > shape.vocab_size:
        raise ExportError(
            f"{path}: the tokenizer has {tokenizer.size} ids, the model only {shape.vocab_size}: they do not "
            "belong together; get both from one place"
        )
    for place, token in token_ids.items():
        if token >= shape.vocab_size:
            raise ExportError(
                f"{path}: {place} is {token}, outside the model's vocabulary of {shape.vocab_size}; expected 0 to "
                f"{shape.vocab_size - 1}: correct the file"
            )
    architecture = Architecture(
        name=shape.family,
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tokenizer_size=tokenizer.size,
        max_positions=shape.max_positions,
        parameters=check_weights(path, weight_files, shape, config),
    )
    return SourceModel(path, name, commit, config, weight_files, tokenizer, architecture, shape)


def identify(model: str | Path) -> tuple[Source, str]:
    """What `read_source` finds, described, and its tokenizer's fingerprint. Loads no model library: that takes seconds.

    Raises ExportError or TokenizerError, but not for all that `read_source` refuses.
    """
    path = resolve_model(model)
    _check_files(path)
    name, commit = _name(path)
    described = _describe(name, commit, read_config(path), find_weight_files(path))
    return described, Tokenizer.from_dir(path, name=name).fingerprint


def _describe(name: str, revision: str | None, config: Mapping[str, Any], weight_files: Iterable[Path]) -> Source:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in weight_files:
        digest.update(f"\n{path.name} {hash_file(path)}".encode())
    return Source(name=name, revision=revision, weights_sha256=digest.hexdigest())


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory, in a form that transformers reads. Raises ExportError."""
    try:
        config = _read_json_object(path / "config.json")
    except FileNotFoundError:
        raise ExportError(f"{path} has no config.json; expected a Hugging Face model directory") from None
    if config.get("text_config") is None:  # null is the same as none
        config.pop("text_config", None)
    _require_object(path, config, "text_config")
    # transformers reads Phi-3's "su" as longrope, but its check misses the original length where it is not inside.
    original, rope = config.get("original_max_position_embeddings"), config.get("rope_scaling")
    if original is not None and isinstance(rope, dict) and "su" in (rope.get("type"), rope.get("rope_type")):
        config["rope_scaling"] = {"original_max_position_embeddings": original} | rope
    return config


def _read_json_object(path: Path) -> dict[str, Any]:
    """A configuration file. Raises FileNotFoundError, and ExportError for what is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ExportError(f"{path} holds no JSON object; expected a model's configuration")
    return found


def _require_object(path: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object of that name, empty where there is none or null."""
    found = config.get(name)
    if found is not None and not isinstance(found, dict):
        raise ExportError(f"{path}: in config.json {name} is {found!r}; expected an object or null")
    return found or {}


def _check_files(path: Path) -> None:
    if (path / "adapter_config.json").is_file():
        raise ExportError(
            f"{path} has an adapter (adapter_config.json); expected one whole model: merge the two first (in peft: "
            "merge_and_unload, then save_pretrained)"
        )
    for file in TEXT_FILES:
        if (path / file).is_file() and own_file(path, file) is None:
            raise ExportError(f"{path}: {file} is a link that leads out of the model's directory; copy the file there")


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    text = config.get("text_config") or config
    if config.get("quantization_config") or text.get("quantization_config"):
        raise ExportError(f"{path} is quantized already; export the original model in FP32, FP16 or BF16")
    for name in ("rope_scaling", "rope_parameters"):
        _require_object(path, text, name)


def _read_token_ids(path: Path, config: Mapping[str, Any]) -> dict[str, int]:
    """The special tokens' ids by where they are written; raises ExportError for what is no id."""
    places: dict[str, Mapping[str, Any]] = {
        "config.json": config,
        "text_config of config.json": config.get("text_config", {}),
    }
    if (path / "generation_config.json").is_file():
        places["generation_config.json"] = _read_json_object(path / "generation_config.json")
    found: dict[str, int] = {}
    for place, fields in places.items():
        for name in _TOKEN_IDS:
            value = fields.get(name)
            for index, token in enumerate(value if isinstance(value, list) else [value]):
                # -1 is an old way to write that there is no padding.
                if token is None or (name == "pad_token_id" and token == -1):
                    continue
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise ExportError(f"{path}: in {place} {name} is {value!r}; expected token ids or null")
                found[f"{place} {name}[{index}]" if isinstance(value, list) else f"{place} {name}"] = token
    return found


def _name(path: Path) -> tuple[str, str | None]:
    """The directory's name; in a hub cache, the model's id and the commit."""
    if path.parent == REFERENCE_ROOT:
        return f"outrider-reference-{path.name}", None
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/"), path.name
    return path.name, None
