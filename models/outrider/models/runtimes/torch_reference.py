"""Loads causal language models with transformers: safetensors only, and no remote code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.models.errors import BundleError


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
