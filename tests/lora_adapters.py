"""Writes small LoRA adapters as PEFT does, without PEFT, and merges them into a model's weights."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"


def save_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Float32 tensors in the format's bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header).encode()
    body = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def shapes_of(bundle: Path) -> dict[str, tuple[int, int]]:
    """The shapes [out, in] of the linear layers in a directory of safetensors, by name."""
    found: dict[str, tuple[int, int]] = {}
    for file in bundle.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        found |= {name: tuple(entry["shape"]) for name, entry in header.items() if name.endswith("_proj.weight")}
    return {name.removesuffix(".weight"): shape for name, shape in found.items()}


def write_adapter(
    path: Path,
    layers: Mapping[str, tuple[int, int]],
    targets: Sequence[str],
    *,
    rank: int,
    alpha: float,
    seed: int,
    scale: float = 0.05,
    **config: Any,
) -> Path:
    """An adapter of random factors, so large that it changes texts; returns its directory.

    layers: shapes [out, in] of the model's linear layers, by name. targets: the last parts of names that are adapted.
    config: other fields of PEFT's, such as rank_pattern and use_rslora.
    """
    rng, tensors = np.random.default_rng(seed), dict[str, NDArray[np.float32]]()
    for layer, (num_out, num_in) in layers.items():
        if layer.rpartition(".")[2] in targets:
            own = _match(config.get("rank_pattern", {}), layer, rank)
            for kind, shape in (("A", (own, num_in)), ("B", (num_out, own))):
                factor = scale * rng.standard_normal(shape)
                tensors[f"base_model.model.{layer}.lora_{kind}.weight"] = factor.astype(np.float32)
    path.mkdir(parents=True, exist_ok=True)
    save_safetensors(path / WEIGHTS_NAME, tensors)
    known = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": alpha}
    (path / CONFIG_NAME).write_text(json.dumps(known | {"target_modules": list(targets)} | config))
    return path


def merge_adapter(model: Any, path: Path) -> None:
    """Adds an adapter's products to the weights of a torch model, as PEFT's documentation says they scale."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((path / CONFIG_NAME).read_text())
    tensors, weights = load_file(path / WEIGHTS_NAME), dict(model.named_parameters())
    with torch.no_grad():
        for name, factor in tensors.items():
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if layer != name.removeprefix("base_model.model."):
                rank = _match(config.get("rank_pattern", {}), layer, config["r"])
                alpha = _match(config.get("alpha_pattern", {}), layer, config["lora_alpha"])
                divisor = math.sqrt(rank) if config.get("use_rslora") else rank
                other = tensors[name.replace("lora_A", "lora_B")]
                weights[f"{layer}.weight"] += alpha / divisor * (other @ factor)


def _match(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), default)
