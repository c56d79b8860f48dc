"""Loads a model of transformers for the torch runtime, and reads from its configuration what the runtime asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import transformers

from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes.base import PROMISED_POSITIONS, RuntimeOptions

INT8: Final = "i8"
_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, INT8: torch.bfloat16}
"""What is computed in; with INT8, what linear layers multiply their integers in."""


def load_causal_lm(path: Path, dtype: torch.dtype, attention: str) -> Any:
    """The model of a Hugging Face directory, on CPU, in evaluation mode: safetensors only, never remote code.

    Raises BundleError when transformers cannot load it.
    """
    progress = transformers.utils.logging
    was_enabled = progress.is_progress_bar_enabled()
    progress.disable_progress_bar()  # a library does not print to its user's terminal
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise BundleError(f"transformers cannot load {path}: {error}") from error
    finally:
        if was_enabled:
            progress.enable_progress_bar()
    return model.eval()


def device_of(name: str) -> torch.device:
    """The device. Raises ConfigError for no device's name, RuntimeUnavailable where it is not here.

    A GPU is the process's first: Triton, graphs and streams go by the current device of each thread.
    """
    try:
        device = torch.device(name.lower())
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; expected a torch device such as cpu or cuda:0") from error
    if device.type == "cuda" and device.index:
        why = f"device is {name!r}, and the torch runtime takes the first GPU that its process sees"
        raise ConfigError(f"{why}; give cuda, and name the GPU by CUDA_VISIBLE_DEVICES")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeUnavailable(f"torch {torch.__version__} sees no CUDA device for {name!r}")
    return device


def dtype_of(name: str) -> torch.dtype:
    """What is computed in, by a name of `properties["dtype"]`. Raises ConfigError for another."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}; the torch runtime takes {', '.join(_DTYPES)}")
    return _DTYPES[name]


def max_positions_of(config: Any, options: RuntimeOptions) -> int:
    """The longest sequence: the exporter's, else the model's own, cut to `options.max_positions`."""
    promised = getattr(config, PROMISED_POSITIONS, None)
    own = promised or getattr(config.get_text_config(), "max_position_embeddings", None) or options.max_positions
    if not own:
        raise ConfigError("the model's config.json does not give max_position_embeddings; set max_positions")
    return min(int(own), options.max_positions or int(own))


def may_slide(config: Any) -> bool:
    """Whether some layers attend a window: a mask from outside would replace theirs, or be one too many."""
    kinds = str([getattr(config, name, None) for name in ("layer_types", "attention_layers", "attention_types")])
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return any(word in kinds for word in ("sliding", "chunked", "local")) or any(windows)
