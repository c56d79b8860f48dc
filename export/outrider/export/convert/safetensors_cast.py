"""Copies or casts a Hugging Face directory's weights for the torch runtime, one shard at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from outrider.export.quiet import quiet_upstream
from outrider.export.source.weight_files import DTYPES, read_safetensors_header


def cast_weights(weight_files: Sequence[Path], destination: Path, precision: str) -> None:
    """Writes each file to `destination`, floating-point tensors in `precision`, and the index if there are several.

    Holds one shard in memory; a file that has this precision is copied.
    """
    dtype, torch_name = DTYPES[precision]
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for path in weight_files:
        header = read_safetensors_header(path)
        target = destination / path.name
        if {tensor["dtype"] for tensor in header.values()} == {dtype}:
            shutil.copyfile(path, target)
        else:
            _cast_file(path, target, torch_name)
        weight_map |= dict.fromkeys(header, path.name)
        num_bytes += target.stat().st_size
    if len(weight_files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (destination / "model.safetensors.index.json").write_text(text, encoding="utf-8", newline="\n")


def _cast_file(path: Path, target: Path, torch_name: str) -> None:
    with quiet_upstream(f"casting {path.name}"):
        import torch
        from safetensors.torch import load_file, save_file

        dtype = getattr(torch, torch_name)
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in load_file(path).items()
        }
        save_file(tensors, target, metadata={"format": "pt"})


def config_for(config: dict[str, object], precision: str) -> dict[str, object]:
    """config.json with the precision of the cast weights."""
    kept = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return kept | {"dtype": DTYPES[precision][1]}
