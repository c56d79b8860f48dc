"""The source of an export: a local Hugging Face directory, looked at without loading its weights.

Refuses what cannot be exported rightly, before any work is done: pickled weights, other architectures,
attention that changes with length, weights that are quantized already.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import outrider.models
from outrider.models.bundle import hash_file
from outrider.models.errors import ExportError
from outrider.models.manifest import Architecture, Source
from outrider.models.tokenizer import Tokenizer

FAMILIES: Final = ("llama", "qwen2", "qwen3")
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
REFERENCE_ROOT: Final = Path(next(iter(outrider.models.__path__))).resolve() / "reference"
"""Where the bundled pair's model directories, `draft` and `target`, are."""

_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A directory that can be exported. weight_files are its safetensors, sorted; config is config.json."""

    path: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    tokenizer: Tokenizer
    architecture: Architecture

    def describe(self) -> Source:
        """Name, revision and the hash of configuration and weights; reads every byte of the weights."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in self.weight_files:
            digest.update(f"\n{path.name} {hash_file(path)}".encode())
        return Source(name=self.name, revision=self.revision, weights_sha256=digest.hexdigest())


def read_source(model: str | Path) -> SourceModel:
    """Looks at a model directory. Raises ExportError or TokenizerError saying what is wrong with it."""
    path = _local_directory(model)
    config = _read_config(path)
    _check_config(path, config)
    weight_files = _weight_files(path)
    name, revision = _name(path)
    tokenizer = Tokenizer.from_dir(path, name=name)
    architecture = _architecture(path, config, weight_files, tokenizer.size)
    return SourceModel(path, name, revision, config, weight_files, tokenizer, architecture)


def _local_directory(model: str | Path) -> Path:
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) and not path.parent.is_dir():
        raise ExportError(
            f"{model} is not a local directory and looks like a hub id; download it first: "
            f"hf download {model} --local-dir {path.name}, then export {path.name}"
        )
    raise ExportError(f"{model} is not a directory; expected a local Hugging Face model directory")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{path} has no config.json; expected a Hugging Face model directory") from None
    except ValueError as error:
        raise ExportError(f"{path / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ExportError(f"{path / 'config.json'} holds no object; expected a model's configuration")
    return config


def _check_config(path: Path, config: dict[str, Any]) -> None:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ExportError(f"{path} is a {family!r} model; supported are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ExportError(f"{path} is quantized already; export the original model, in FP32, FP16 or BF16")
    if config.get("use_sliding_window"):
        raise ExportError(f"{path} uses sliding-window attention, which the paged runtimes do not do")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("dynamic", "longrope"):
        raise ExportError(
            f"{path} has {kind} rotary scaling, which changes with the length of the text and would make "
            "cached and fresh results differ; set rope_scaling to null (shorter context) or to yarn"
        )


def _weight_files(path: Path) -> tuple[Path, ...]:
    found = tuple(sorted(path.glob("*.safetensors")))
    index = path / _INDEX
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in wanted if not (path / name).is_file()]
        if missing:
            raise ExportError(f"{path} lacks {missing[0]}, which {_INDEX} names; download the model again")
        return tuple(path / name for name in wanted)
    if found:
        return found
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ExportError(
            f"{path} has only pickled weights ({pickles[0]}), which execute code on load; get the model's "
            "safetensors, or convert it yourself where you trust it: save_pretrained(safe_serialization=True)"
        )
    raise ExportError(f"{path} has no *.safetensors; expected the model's weights")


def _name(path: Path) -> tuple[str, str | None]:
    """The directory's name; in a hub cache, the model's id and the commit."""
    if path.parent == REFERENCE_ROOT:
        return f"outrider-reference-{path.name}", None
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/"), path.name
    return path.name, None


def _architecture(
    path: Path, config: dict[str, Any], weight_files: tuple[Path, ...], tokenizer_size: int
) -> Architecture:
    heads = config["num_attention_heads"]
    vocab_size = config["vocab_size"]
    if tokenizer_size > vocab_size:
        raise ExportError(
            f"{path}: the tokenizer has {tokenizer_size} ids, the model only {vocab_size}; these files do "
            "not belong together"
        )
    return Architecture(
        name=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=vocab_size,
        tokenizer_size=tokenizer_size,
        max_positions=config["max_position_embeddings"],
        parameters=_count_parameters(weight_files, is_tied=bool(config.get("tie_word_embeddings"))),
    )


def _count_parameters(weight_files: tuple[Path, ...], *, is_tied: bool) -> int:
    count = 0
    for path in weight_files:
        for name, tensor in read_safetensors_header(path).items():
            if not (is_tied and name == "lm_head.weight"):
                count += math.prod(tensor["shape"])
    return count


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """Tensor name to its dtype, shape and place. Raises ExportError if the file is not safetensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(path.stat().st_size, 100 << 20):
            raise ExportError(f"{path} is not a safetensors file, or is truncated; download it again")
        try:
            header = json.loads(file.read(size))
        except ValueError:
            raise ExportError(f"{path} is not a safetensors file, or is truncated; download it again") from None
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
