"""Writes logprobs as OpenAI's answers have them: natural logarithms of the model's own probabilities.

The model's own: at temperature 1, before penalties, biases, grammars and top-k or top-p.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from outrider.models.http.answer_text import TokenPiece
from outrider.models.text.tokenizer import Tokenizer

LEAST: Final = -9999.0
"""Stands for a probability of 0: JSON has no infinity. OpenAI's number."""


def finite(logprob: float) -> float:
    """The number, or `LEAST` for what JSON does not have."""
    return max(LEAST, logprob) if math.isfinite(logprob) else LEAST


def token_text(spelled: bytes) -> str:
    """A token's bytes as text; bytes that are not characters are escaped, as in `\\xf0\\x9f`."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in spelled)


_PIECE_BYTES: Final = 1 << 16
"""Compressed at once: 0.7 ms."""


class PackedLogprobs:
    """The logprobs of a text in the making as the JSON that its answer will have. Compressed: with 20 likeliest tokens
    they take 0.6 to 1.2 kB for each token of the text, a tenth to a third of that here.
    """

    def __init__(self, none: dict[str, Any]) -> None:
        """none: what a `LogprobWriter` makes of no tokens."""
        self._fields = {name: None if values is None else _Packed() for name, values in none.items()}

    def add(self, found: dict[str, Any]) -> int:
        """Appends what a `LogprobWriter` made of further tokens. Returns by how many bytes more is held now."""
        num_bytes = 0
        for name, values in found.items():
            packed = self._fields[name]
            if packed is not None and values:
                num_bytes += packed.add(json.dumps(values, ensure_ascii=False, separators=(",", ":"))[1:-1].encode())
        return num_bytes

    def pieces(self) -> Iterator[bytes]:
        """The JSON, piece by piece."""
        for index, (name, packed) in enumerate(self._fields.items()):
            yield f'{"," if index else "{"}"{name}":'.encode()
            if packed is None:
                yield b"null"
            else:
                yield b"["
                yield from packed
                yield b"]"
        yield b"}"


class _Packed:
    """A list's elements in JSON."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._newest = bytearray()

    def add(self, elements: bytes) -> int:
        if self._newest or self._pieces:
            self._newest += b","
        self._newest += elements
        num_more = len(elements) + 1
        if len(self._newest) >= _PIECE_BYTES:
            self._pieces.append(zlib.compress(self._newest, 1))
            num_more += len(self._pieces[-1]) - len(self._newest)
            self._newest = bytearray()
        return num_more

    def __iter__(self) -> Iterator[bytes]:
        yield from map(zlib.decompress, self._pieces)
        yield bytes(self._newest)


class LogprobWriter:
    """Writes the logprobs of one call. num_top: likeliest tokens at each place."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def chat(self, pieces: Sequence[TokenPiece]) -> dict[str, Any]:
        """`logprobs` of a chat's choice, or of its chunk."""
        return {"content": [self._chat_entry(piece) for piece in pieces], "refusal": None}

    def completion(self, pieces: Sequence[TokenPiece], first_offset: int) -> dict[str, Any]:
        """`logprobs` of a completion's choice, or of its chunk. first_offset: characters before the model's text."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            known = piece.logprobs
            assert known is not None
            found["tokens"].append(self._text(piece.token))
            found["token_logprobs"].append(finite(known.logprob))
            # As OpenAI's: the token itself is among them, so there may be one more.
            top: dict[str, float] = {}
            for token, logprob in [*known.top[: self._num_top], (piece.token, known.logprob)]:
                top.setdefault(self._text(token), finite(logprob))
            found["top_logprobs"].append(top)
            found["text_offset"].append(first_offset + piece.offset)
        return found

    def _chat_entry(self, piece: TokenPiece) -> dict[str, Any]:
        known = piece.logprobs
        assert known is not None
        top = [self._one(token, logprob) for token, logprob in known.top[: self._num_top]]
        return {**self._one(piece.token, known.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token)
        return {"token": token_text(spelled), "logprob": finite(logprob), "bytes": list(spelled)}

    def _text(self, token: int) -> str:
        spelled = self._tokenizer.token_bytes(token)
        text = token_text(spelled)
        return text if text.encode() == spelled else f"bytes:{text}"
