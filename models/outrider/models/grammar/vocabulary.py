"""Gives the library a tokenizer's vocabulary as bytes, without transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.models.errors import TokenizerError
from outrider.models.extras import missing_extra
from outrider.models.tokenizer import Tokenizer


def open_vocabulary(tokenizer: Tokenizer, size: int, stop_ids: Sequence[int]) -> Any:
    """llguidance's tokenizer; takes about a second for 152k tokens.

    size: ids of the model's logits. Raises RuntimeUnavailable where the library is not installed, TokenizerError for a
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
