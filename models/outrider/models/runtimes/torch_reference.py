"""Computes the logits that parity checks compare with: transformers' own forward pass, no code of ours in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

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


def reference_logits(path: Path, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits for every position of one sequence, in one FP32 pass without a cache: [len(tokens), vocab_size] float32.

    With plain attention: transformers' fused attention silently skips some steps, such as Gemma 2's soft-capping.
    Raises BundleError when transformers cannot load the directory.
    """
    model = load_causal_lm(path, torch.float32, "eager")
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return logits
