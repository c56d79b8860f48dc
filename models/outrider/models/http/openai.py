"""Defines the OpenAI-compatible messages.

An unsupported field that would change the output is refused by name. Unknown fields are ignored, because clients send
many. Additions to OpenAI's fields: `top_k`, `min_p`, `ignore_eos` and `stop_token_ids` in requests; `seed` in answers,
so that any answer can be reproduced.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from outrider.models.http.errors import FieldError
from outrider.models.protocol import TokenId
from outrider.models.sampling import MAX_SEED, SamplingParams

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1000
DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default for /v1/completions; chat continues to the end of the context."""

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=64)]
TokenLists = Annotated[list[TokenIds], Field(min_length=1, max_length=64)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
FinishReason = Literal["stop", "length"]

# Field -> the values that change nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields of both kinds of completion. null means the default."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = Field(default=None, description="the served model's name; may be left out")
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: FiniteFloat | None = Field(default=None, ge=0.0, le=100.0, description="1 if unset; 0 is greedy")
    top_p: FiniteFloat | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    min_p: FiniteFloat | None = Field(default=None, ge=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="random if unset, and reported")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, description="unset: the model's own")
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Any = Field(default=None, description="only 1")
    best_of: Any = Field(default=None, description="only 1")
    echo: Any = Field(default=None, description="only false")
    logprobs: Any = Field(default=None, description="not supported")
    top_logprobs: Any = Field(default=None, description="not supported")
    suffix: Any = Field(default=None, description="not supported")
    logit_bias: Any = Field(default=None, description="not supported")
    presence_penalty: Any = Field(default=None, description="only 0")
    frequency_penalty: Any = Field(default=None, description="only 0")
    tools: Any = Field(default=None, description="not supported")
    functions: Any = Field(default=None, description="not supported")
    tool_choice: Any = Field(default=None, description="only none or auto")
    response_format: Any = Field(default=None, description="only text")

    @property
    def stop_strings(self) -> list[str]:
        """Strings before which the text ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """The sampler's parameters, with a random seed if none was given. Raises SamplingError."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            # 53 bits, so that a reported seed survives clients whose numbers are floats.
            seed=secrets.randbits(53) if self.seed is None else self.seed,
        )

    def refuse_unsupported(self) -> None:
        """Raises FieldError 400 `unsupported_parameter` for a field that asks for something unsupported."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                allowed = " or ".join(map(repr, neutral))
                raise FieldError(
                    "unsupported_parameter",
                    f"{name} is not supported, except as {allowed}; leave it out",
                    param=name,
                )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | TokenIds | Texts | TokenLists

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ContentPart(BaseModel):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn of a conversation. The chat template gets other fields unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template: its content is one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables for the chat template")


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
