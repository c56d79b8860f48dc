"""Passes a tokenizer's vocabulary to the library as bytes, without transformers, with the ids that end a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from outrider.models.errors import TokenizerError
from outrider.models.process.extras import missing_extra
from outrider.models.text.tokenizer import Tokenizer


class Vocabulary:
    """A tokenizer as the library takes it, and which ids end a text. Opened on first use."""

    def __init__(self, tokenizer: Tokenizer, size: int, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.num_tokens = tokenizer.size
        self.stop_ids = tuple(sorted({i for i in stop_ids if 0 <= i < tokenizer.size}))

    @cached_property
    def backend(self) -> Any:
        """llguidance's tokenizer."""
        return _open(self.tokenizer, self.size, self.stop_ids)

    def only_own_stops(self, bits: bytes) -> bytes:
        """A mask without the end tokens that the library takes for granted and the model does not have."""
        foreign = self._foreign_bits
        return bits if foreign is None else bytes(np.frombuffer(bits, np.uint8) & ~foreign)

    @cached_property
    def stop_bits(self) -> bytes:
        """The mask that allows the stop ids only."""
        return bytes(self._bits(self.stop_ids))

    @cached_property
    def own_bits(self) -> bytes:
        """The mask that allows the tokenizer's ids only."""
        return bytes(self._bits(range(self.num_tokens)))

    @cached_property
    def _foreign_bits(self) -> Any:
        """The mask of the library's own end tokens where the model has no stop ids, else None."""
        return None if self.stop_ids else self._bits(self.backend.eos_tokens)

    def _bits(self, ids: Sequence[int]) -> Any:
        words = (max(self.size, self.num_tokens) + 31) // 32 + 1
        is_set = np.zeros(words * 32, np.bool_)
        is_set[list(ids)] = True
        return np.packbits(is_set, bitorder="little")


def _open(tokenizer: Tokenizer, size: int, stop_ids: Sequence[int]) -> Any:
    """llguidance's tokenizer; takes about a second for 152k tokens.

    Raises RuntimeUnavailable where the library is not installed, TokenizerError for a
    tokenizer whose tokens are not bytes: WordPiece, or none of the known decoders.
    """
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ModuleNotFoundError as error:
        raise missing_extra(error, "structured output", "cloud") from error
    text = tokenizer.to_json()
    width = max(size, tokenizer.size)
    eos = list(stop_ids) or None
    try:
        return LLTokenizer(text, n_vocab=width, eos_token=eos)
    except ValueError as error:
        space = _metaspace(text)
        if not space:
            raise TokenizerError(
                f"{tokenizer.name} cannot be held to a grammar: {str(error)[:200]}; use a model with byte-level BPE or "
                "SentencePiece"
            ) from None
    return LLTokenizer(TokenizerWrapper(_Spelled(tokenizer, space, stop_ids)), n_vocab=width, eos_token=eos)


class _Spelled:
    """A tokenizer whose tokens are text, with one character for a space (SentencePiece without byte fallback)."""

    def __init__(self, tokenizer: Tokenizer, space: str, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = stop_ids[0] if stop_ids else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [(tokenizer.token(i) or "").replace(space, " ").encode() for i in range(tokenizer.size)]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("expected text")  # the wrapper asks once whether bytes are fine
        return self._tokenizer.encode(text, add_special_tokens=False)


def _metaspace(text: str) -> str:
    """The character that stands for a space, where the decoder is SentencePiece's; "" otherwise."""
    decoder = json.loads(text).get("decoder") or {}
    return str(decoder.get("replacement", "")) if decoder.get("type") == "Metaspace" else ""
