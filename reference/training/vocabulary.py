"""Trains the tokenizer that both models of the pair share: byte-level BPE on the corpus.

A newline and the indentation after it are one piece and an underscore stays inside its word, which saves a tenth of the
tokens on Python source. Depends on `tokenizers` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
"""Separates files; id 0. It is the end-of-sequence, beginning-of-sequence and padding token."""

PIECES = r"(?:\r?\n)+[ \t]*| ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+| +|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Trains byte-level BPE on `texts`; deterministic for the same texts in the same order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Writes `tokenizer.json` and a `tokenizer_config.json` that every transformers release since 4 can read."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
