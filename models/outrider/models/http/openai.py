"""Defines the OpenAI-compatible messages.

An unsupported field that would change the output is refused by name. Unknown fields are ignored, because clients send
many. Additions to OpenAI's fields: `top_k`, `min_p`, `ignore_eos`, `stop_token_ids`, `priority`, `deadline_ms` and most
rules of `openai_rules` in requests; `seed` in answers, so that any answer can be reproduced.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http import structured
from outrider.models.http.errors import FieldError
from outrider.models.http.openai_rules import RuleParameters
from outrider.models.protocol import (
    DEADLINE,
    MAX_COUNT,
    NO_NEAR_GREEDY,
    PRIORITY,
    DeadlineMs,
    Integer,
    Number,
    Priority,
    StopIds,
    TokenId,
)
from outrider.models.sampling import MAX_SEED, SamplingParams

MAX_PROMPTS: Final = 64
MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 1000
MAX_MESSAGES: Final = 2048
MAX_TEMPLATE_VALUES: Final = 1024
"""Values in `chat_template_kwargs`, at any depth: a template may loop over them once per message."""
DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default for /v1/completions; chat continues to the end of the context."""

TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
FinishReason = Literal["stop", "length"]

# Field -> the values that change nothing, besides null. Those of OpenAI first, then those of other servers.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": (),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
}


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # True == 1 in Python, and not in JSON.
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _by_shape(expected: str, choose: Callable[[Any], TypeAdapter[Any] | None], schema: Any) -> PlainValidator:
    """Validates a field as the one type that `choose` names for its shape.

    pydantic tries every member of a union and collects the errors of each.
    """

    def validate(value: Any) -> Any:
        adapter = choose(value)
        if adapter is None:
            raise PydanticCustomError("wrong_shape", "expected {expected}", {"expected": expected})
        return adapter.validate_python(value)

    return PlainValidator(validate, json_schema_input_type=schema)


_TEXT: Final[TypeAdapter[Any]] = TypeAdapter(str)
_STOP: Final[TypeAdapter[Any]] = TypeAdapter(StopString)
_STOPS: Final[TypeAdapter[Any]] = TypeAdapter(StopStrings)
_PROMPT_LISTS: Final[dict[type, TypeAdapter[Any]]] = {str: TypeAdapter(Texts), list: TypeAdapter(TokenLists)}
_PROMPT_IDS: Final[TypeAdapter[Any]] = TypeAdapter(TokenIds)


def _prompt_shape(value: Any) -> TypeAdapter[Any] | None:
    if isinstance(value, str):
        return _TEXT
    if isinstance(value, list):
        return _PROMPT_LISTS.get(type(value[0]), _PROMPT_IDS) if value else _PROMPT_IDS
    return None


def _stop_shape(value: Any) -> TypeAdapter[Any] | None:
    return _STOP if isinstance(value, str) else _STOPS if isinstance(value, list) else None


def _bounded_values(variables: dict[str, Any]) -> dict[str, Any]:
    left: list[Any] = [variables]
    count = 0
    while left:
        value = left.pop()
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(inside)
        if count > MAX_TEMPLATE_VALUES:
            raise PydanticCustomError(
                "too_many_values", "expected at most {limit} values in all", {"limit": MAX_TEMPLATE_VALUES}
            )
        left.extend(inside)
    return variables


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    include_usage: StrictBool | None = None


def _document_unsupported(schema: dict[str, Any], model: type[GenerationRequest]) -> None:
    for name, neutral in model.neutral_values().items():
        schema["properties"][name] = {"enum": [*neutral, None], "description": "not supported: these change nothing"}


