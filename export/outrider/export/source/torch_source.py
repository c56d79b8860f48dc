"""Loads the source model in torch and FP32, the only reference that exports are compared with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.quiet import quiet_upstream
from outrider.export.source.config_reader import instantiate
from outrider.export.source.model_source import read_config
from outrider.models.errors import ExportError

_NUMBERED: Final = re.compile(r"\.\d+\.")
# Older checkpoints store these; transformers computes them, and nothing in them was trained.
_OLD_BUFFERS: Final = (".rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias")


def load_source_model(path: Path, dtype: str = "float32", attention: str = "eager") -> Any:
    """The transformers model in FP32 on the CPU, from safetensors, never with code that came with it.

    Its attention is transformers' plain one ("eager"): the fused one silently leaves out what it cannot do, such as
    Gemma 2's soft-capping. Training takes another dtype, as torch names it, and fused attention where it is exact.
    Raises ExportError if the weights are not exactly those of config.json: transformers would invent missing ones and
    drop others.
    """
    config = instantiate(path, read_config(path))
    with quiet_upstream(f"loading {path.name}"):
        import torch
        import transformers

        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # `found` reports them with names and shapes
            output_loading_info=True,
        )
    _require_exact(path, found, model)
    return model.eval()


def _require_exact(path: Path, found: Mapping[str, Any], model: Any) -> None:
    """Raises ExportError for tensors of another shape, missing ones, and biases or norms that the model's layers lack:
    config.json has another family or flags.

    Whole parts that are not loaded, such as a vision tower, are ignored.
    """
    mismatched, missing = sorted(found["mismatched_keys"]), sorted(found["missing_keys"])
    if mismatched:
        name, stored, expected = mismatched[0]
        raise ExportError(
            f"{path}: the tensor {name} has the shape {list(stored)}, config.json makes it {list(expected)}; they "
            "do not belong together: get both from one place"
        )
    if missing:
        raise ExportError(
            f"{path}: the weights lack the tensor {missing[0]} ({len(missing)} in all), which config.json describes; "
            "they do not belong together: get both from one place"
        )

    modules = {name for name, _ in model.named_modules()}
    left = sorted(
        name
        for name in found["unexpected_keys"]
        if _NUMBERED.search(name) and name.rsplit(".", 2)[0] in modules and not name.endswith(_OLD_BUFFERS)
    )
    if left:
        raise ExportError(
            f"{path}: the model that config.json describes has no place for the tensor {left[0]} ({len(left)} in all); "
            "they do not belong together: get both from one place"
        )


def source_logits(model: Any, tokens: Sequence[int], num_rows: int = 0) -> NDArray[np.float32]:
    """Logits after the last `num_rows` tokens of a sequence (0: all), computed in one pass without a cache.

    [num_rows, vocab_size] float32.
    """
    import torch

    can_choose = "logits_to_keep" in inspect.signature(model.forward).parameters
    chosen = {"logits_to_keep": num_rows} if can_choose else {}
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False, **chosen).logits[0]
    return np.asarray(logits[-num_rows:].float().numpy())
