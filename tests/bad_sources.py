"""Damages model directories and bundles, each in a way whose error message is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save_file
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

Damage = Callable[[Path], object]
WEIGHTS: Final = "model.safetensors"


def make_sources(root: Path) -> None:
    """A Qwen2-type draft and a Llama-type target with one tokenizer."""
    for role, family in (("draft", "qwen2"), ("target", "llama")):
        make_tiny_tokenizer(root / role)
        make_tiny_model(family, root / role, vocab_size=320)


def cut(name: str, keep: float) -> Damage:
    """Keeps that share of a file; for 1, all but a byte."""

    def damage(directory: Path) -> None:
        path = next(directory.glob(name))
        content = path.read_bytes()
        path.write_bytes(content[: min(int(len(content) * keep), len(content) - 1)])

    return damage


def config(**changes: Any) -> Damage:
    """Writes other values to config.json."""

    def damage(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def weight(value: float) -> Damage:
    """Sets one weight."""

    def damage(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        changed = {name: np.array(tensor) for name, tensor in tensors.items()}
        changed["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        save_file(changed, directory / WEIGHTS, metadata={"format": "pt"})

    return damage


def without(name: str) -> Damage:
    """Removes a tensor."""

    def damage(directory: Path) -> None:
        tensors = {key: np.array(tensor) for key, tensor in load_file(directory / WEIGHTS).items() if key != name}
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    return damage


def other_tokenizer(directory: Path) -> None:
    """Replaces the tokenizer by one that was trained on other text."""
    make_tiny_tokenizer(directory, text=("something else entirely", "with other merges"))


def write(name: str, content: str) -> Damage:
    """Writes a file."""
    return lambda directory: (directory / name).write_text(content)


def pickled(directory: Path) -> None:
    """Names the weights as old checkpoints do."""
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


_TRUNCATED: Final = "truncated.*download it again"
_LYING: Final = "config.json.*belong together"
DAMAGED_SOURCES: Final[dict[str, tuple[Any, ...]]] = {
    "weights cut in the header": (cut(WEIGHTS, 0.001), _TRUNCATED),
    "weights cut in the middle": (cut(WEIGHTS, 0.5), _TRUNCATED),
    "weights without their last byte": (cut(WEIGHTS, 1), _TRUNCATED),
    "weights empty": (cut(WEIGHTS, 0), _TRUNCATED),
    "weights pickled": (pickled, "execute code on load"),
    "weights with a NaN": (weight(float("nan")), "not finite"),
    "a weight that FP16 cannot hold": (
        weight(1e5), "up_proj.*100000, beyond the 65504",
        "--device", "gpu", "--runtime", "openvino", "--precision", "fp16",
    ),
    "config: one layer more": (config(num_hidden_layers=3), _LYING),
    "config: one layer less": (config(num_hidden_layers=1), _LYING),
    "config: another width": (config(hidden_size=128), _LYING),
    "config: another feed-forward width": (config(intermediate_size=96), _LYING),
    "config: a larger vocabulary": (config(vocab_size=384), _LYING),
    "config: other key/value heads": (config(num_key_value_heads=4), _LYING),
    "config: another family": (config(model_type="llama", architectures=["LlamaForCausalLM"]), "no place for.*bias"),
    "a tensor missing": (without("model.layers.1.mlp.up_proj.weight"), "lack the tensor model.layers.1.mlp.up_proj"),
    "config: not JSON": (write("config.json", "{"), "not JSON"),
    "tokenizer: not JSON": (write("tokenizer.json", "{"), "tokenizer.json"),
    "tokenizer: missing": (lambda directory: (directory / "tokenizer.json").unlink(), "tokenizer.json"),
    "tokenizer: another than the target's": (other_tokenizer, "draft|damaged.*first difference", "pair"),
}  # fmt: skip
"""By name: the damage, what the message must match, options of the command ("pair": export with the target)."""


def flip(pattern: str) -> Damage:
    """Changes one bit of the largest file of that name."""

    def damage(directory: Path) -> None:
        path = max(directory.glob(pattern), key=lambda found: found.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))

    return damage


def manifest(**changes: Any) -> Damage:
    """Writes other values to the manifest."""

    def damage(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


_MODEL: Final = "*[!n]"  # model files end in bin, xml or safetensors; JSON ends in n
DAMAGED_BUNDLES: Final[dict[str, tuple[Damage, str]]] = {
    "one bit of the weights": (flip(_MODEL), "is altered: its SHA-256"),
    "one bit of the tokenizer": (flip("tokenizer.json"), "tokenizer.json is altered"),
    "weights cut": (cut(_MODEL, 0.5), "is truncated"),
    "tokenizer missing": (lambda directory: (directory / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "code put in": (write("modeling.py", "print('hello')"), "could execute code"),
    "a stranger's file": (write("chat_template.jinja", "{{ evil }}"), "not in the manifest"),
    "manifest of another schema": (manifest(schema_version=99), "schema version 99"),
    "manifest cut": (cut("manifest.json", 0.5), "cannot be read as JSON"),
    "manifest without files": (manifest(files=[]), "manifest"),
    "manifest with another tokenizer": (manifest(tokenizer_fingerprint="0" * 64), "fingerprint|manifest"),
}
"""By name: the damage, and what the message must match."""