class GenerationRequest(RuleParameters):
    """Fields of both kinds of completion. null means the default."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_document_unsupported)

    _unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = Field(default=None, description="the served model's name; may be left out")
    max_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    temperature: Number | None = Field(
        default=None, ge=0.0, le=100.0, description="1 if unset; 0 is greedy", json_schema_extra=NO_NEAR_GREEDY
    )
    top_p: Number | None = Field(default=None, gt=0.0, le=1.0)
    top_k: Integer | None = Field(default=None, ge=0, le=MAX_COUNT)
    min_p: Number | None = Field(default=None, ge=0.0, le=1.0)
    seed: Integer | None = Field(default=None, ge=0, le=MAX_SEED, description="random if unset, and reported")
    stop: (
        Annotated[
            StopString | StopStrings, _by_shape("a text or a list of texts", _stop_shape, StopString | StopStrings)
        ]
        | None
    ) = None
    stop_token_ids: StopIds | None = Field(default=None, description="unset: the model's own")
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = Field(default=None, description=PRIORITY)
    deadline_ms: DeadlineMs | None = Field(default=None, description=DEADLINE)
    response_format: Any = Field(default=None, description="text, json_object or json_schema, as OpenAI's")
    structured_outputs: Any = Field(default=None, description="json, json_object, regex, choice or grammar, as vLLM's")
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None

    @classmethod
    def neutral_values(cls) -> dict[str, tuple[Any, ...]]:
        """Unsupported fields, each with the values, besides null, that change nothing."""
        return {**_NEUTRAL, **cls._unsupported}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            for name, neutral in cls.neutral_values().items():
                if name in raw and not _is_neutral(raw[name], neutral):
                    allowed = f", except as {' or '.join(map(json.dumps, neutral))}" if neutral else ""
                    raise FieldError(
                        "unsupported_parameter", f"{name} is not supported{allowed}; leave it out", param=name
                    )
        return raw

    @property
    def stop_strings(self) -> list[str]:
        """Strings before which the text ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def grammar(self, *, after: str = "") -> GrammarSpec | None:
        """The grammar that the request asks for; None for free text. after: as `grammar_of`; raises as it."""
        return structured.grammar_of({name: getattr(self, name) for name in structured.FIELDS}, after=after)

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


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    _unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"max_completion_tokens": ()}

    prompt: Annotated[
        str | TokenIds | Texts | TokenLists,
        _by_shape(
            "a text, a list of token ids, or a list of either", _prompt_shape, str | TokenIds | Texts | TokenLists
        ),
        Field(examples=["def add(a, b):"]),
    ]

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


ContentParts = Annotated[list[ContentPart], Field(fail_fast=True)]
_PARTS: Final[TypeAdapter[Any]] = TypeAdapter(ContentParts)


def _content_shape(value: Any) -> TypeAdapter[Any] | None:
    return _TEXT if isinstance(value, str) else _PARTS if isinstance(value, list) else None


class ChatMessage(BaseModel):
    """One turn of a conversation. The chat template gets other fields unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: (
        Annotated[str | ContentParts, _by_shape("a text or a list of parts", _content_shape, str | ContentParts)] | None
    ) = None

    def for_template(self) -> dict[str, Any]:
        """The message for a chat template: its content is one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


Messages = Annotated[
    list[ChatMessage],
    Field(
        fail_fast=True,
        min_length=1,
        max_length=MAX_MESSAGES,
        examples=[[{"role": "user", "content": "Write a function that adds two numbers."}]],
    ),
]
TemplateValues = Annotated[dict[str, Any], AfterValidator(_bounded_values)]


class Conversation(Protocol):
    """What becomes a prompt through a chat template."""

    messages: list[ChatMessage]
    chat_template_kwargs: dict[str, Any] | None


class RenderRequest(BaseModel):
    """POST /v1/render: a conversation, to be made token ids by the model's chat template. A chat request is one too."""

    model_config = ConfigDict(extra="ignore")

    messages: Messages
    chat_template_kwargs: TemplateValues | None = Field(default=None, description="variables for the chat template")
    tokenizer: str | None = Field(default=None, description="fingerprint of the caller's; another one is refused")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    _unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "documents": ([],),
    }

    messages: Messages
    max_completion_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    chat_template_kwargs: TemplateValues | None = Field(default=None, description="variables for the chat template")


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
