"""Shapes OpenAI-compatible answers: whole, or chunk by chunk as server-sent events. `openai_answers` documents them.

Logprobs are natural logarithms of the model's own probabilities: at temperature 1, before penalties, biases, grammars
and top-k or top-p.
"""

from __future__ import annotations

import json
import math
import secrets
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from outrider.models.http.answer_text import TokenPiece
from outrider.models.http.chat_reader import ChatReader, ChatStyle
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


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """Writes the logprobs of one call. num_top: likeliest tokens at each place."""

    tokenizer: Tokenizer
    num_top: int

    def chat(self, pieces: Sequence[TokenPiece]) -> dict[str, Any]:
        """`logprobs` of a chat's choice, or of its chunk."""
        return {"content": [self._chat_entry(piece) for piece in pieces], "refusal": None}

    def completion(self, pieces: Sequence[TokenPiece], first_offset: int) -> dict[str, Any]:
        """`logprobs` of a completion's choice, or of its chunk. first_offset: characters before the model's text."""
        return {
            "tokens": [self._text(piece.token) for piece in pieces],
            "token_logprobs": [finite(piece.known.logprob) for piece in pieces],
            "top_logprobs": [self._top(piece) for piece in pieces],
            "text_offset": [first_offset + piece.offset for piece in pieces],
        }

    def _top(self, piece: TokenPiece) -> dict[str, float]:
        """As OpenAI's: the token itself is among them, so there may be one more."""
        top: dict[str, float] = {}
        for token, logprob in [*piece.known.top[: self.num_top], (piece.token, piece.known.logprob)]:
            top.setdefault(self._text(token), finite(logprob))
        return top

    def _chat_entry(self, piece: TokenPiece) -> dict[str, Any]:
        top = [self._one(token, logprob) for token, logprob in piece.known.top[: self.num_top]]
        return {**self._one(piece.token, piece.known.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.tokenizer.token_bytes(token)
        return {"token": token_text(spelled), "logprob": finite(logprob), "bytes": list(spelled)}

    def _text(self, token: int) -> str:
        spelled = self.tokenizer.token_bytes(token)
        text = token_text(spelled)
        return text if text.encode() == spelled else f"bytes:{text}"


Usage = dict[str, Any]
"""`openai_answers.CompletionUsage`."""


@dataclass(slots=True)
class Delta:
    """New text of choice `index`; finish_reason marks the last.

    num_unverified: its tokens that no target has seen; only a device's endpoint sends any. pieces: its tokens, where
    the call wants logprobs.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    num_unverified: int = 0
    pieces: tuple[TokenPiece, ...] = ()

    def add(self, delta: Delta) -> None:
        """Adds what another brings, but for logprobs: a whole text is what all its deltas add up to."""
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.num_unverified += delta.num_unverified

    @property
    def extension(self) -> dict[str, Any]:
        """The extension field `outrider` of a choice with unverified tokens; nothing where all are verified."""
        unverified = {"verified": False, "unverified_tokens": self.num_unverified}
        return {"outrider": unverified} if self.num_unverified else {}


@dataclass(frozen=True, slots=True)
class Look:
    """How the answer of one call shows its texts.

    logprobs: writes those of tokens; None: none. echoes: what stands before each text.
    style: how a chat's texts are read. insides: of each choice of the answer, whether its prompt has opened the
    reasoning.
    """

    logprobs: LogprobWriter | None = None
    echoes: Sequence[str] = ()
    style: ChatStyle = field(default_factory=ChatStyle)
    insides: Sequence[bool] = (False,)


def json_bytes(message: dict[str, Any]) -> bytes:
    """An answer's JSON, without spaces."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


class Shape(ABC):
    """Builds the answer of one call.

    extras: fields besides OpenAI's, of the whole answer or of a stream's first event.
    """

    _prefix: ClassVar[str]
    _object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(self, model: str, seed: int, target: str | None, look: Look | None = None) -> None:
        """target: the identity of what picks the tokens; None: not known."""
        self._look = look or Look()
        self.id = f"{self._prefix}-{secrets.token_urlsafe(12)}"
        self.extras: dict[str, Any] = {}
        self._head: dict[str, Any] = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": target,
            "seed": seed,
        }

    def take(self, text: Delta, delta: Delta) -> None:
        """Adds new text to the whole one that `whole` is given."""
        text.add(delta)

    def whole(self, texts: Sequence[Delta], usage: Usage, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole answer, its logprobs left out. metrics: `openai_answers.RequestMetrics`, if there are any."""
        choices = [self._choice(index, text) | text.extension for index, text in enumerate(texts)]
        shown = {"metrics": metrics} if metrics else {}
        return {**self._head, "object": self._object, "choices": choices, "usage": usage, **shown, **self.extras}

    @abstractmethod
    def _choice(self, index: int, text: Delta) -> dict[str, Any]:
        """A whole text."""

    @abstractmethod
    def logprobs(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, Any] | None:
        """Those of tokens of choice `index` of the answer; None where none were asked for."""

    @abstractmethod
    def first(self) -> bytes:
        """The first bytes of a stream; may be empty."""

    @abstractmethod
    def piece(self, delta: Delta, usage: Usage | None = None) -> bytes:
        """New text. usage: so far, where each chunk shows it. Empty where the text is held back."""

    def last(self, usage: Usage, metrics: dict[str, Any] | None = None) -> bytes:
        """The usage, as the last chunk. metrics: as in `whole`."""
        return self._event([], usage, metrics)

    def _event(
        self, choices: list[dict[str, Any]], usage: Usage | None = None, metrics: dict[str, Any] | None = None
    ) -> bytes:
        message = {**self._head, "object": self._chunk_object, "choices": choices}
        if usage is not None:
            message["usage"] = usage
        if metrics:
            message["metrics"] = metrics
        if self.extras:
            message |= self.extras
            self.extras = {}
        return b"data: %s\n\n" % json_bytes(message)


class CompletionShape(Shape):
    """Of /v1/completions."""

    _prefix = "cmpl"
    _object = _chunk_object = "text_completion"

    def __init__(self, model: str, seed: int, target: str | None, look: Look | None = None) -> None:
        super().__init__(model, seed, target, look)
        self._to_echo = dict(enumerate(self._look.echoes))

    def _choice(self, index: int, text: Delta) -> dict[str, Any]:
        shown = self._to_echo.get(index, "") + text.text
        return {"index": index, "text": shown, "logprobs": None, "finish_reason": text.finish_reason}

    def first(self) -> bytes:
        """Nothing, but for extras."""
        return self.piece(Delta(0)) if self.extras else b""

    def piece(self, delta: Delta, usage: Usage | None = None) -> bytes:
        """New text; the first of a choice has what is echoed."""
        choice = self._choice(delta.index, delta) | {"logprobs": self.logprobs(delta.index, delta.pieces)}
        self._to_echo.pop(delta.index, None)
        return self._event([choice | delta.extension], usage)

    def logprobs(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, Any] | None:
        """Those of tokens of choice `index`."""
        writer, echoes = self._look.logprobs, self._look.echoes
        return writer.completion(pieces, len(echoes[index]) if echoes else 0) if writer is not None else None


class ChatShape(Shape):
    """Of /v1/chat/completions."""

    _prefix = "chatcmpl"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, model: str, seed: int, target: str | None, look: Look | None = None) -> None:
        super().__init__(model, seed, target, look)
        self._readers = [ChatReader(self._look.style, is_inside=inside) for inside in self._look.insides]

    def take(self, text: Delta, delta: Delta) -> None:
        """Reads it, too: a whole text at once would hold the event loop."""
        super().take(text, delta)
        self._readers[delta.index].push(delta.text, is_last=delta.finish_reason is not None)

    def _choice(self, index: int, text: Delta) -> dict[str, Any]:
        reader = self._readers[index]
        content = reader.content if reader.content or not reader.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reader.reasoning:
            message["reasoning_content"] = reader.reasoning
        if reader.calls:
            message["tool_calls"] = reader.calls
        reason = reader.reason(text.finish_reason)
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def first(self) -> bytes:
        """The role, for each choice."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._event([self._chunk(index, role)]) for index in range(len(self._readers)))

    def piece(self, delta: Delta, usage: Usage | None = None) -> bytes:
        """New text, as far as it can be read."""
        reader = self._readers[delta.index]
        found = reader.push(delta.text, is_last=delta.finish_reason is not None)
        if not found and delta.text and not (delta.finish_reason or delta.pieces or delta.num_unverified):
            return b""
        reason, logprobs = reader.reason(delta.finish_reason), self.logprobs(delta.index, delta.pieces)
        return self._event([self._chunk(delta.index, found, logprobs, reason) | delta.extension], usage)

    def logprobs(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, Any] | None:
        """Those of tokens, whichever choice they are of."""
        writer = self._look.logprobs
        return writer.chat(pieces) if writer is not None else None

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
