"""Checks a model's weight files: complete, safe to open, with the shapes of config.json, in a precision's range.

By their headers, a few kilobytes per file; the range alone reads every tensor. Knows nothing of what the tensors
compute.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream
from outrider.export.source.config_reader import ModelShape
from outrider.export.source.family_facts import FAMILIES, SHAPES
from outrider.models.bundle.manifest import Precision
from outrider.models.errors import ExportError

DTYPES: Final = {"fp32": ("F32", "float32"), "fp16": ("F16", "float16"), "bf16": ("BF16", "bfloat16")}
"""By precision: the dtype's name in safetensors and in torch."""

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER_BYTES: Final = 100 << 20
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_HEADS: Final = ("lm_head.weight", "embed_out.weight")
# For unknown families only what is the same in all of them.
_UNIVERSAL: Final = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "lm_head.weight")


def find_weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors of a model directory, sorted. Raises ExportError if some or all are missing."""
    index, single = path / _INDEX, path / _SINGLE
    if index.is_file():
        names = _indexed(index)
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ExportError(f"{path} lacks {missing[0]}, which {_INDEX} names; download the model again")
        if single.is_file() and names != [_SINGLE]:
            raise ExportError(
                f"{path} has {_SINGLE} and an index of other files; remove the one that is not the model's"
            )
        return tuple(path / name for name in names)
    if single.is_file():
        return (single,)
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        raise ExportError(
            f"{path} has {others[0]}, but neither {_SINGLE} nor {_INDEX}; download the model again (a file that is the "
            f"whole model may be renamed to {_SINGLE})"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ExportError(
            f"{path} has only pickled weights ({pickles[0]}), which execute code on load; get the model as "
            "safetensors (if you trust it, convert it: save_pretrained(safe_serialization=True))"
        )
    raise ExportError(f"{path} has no *.safetensors; expected the model's weights")


def _indexed(index: Path) -> list[str]:
    """The files that an index names: plain names beside it."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        is_usable = bool(names) and all(isinstance(name, str) and Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_usable = False
    if not is_usable:
        raise ExportError(f"{index} is not an index of safetensors files beside it; download the model again")
    return names


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """Tensor name to its dtype, shape and place. Raises ExportError if the file is not safetensors or is truncated."""
    size = path.stat().st_size
    broken = f"{path} is not a safetensors file, or is truncated"
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > min(size, _MAX_HEADER_BYTES):
            raise ExportError(f"{broken}; download it again")
        try:
            header = json.loads(file.read(header_size))
            tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
            expected = 8 + header_size + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            shapes = [math.prod(tensor["shape"]) for tensor in tensors.values()]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise ExportError(f"{broken}; download it again") from None
    if size != expected or min(shapes, default=0) < 0:
        raise ExportError(
            f"{path} has {size:,} bytes, its header gives {expected:,}; it is truncated: download it again"
        )
    return tensors


def check_weights(path: Path, files: tuple[Path, ...], shape: ModelShape, config: Mapping[str, Any]) -> int:
    """The number of parameters. Raises ExportError if a file is truncated or its tensors are not those of `shape`.

    For a known family the number of layers and the shapes of SHAPES are compared; for any other the number of layers
    and the embeddings. Loading finds the rest.
    """
    tensors = {name: tensor for file in files for name, tensor in read_safetensors_header(file).items()}
    if not tensors:
        raise ExportError(f"{path} has no tensors in its safetensors; download the model again")
    _check_layers(path, tensors, shape, config)
    ends = SHAPES if shape.family in FAMILIES and "text_config" not in config else dict.fromkeys(_UNIVERSAL, ("V", "H"))
    sizes = {
        "V": shape.vocab_size,
        "H": config.get("word_embed_proj_dim") or shape.hidden_size,
        "Q": shape.heads * shape.head_size,
        "K": shape.kv_heads * shape.head_size,
        "F": shape.intermediate_size,
        "P": shape.positions,
        "D": shape.head_size,
    }
    for name, tensor in tensors.items():
        dimensions = ends.get(".".join(name.split(".")[-2:]))
        if dimensions is None or ("text_config" in config and not _is_text(name)):
            continue
        expected = [sum(sizes[letter] for letter in dimension.split("+")) for dimension in dimensions]
        if tensor["shape"] != expected:
            raise ExportError(
                f"{path}: the tensor {name} has the shape {tensor['shape']}, config.json makes it {expected}; they "
                "do not belong together: get both from one place"
            )
    return sum(
        math.prod(tensor["shape"]) for name, tensor in tensors.items() if not (shape.is_tied and name.endswith(_HEADS))
    )


def _check_layers(path: Path, tensors: Mapping[str, Any], shape: ModelShape, config: Mapping[str, Any]) -> None:
    numbered = {
        int(match.group(1)): name
        for name in tensors
        if (match := _LAYER.search(name)) and ("text_config" not in config or _is_text(name))
    }
    if not numbered:
        return  # a family that calls its layers something else
    # Layers that predict further tokens lie after the last one and are not run.
    more = config.get("num_nextn_predict_layers")
    allowed = shape.layers + (more if isinstance(more, int) else 0)
    if not shape.layers <= max(numbered) + 1 <= allowed:
        raise ExportError(
            f"{path}: the weights have {max(numbered) + 1} layers (the last has the tensor {numbered[max(numbered)]}), "
            f"config.json gives {shape.layers}; they do not belong together: get both from one place"
        )


def _is_text(name: str) -> bool:
    """Whether a tensor belongs to the text model of a multimodal model."""
    return "vision" not in name and "visual" not in name and "audio" not in name


FP16_MAX: Final = 65_504.0
BF16_MAX: Final = (2 - 2**-7) * 2.0**127

# Scales of integers are kept in FP16 by some formats: 255 steps of INT8, or 15 of INT4, reach from -limit to +limit.
_LARGEST: Final[dict[Precision, float]] = {
    "fp32": math.inf,
    "bf16": BF16_MAX,
    "fp16": FP16_MAX,
    "int8": FP16_MAX * 255 / 2,
    "w8a8": FP16_MAX * 255 / 2,
    "int4": FP16_MAX * 15 / 2,
}


def require_range(weight_files: Sequence[Path], precision: Precision) -> None:
    """Reads every floating-point tensor once, one at a time.

    Raises ExportError naming the first tensor that holds a NaN, an infinity, or a weight beyond what `precision` takes.
    """
    limit = _LARGEST[precision]
    for path in weight_files:
        with quiet_upstream(f"reading {path.name}"):
            import torch
            from safetensors import safe_open

            opened: Any = safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
            with opened as file:
                for name in sorted(file.keys()):
                    tensor = file.get_tensor(name)
                    if not tensor.is_floating_point() or not tensor.numel():
                        continue
                    low, high = (float(end) for end in torch.aminmax(tensor))
                    if not (math.isfinite(low) and math.isfinite(high)):
                        raise ExportError(
                            f"{path}: the tensor {name} holds weights that are not finite numbers; the model is "
                            "broken: download it again"
                        )
                    if max(-low, high) > limit:
                        raise ExportError(
                            f"{path}: the tensor {name} holds {max(high, low, key=abs):.6g}, beyond the {limit:.6g} "
                            f"that {precision} can hold; try --precision bf16 or fp32, which hold more"
                        )
