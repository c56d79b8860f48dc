"""Tiny random-weight Hugging Face directories for tests: no hub, no download, a second or less each.

`make_tiny_model` writes config.json and model.safetensors, `make_tiny_tokenizer` a byte-level BPE beside them,
`export_openvino` and `compress_int8` the IR of such a directory. Heavy packages are imported on first use.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")

# What tiny tokenizers are trained on: prose, code, digits, accents, an emoji; merges cross byte boundaries.
SAMPLE_TEXT = (
    "The target's output is a pure function of the prompt, the parameters and the seed.",
    "def verify(tokens, drafts):\n    for token, draft in zip(tokens, drafts):\n        if token != draft:\n",
    "            return False\n    return True\n\n\nclass Session:\n    def __init__(self, prompt):\n",
    "0123456789 3.14159 2026-11-21 naïve café – Größe, 東京, 😀 and a tab\there",
)


def make_tiny_model(family: str, directory: Path, *, vocab_size: int = 96, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random FP32 model of `family` ("llama", "qwen2", "qwen3") to `directory`, and returns it.

    Defaults: 2 layers, hidden 32, 4 query and 2 key/value heads of 8 (Qwen3: 16), untied embeddings.
    `overrides` are fields of the family's config (`tie_word_embeddings=True`, `num_hidden_layers=3`, ...).
    The weights are scaled up so that logits spread over several units and a wrong address shows.
    """
    import torch
    import transformers

    configs = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3":
        fields["head_dim"] = 16
    config = configs[family](**(fields | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = config.eos_token_id
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def make_tiny_tokenizer(
    directory: Path,
    *,
    vocab_size: int = 300,
    special_tokens: tuple[str, ...] = ("<|end|>",),
    chat_template: str | None = None,
    text: tuple[str, ...] = SAMPLE_TEXT,
) -> int:
    """Trains a byte-level BPE, writes it to `directory` as transformers does; returns its vocabulary size.

    `vocab_size` is an upper bound, at least 256 + the special tokens; the specials have ids 0, 1, ..., and
    the first of them is the end-of-text token. Deterministic: same arguments, same files.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special_tokens[0])
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return int(tokenizer.get_vocab_size())


def export_openvino(model_dir: Path, directory: Path) -> Path:
    """Writes a Hugging Face directory's stateful OpenVINO IR, FP32, to `directory`, and returns it."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    with warnings.catch_warnings():
        # Tracing warns about every shape-dependent branch of the upstream model code.
        warnings.simplefilter("ignore")
        main_export(
            str(model_dir),
            output=directory,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype="fp32"),
            convert_tokenizer=False,
        )
    return directory


def compress_int8(ir: Path, directory: Path) -> Path:
    """Writes an IR directory's twin with INT8 weights (symmetric, per channel) to `directory`, and returns it."""
    import nncf
    import openvino

    directory.mkdir(parents=True, exist_ok=True)
    model = nncf.compress_weights(
        openvino.Core().read_model(ir / "openvino_model.xml"), mode=nncf.CompressWeightsMode.INT8_SYM
    )
    openvino.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)
    (directory / "config.json").write_bytes((ir / "config.json").read_bytes())
    return directory


if __name__ == "__main__":  # a directory to play with: python tests/tiny_models.py qwen2 /tmp/tiny
    make_tiny_model(sys.argv[1], Path(sys.argv[2]), vocab_size=make_tiny_tokenizer(Path(sys.argv[2])))
