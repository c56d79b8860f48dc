"""The source model in torch, FP32: what every export is compared with. Nothing else here is allowed to be the
truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.export.quiet import quiet_upstream


def load_source_model(path: Path) -> Any:
    """The transformers model in FP32 on the CPU, from safetensors, never with code that came with it."""
    with quiet_upstream(f"loading {path.name}"):
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        return model.eval()


def source_logits(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits of the whole sequence at once, without a cache: [len(tokens), vocab_size] float32."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    rows: NDArray[np.float32] = logits.float().numpy()
    return rows
