"""Makes a model heavier without changing its function (DESIGN section 8): a measuring aid for small machines.

A gated MLP computes down(act(gate(x)) * up(x)). Added rows of gate and up are small random numbers, so that
kernels do real work on them; the matching columns of down are zero, so that nothing of it reaches the output.
The memory traffic of a step is then that of a model of the chosen size, with the text and the acceptance of the
real pair.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any, Final

from outrider.export.quiet import quiet_upstream
from outrider.export.source.model_source import SourceModel, read_source
from outrider.export.source.weight_files import read_safetensors_header
from outrider.models.bundle.manifest import Widening
from outrider.models.errors import ExportError
from outrider.models.text.tokenizer import TOKENIZER_FILES

CONFIG_NOTE: Final = "outrider_widened"
"""The key that marks a widened model's config.json; its value is the original feed-forward size."""

_MLP_TENSOR: Final = re.compile(r"\.mlp\.(gate|up|down)_proj\.(?:weight|bias)$")
_GRANULE: Final = 64  # added neurons come in these, so that rows stay aligned
# Small, but far above float32's denormals (1e-38), also after the product of the two.
_NOISE_SCALE: Final = 0.02


def plan_widening(source: SourceModel, target_megabytes: float) -> int:
    """The feed-forward size that gives a model of `target_megabytes` (10^6 bytes) in FP32, embeddings
    included.

    Raises ExportError if the model is that large already.
    """
    shape = source.architecture
    parameters = target_megabytes * 1e6 / 4
    per_neuron = 3 * shape.hidden_size * shape.layers
    added = round((parameters - shape.parameters) / per_neuron / _GRANULE) * _GRANULE
    if added < _GRANULE:
        raise ExportError(
            f"{source.name} has {shape.parameters * 4 / 1e6:.0f} MB in FP32; it cannot be widened to "
            f"{target_megabytes:g} MB; choose a larger size"
        )
    return shape.intermediate_size + added


def widen(
    model: str | Path | SourceModel, out_dir: str | Path, target_megabytes: float, *, seed: int = 0
) -> SourceModel:
    """Writes a widened copy of a model, or of a model directory, in FP32, to `out_dir`; returns the copy.

    The same arguments give the same bytes. Raises ExportError if `out_dir` holds something, if the model is
    widened already, has no gated feed-forward of three matrices a layer (as Llama, Qwen, Mistral and Gemma have), or is
    not smaller than `target_megabytes`.
    """
    source = model if isinstance(model, SourceModel) else read_source(model)
    out = Path(out_dir)
    if out.is_dir() and any(out.iterdir()):
        raise ExportError(f"{out} is not empty; choose another directory for the widened model")
    if CONFIG_NOTE in source.config:
        raise ExportError(f"{source.path} is widened already; widen the original")
    _require_gated(source)
    size = plan_widening(source, target_megabytes)
    out.mkdir(parents=True, exist_ok=True)
    for path in source.weight_files:
        _widen_file(path, out / path.name, size, seed)
    index = source.path / "model.safetensors.index.json"
    if len(source.weight_files) > 1:
        shutil.copyfile(index, out / index.name)
    config = source.config | {"intermediate_size": size, CONFIG_NOTE: source.architecture.intermediate_size}
    config["dtype"] = "float32"
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8", newline="\n")
    for name in TOKENIZER_FILES:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, out / name)
    return read_source(out, max_positions=source.shape.longest)


def _require_gated(source: SourceModel) -> None:
    names = [name for path in source.weight_files for name in read_safetensors_header(path)]
    found = sum(name.endswith("weight") for name in names if _MLP_TENSOR.search(name))
    if found != 3 * source.architecture.layers:
        raise ExportError(
            f"{source.name} ({source.architecture.name}) cannot be widened: it has {found} matrices called gate, up or "
            f"down_proj, expected three in each of {source.architecture.layers} layers; leave --widen out"
        )


def describe_widening(source: SourceModel) -> Widening | None:
    """The manifest's entry for a widened source; None for any other."""
    original_size = source.config.get(CONFIG_NOTE)
    if original_size is None:
        return None
    shape = source.architecture
    added = 3 * shape.hidden_size * shape.layers * (shape.intermediate_size - original_size)
    return Widening(
        from_intermediate_size=original_size,
        from_parameters=shape.parameters - added,
        fp32_megabytes=round(shape.parameters * 4 / 1e6, 1),
    )


def _widen_file(path: Path, target: Path, size: int, seed: int) -> None:
    with quiet_upstream(f"widening {path.name}"):
        import torch
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensor = tensor.float()
            match = _MLP_TENSOR.search(name)
            if match is not None:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))
                tensor = _widen_tensor(torch, tensor, match.group(1), size, generator)
            tensors[name] = tensor.contiguous()
        save_file(tensors, target, metadata={"format": "pt"})


def _widen_tensor(torch: Any, tensor: Any, kind: str, size: int, generator: Any) -> Any:
    if tensor.dim() == 1:  # a bias; that of `down` has the model's width
        return tensor if kind == "down" else torch.nn.functional.pad(tensor, (0, size - len(tensor)))
    if kind == "down":  # [hidden, feed-forward]: zeros, so the added neurons change nothing
        return torch.nn.functional.pad(tensor, (0, size - tensor.shape[1]))
    rows = torch.empty(size - tensor.shape[0], tensor.shape[1]).normal_(std=_NOISE_SCALE, generator=generator)
    # Away from zero, so that no product of two of them comes near a denormal.
    rows += torch.where(rows < 0, -_NOISE_SCALE, _NOISE_SCALE) / 4
    return torch.cat([tensor, rows])
