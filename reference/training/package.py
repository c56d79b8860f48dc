"""Writes a model as a standard Hugging Face directory: bfloat16 safetensors, configuration and tokenizer."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedModel

from training.vocabulary import save_tokenizer


def save_model(model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes `model` and `tokenizer` to `directory`, file by file, each replaced atomically; `model` is unchanged."""
    stored = copy.deepcopy(model).to(torch.bfloat16)
    end = stored.config.eos_token_id
    stored.generation_config = GenerationConfig(
        bos_token_id=end, eos_token_id=end, pad_token_id=end, do_sample=True, temperature=0.8
    )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as name:
        partial = Path(name)
        stored.save_pretrained(partial)
        save_tokenizer(tokenizer, partial, stored.config.max_position_embeddings)
        for file in sorted(partial.iterdir()):
            file.chmod(0o644)
            file.replace(directory / file.name)
