"""Defines the OpenAI-compatible answers: whole ones, and the chunks of streams.

An addition to OpenAI's fields: `seed`, so that any answer can be reproduced.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


class CompletionTokensDetails(BaseModel):
    """Drafted tokens, by the target's verdict."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptTokensDetails(BaseModel):
    """How much of the prompt came from the cache."""

    cached_tokens: int = 0


class CompletionUsage(BaseModel):
    """Tokens of a call, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails
    prompt_tokens_details: PromptTokensDetails


class _Head(BaseModel):
    id: str
    created: int = Field(description="Unix time, seconds")
    model: str
    system_fingerprint: str | None = Field(default=None, description="the target's identity: equal for replicas only")
    seed: int


class CompletionChoice(BaseModel):
    """One text. finish_reason is null until its last chunk."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None


class Completion(_Head):
    """The answer of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None


class AssistantMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The answer's one choice."""

    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(_Head):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChatDelta(BaseModel):
    """What a chunk adds; empty fields are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A chunk of the stream's one choice."""

    index: int = 0
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatChunk(_Head):
    """A chunk of the stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None


class ModelCard(BaseModel):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "outrider"
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
