"""Shapes OpenAI-compatible answers: whole, or chunk by chunk as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from outrider.models.http import openai_answers


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice `index`; finish_reason marks the last.

    num_unverified: its tokens that no target has seen; only a device's endpoint sends any.
    """

    index: int
    text: str
    finish_reason: str | None = None
    num_unverified: int = 0

    @property
    def extension(self) -> dict[str, Any]:
        """The extension field of its choice; none in a verified piece."""
        return unverified_field(self.num_unverified)


def unverified_field(num_unverified: int) -> dict[str, Any]:
    """The extension field `outrider` of a choice with unverified tokens; nothing where all are verified."""
    return {"outrider": {"verified": False, "unverified_tokens": num_unverified}} if num_unverified else {}


class Shape(Protocol):
    """Builds the answer of one call. target: the identity of what picks the tokens; None: not known."""

    def __init__(self, model: str, seed: int, target: str | None) -> None: ...

    @property
    def id(self) -> str:
        """The answer's."""
        ...

    def whole(
        self, texts: list[str], reasons: list[Any], usage: openai_answers.CompletionUsage
    ) -> openai_answers.Completion | openai_answers.ChatCompletion:
        """The whole answer."""
        ...

    def first(self) -> bytes:
        """The first bytes of a stream; may be empty."""
        ...

    def piece(self, delta: Delta) -> bytes:
        """New text."""
        ...

    def last(self, usage: openai_answers.CompletionUsage) -> bytes:
        """The usage, as the last chunk."""
        ...


class _Head:
    """The fields that all messages of one call share."""

    _prefix: ClassVar[str]
    _piece_object: ClassVar[str]

    def __init__(self, model: str, seed: int, target: str | None) -> None:
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

    def _event(self, **rest: Any) -> bytes:
        message = {**self._head, "object": self._piece_object, **rest}
        return f"data: {json.dumps(message, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()

    def last(self, usage: openai_answers.CompletionUsage) -> bytes:
        """The usage, as the last chunk."""
        return self._event(choices=[], usage=usage.model_dump())


class CompletionShape(_Head):
    """Of /v1/completions."""

    _prefix = "cmpl"
    _piece_object = "text_completion"

    def whole(
        self, texts: list[str], reasons: list[Any], usage: openai_answers.CompletionUsage
    ) -> openai_answers.Completion | openai_answers.ChatCompletion:
        """The whole answer."""
        choices = [
            openai_answers.CompletionChoice(index=index, text=text, finish_reason=reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return openai_answers.Completion(**self._head, choices=choices, usage=usage)

    def first(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, delta: Delta) -> bytes:
        """New text."""
        choice = {"index": delta.index, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
        return self._event(choices=[choice | delta.extension])


class ChatShape(_Head):
    """Of /v1/chat/completions."""

    _prefix = "chatcmpl"
    _piece_object = "chat.completion.chunk"

    def whole(
        self, texts: list[str], reasons: list[Any], usage: openai_answers.CompletionUsage
    ) -> openai_answers.Completion | openai_answers.ChatCompletion:
        """The whole answer."""
        choice = openai_answers.ChatChoice(
            message=openai_answers.AssistantMessage(content=texts[0]), finish_reason=reasons[0]
        )
        return openai_answers.ChatCompletion(**self._head, choices=[choice], usage=usage)

    def first(self) -> bytes:
        """The role."""
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, delta: Delta) -> bytes:
        """New text."""
        return self._chunk({"content": delta.text} if delta.text else {}, delta.finish_reason, delta.extension)

    def _chunk(
        self, delta: dict[str, str], finish_reason: str | None, extension: Mapping[str, Any] = MappingProxyType({})
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._event(choices=[choice | dict(extension)])
