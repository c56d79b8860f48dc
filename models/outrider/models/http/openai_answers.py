"""Documents the OpenAI-compatible answers, which `shapes` writes: whole ones, and the chunks of streams.

An addition to OpenAI's fields: `seed`, so that any answer can be reproduced.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class CompletionTokensDetails(BaseModel):
    """Drafted tokens, by the target's verdict; with a `prediction`, its tokens, by whether the text has them."""

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


class SpeculativeDecoding(BaseModel):
    """How many of a text's drafted tokens were accepted, by vLLM's names. A step is a pass that verified some."""

    mean_acceptance_length: float = Field(description="tokens of a step, with the target's own")
    draft_acceptance_rate: float = Field(description="of the drafted tokens verified")
    acceptance_histogram: list[int] = Field(description="steps that accepted 0, 1, 2, ... drafted tokens")
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int = Field(description="drafted tokens verified")
    num_spec_tokens: int = Field(description="the most that a step verified")


class RequestMetrics(BaseModel):
    """Of a call with one text; in a stream beside its usage."""

    speculative_decoding: SpeculativeDecoding


class _Head(BaseModel):
    id: str
    created: int = Field(description="Unix time, seconds")
    model: str
    system_fingerprint: str | None = Field(default=None, description="the target's identity: equal for replicas only")
    seed: int


class CompletionLogprobs(BaseModel):
    """Of each token of a text: itself, its logprob, the likeliest tokens with theirs, and where it begins."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(BaseModel):
    """A token and the natural logarithm of its probability. bytes: of its text, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the text, and the likeliest tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of each token of a chat's text, reasoning and tool calls included."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(BaseModel):
    """A function's name and its arguments, as the model wrote them: JSON text, if it made no mistake."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(BaseModel):
    """What a chunk adds to a call: the name in its first one."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What a chunk adds to call `index`; id and type in its first one."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class CompletionChoice(BaseModel):
    """One text. finish_reason is null until its last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(_Head):
    """The answer of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: CompletionUsage | None = None
    metrics: RequestMetrics | None = None


class AssistantMessage(BaseModel):
    """What the model says. content: null beside tool calls. reasoning_content: as DeepSeek and vLLM name it.

    What is empty of tool_calls and reasoning_content is left out.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One text of the answer."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason


class ChatCompletion(_Head):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: CompletionUsage
    metrics: RequestMetrics | None = None


class ChatDelta(BaseModel):
    """What a chunk adds; empty fields are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """A chunk of one of the stream's choices."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


class ChatChunk(_Head):
    """A chunk of the stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    metrics: RequestMetrics | None = None


class ModelCard(BaseModel):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "outrider"
    parent: str | None = Field(default=None, description="of an adapter: the model that it adapts")
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
