"""Shapes OpenAI-compatible answers: whole, or chunk by chunk as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from outrider.models.http import openai_answers
from outrider.models.http.answer_text import TokenPiece
from outrider.models.http.chat_reader import ChatReader, ChatStyle
from outrider.models.http.logprobs import LogprobWriter


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice `index`; finish_reason marks the last.

    num_unverified: its tokens that no target has seen; only a device's endpoint sends any. pieces: its tokens, where
    the call wants logprobs.
    """

    index: int
    text: str
    finish_reason: str | None = None
    num_unverified: int = 0
    pieces: tuple[TokenPiece, ...] = ()

    @property
    def extension(self) -> dict[str, Any]:
        """The extension field of its choice; none in a verified piece."""
        return unverified_field(self.num_unverified)


@dataclass(slots=True)
class FoundText:
    """A whole text: what all its deltas add up to, but for logprobs."""

    text: str = ""
    finish_reason: Any = None
    num_unverified: int = 0

    def add(self, delta: Delta) -> None:
        """Adds what a delta brings."""
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.num_unverified += delta.num_unverified


@dataclass(frozen=True, slots=True)
class Look:
    """How the answer of one call shows its texts.

    num_choices: in the answer. logprobs: writes those of tokens; None: none. echoes: what stands before each text.
    style: how a chat's texts are read. insides: whether the prompt of each has opened the reasoning.
    """

    num_choices: int = 1
    logprobs: LogprobWriter | None = None
    echoes: Sequence[str] = ()
    style: ChatStyle = field(default_factory=ChatStyle)
    insides: Sequence[bool] = ()


def unverified_field(num_unverified: int) -> dict[str, Any]:
    """The extension field `outrider` of a choice with unverified tokens; nothing where all are verified."""
    return {"outrider": {"verified": False, "unverified_tokens": num_unverified}} if num_unverified else {}


class Shape(Protocol):
    """Builds the answer of one call. target: the identity of what picks the tokens; None: not known."""

    def __init__(self, model: str, seed: int, target: str | None, look: Look | None = None) -> None: ...

    @property
    def id(self) -> str:
        """The answer's."""
        ...

    def whole(
        self, texts: Sequence[FoundText], usage: openai_answers.CompletionUsage
    ) -> openai_answers.Completion | openai_answers.ChatCompletion:
        """The whole answer, its logprobs left out."""
        ...

    def logprobs(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, Any] | None:
        """Those of tokens of choice `index` of the answer; None where none were asked for."""
        ...

    def first(self) -> bytes:
        """The first bytes of a stream; may be empty."""
        ...

    def piece(self, delta: Delta, usage: openai_answers.CompletionUsage | None = None) -> bytes:
        """New text. usage: so far, where each chunk shows it. Empty where the text is held back."""
        ...

    def last(self, usage: openai_answers.CompletionUsage) -> bytes:
        """The usage, as the last chunk."""
        ...


class _Head:
    """The fields that all messages of one call share."""

    _prefix: ClassVar[str]
    _piece_object: ClassVar[str]

    def __init__(self, model: str, seed: int, target: str | None, look: Look | None = None) -> None:
        self._look = look or Look()
        self._head: dict[str, Any] = {
            "id": f"{self._prefix}-{secrets.token_urlsafe(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": target,
            "seed": seed,
        }

    @property
    def id(self) -> str:
        """The answer's."""
        return str(self._head["id"])

    def _event(self, usage: openai_answers.CompletionUsage | None = None, **rest: Any) -> bytes:
        message = {**self._head, "object": self._piece_object, **rest}
        if usage is not None:
            message["usage"] = usage.model_dump()
        return f"data: {json.dumps(message, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()

    def last(self, usage: openai_answers.CompletionUsage) -> bytes:
        """The usage, as the last chunk."""
        return self._event(usage, choices=[])


class CompletionShape(_Head):
    """Of /v1/completions."""

    _prefix = "cmpl"
    _piece_object = "text_completion"

    def __init__(self, model: str, seed: int, target: str | None, look: Look | None = None) -> None:
        super().__init__(model, seed, target, look)
        self._to_echo = dict(enumerate(self._look.echoes))

    def whole(
        self, texts: Sequence[FoundText], usage: openai_answers.CompletionUsage
    ) -> openai_answers.Completion | openai_answers.ChatCompletion:
        """The whole answer."""
        choices = [
            openai_answers.CompletionChoice(
                index=index,
                text=self._echo(index) + found.text,
                finish_reason=found.finish_reason,
            )
            for index, found in enumerate(texts)
        ]
        return openai_answers.Completion(**self._head, choices=choices, usage=usage)

    def first(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, delta: Delta, usage: openai_answers.CompletionUsage | None = None) -> bytes:
        """New text; the first of a choice has what is echoed."""
        choice = {
            "index": delta.index,
            "text": self._to_echo.pop(delta.index, "") + delta.text,
            "logprobs": self.logprobs(delta.index, delta.pieces),
            "finish_reason": delta.finish_reason,
        }
        return self._event(usage, choices=[choice | delta.extension])

    def _echo(self, index: int) -> str:
        return self._look.echoes[index] if self._look.echoes else ""

    def logprobs(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, Any] | None:
        """Those of tokens of choice `index`."""
        writer = self._look.logprobs
        return writer.completion(pieces, len(self._echo(index))) if writer is not None else None


class ChatShape(_Head):
    """Of /v1/chat/completions."""

    _prefix = "chatcmpl"
    _piece_object = "chat.completion.chunk"

    def __init__(self, model: str, seed: int, target: str | None, look: Look | None = None) -> None:
        super().__init__(model, seed, target, look)
        look = self._look
        insides = look.insides or [False] * look.num_choices
        self._readers = [ChatReader(look.style, is_inside=inside) for inside in insides]

    def whole(
        self, texts: Sequence[FoundText], usage: openai_answers.CompletionUsage
    ) -> openai_answers.Completion | openai_answers.ChatCompletion:
        """The whole answer."""
        choices = []
        for index, (found, reader) in enumerate(zip(texts, self._readers, strict=True)):
            reader.push(found.text, is_last=True)
            message = openai_answers.AssistantMessage(
                content=reader.content if reader.content or not reader.calls else None,
                reasoning_content=reader.reasoning or None,
                tool_calls=[openai_answers.ToolCall.model_validate(call) for call in reader.calls] or None,
            )
            reason: Any = reader.reason(found.finish_reason)
            choices.append(
                openai_answers.ChatChoice(
                    index=index,
                    message=message,
                    finish_reason=reason,
                )
            )
        return openai_answers.ChatCompletion(**self._head, choices=choices, usage=usage)

    def first(self) -> bytes:
        """The role, for each choice."""
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._look.num_choices)
        )

    def piece(self, delta: Delta, usage: openai_answers.CompletionUsage | None = None) -> bytes:
        """New text, as far as it can be read."""
        reader = self._readers[delta.index]
        found = reader.push(delta.text, is_last=delta.finish_reason is not None)
        if not found and delta.text and not (delta.finish_reason or delta.pieces or delta.num_unverified):
            return b""
        reason = reader.reason(delta.finish_reason)
        return self._chunk(delta.index, found, reason, delta.extension, self.logprobs(delta.index, delta.pieces), usage)

    def logprobs(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, Any] | None:
        """Those of tokens, whichever choice they are of."""
        writer = self._look.logprobs
        return writer.chat(pieces) if writer is not None else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        extension: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
        usage: openai_answers.CompletionUsage | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._event(usage, choices=[choice | (extension or {})])
