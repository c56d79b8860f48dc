"""Defines the fields of OpenAI's requests that are more than a number: unions by shape, bounded values, tools, and the
logit processors.

`presence_penalty`, `frequency_penalty` and `logit_bias` are OpenAI's; the other processors are vLLM's and llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from outrider.models.errors import RequestError
from outrider.models.http import structured
from outrider.models.http.bodies import load
from outrider.models.processors.options import ProcessorOptions, processors_of
from outrider.models.wire.fields import (
    MAX_BAD_WORDS,
    AllowedIds,
    Fraction,
    LogitBias,
    MinTokens,
    ProcessorFields,
    RepetitionPenalty,
    StopString,
    StopStrings,
    TextPenalty,
    TokenId,
    TypicalP,
)

MAX_PROMPTS: Final = 64
MAX_TEMPLATE_VALUES: Final = 1024
"""Values in `chat_template_kwargs`, at any depth: a template may loop over them once per message."""
MAX_TOOLS: Final = 128
"""OpenAI's."""
MAX_TOOL_VALUES: Final = 8192
"""Values in `tools`, at any depth."""
MAX_BAD_STRINGS: Final = MAX_BAD_WORDS // 2
"""Each may become two token sequences."""
MAX_BAD_CHARS: Final = 256

# Field -> the values that change nothing, besides null. Those of OpenAI first, then those of other servers, then one of
# our own sessions.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
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
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "logprob_token_ids": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "spaces_between_special_tokens": (True,),
    "repetition_detection": (),
    "watermarking": (),
    "cache_salt": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "steady": (False,),
}
REASONS: Final[dict[str, str]] = {
    "steady": "answers of this API have no fixed pace. To hide a text on its way to the verifier, use `outrider run`, "
    "`chat` or `serve` with --steady; `serve` then does so for every request",
}
"""Of fields that are refused, where the name alone does not tell what to do."""


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value of an unsupported field changes nothing."""
    # True == 1 in Python, and not in JSON.
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]


def by_shape(expected: str, shapes: Mapping[Any, Any], shape_of: Callable[[Any], Any] = type) -> WrapValidator:
    """Validates a field as the one type that `shapes` has for its shape.

    pydantic tries every member of a union and collects the errors of each.
    """
    adapters: dict[Any, TypeAdapter[Any]] = {shape: TypeAdapter(kind) for shape, kind in shapes.items()}

    def validate(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
        adapter = adapters.get(shape_of(value))
        if adapter is None:
            raise PydanticCustomError("wrong_shape", "expected {expected}", {"expected": expected})
        return adapter.validate_python(value)

    # Not PlainValidator: that serializes what it has serialized, and warns with the text that a client sent.
    return WrapValidator(validate)


def _prompt_shape(value: Any) -> Any:
    if not isinstance(value, list):
        return type(value)
    first = type(value[0]) if value else int
    return list, first if first in (str, list) else int


Prompt = Annotated[
    str | TokenIds | Texts | TokenLists,
    by_shape(
        "a text, a list of token ids, or a list of either",
        {str: str, (list, int): TokenIds, (list, str): Texts, (list, list): TokenLists},
        _prompt_shape,
    ),
]
Stop = Annotated[StopString | StopStrings, by_shape("a text or a list of texts", {str: StopString, list: StopStrings})]


def _at_most(limit: int, plain: Callable[[Any], Any] = lambda value: value) -> AfterValidator:
    """Refuses a value with more values in it, at any depth. plain: the value as JSON has it."""

    def bound(values: Any) -> Any:
        left: list[Any] = [plain(values)]
        count = 0
        while left:
            value = left.pop()
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            count += len(inside)
            if count > limit:
                raise PydanticCustomError("too_many_values", "expected at most {limit} values in all", {"limit": limit})
            left.extend(inside)
        return values

    return AfterValidator(bound)


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > structured.MAX_SPACED_CHARS:
        raise PydanticCustomError(
            "too_long", "expected at most {limit} characters", {"limit": structured.MAX_SPACED_CHARS}
        )
    return value


# Any JSON, which `structured` reads once it has a bound: a request with more waits for nothing.
GrammarValue = Annotated[
    Any,
    _at_most(structured.MAX_VALUES),
    AfterValidator(_short),
    Field(
        json_schema_extra={
            "maxLength": structured.MAX_SPACED_CHARS,
            "maxItems": structured.MAX_VALUES,
            "maxProperties": structured.MAX_VALUES,
        }
    ),
]


class StreamOptions(BaseModel):
    """What a stream carries beside the text. continuous_usage_stats: each chunk has the usage so far, as vLLM's."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class TextPart(BaseModel):
    """A part of a text."""

    type: Literal["text"]
    text: str


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]
TextOrParts = Annotated[str | TextParts, by_shape("a text or a list of parts", {str: str, list: TextParts})]


class Prediction(BaseModel):
    """A text that the answer may repeat, in large parts: it is drafted from it."""

    type: Literal["content"]
    content: TextOrParts

    @property
    def text(self) -> str:
        """The text."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


BadStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_CHARS)]],
    Field(fail_fast=True, max_length=MAX_BAD_STRINGS),
]


class ProcessorParameters(BaseModel):
    """Logit processors of a completion, as `ProcessorFields`, but bad words are texts."""

    repetition_penalty: RepetitionPenalty | None = Field(default=None, description="of ids in prompt or text; 1: off")
    presence_penalty: TextPenalty | None = None
    frequency_penalty: TextPenalty | None = None
    logit_bias: LogitBias | None = Field(default=None, description="added to logits, by token id")
    bad_words: BadStrings | None = Field(default=None, description="words that the text never has")
    min_tokens: MinTokens | None = Field(default=None, description="tokens of text before an id may end it")
    allowed_token_ids: AllowedIds | None = Field(default=None, description="the only ids of the text")
    typical_p: TypicalP | None = None
    xtc_probability: Fraction | None = Field(default=None, description="chance that XTC excludes top choices; 0: off")
    xtc_threshold: Fraction | None = Field(
        default=None, description="of XTC: least probability of a top choice; 0.1 if unset"
    )

    def processors(self, bad_ids: Sequence[Sequence[int]] = ()) -> ProcessorOptions:
        """The processors. bad_ids: `bad_words` as token ids. Raises SamplingError."""
        given = {name: value for name in ProcessorParameters.model_fields if (value := getattr(self, name)) is not None}
        return processors_of(ProcessorFields.model_construct(**{**given, "bad_words": bad_ids}))


class FunctionDefinition(BaseModel):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    """A tool; only functions are supported."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(BaseModel):
    """A function by its name."""

    name: str


class NamedTool(BaseModel):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


Tools = Annotated[
    list[Tool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    _at_most(MAX_TOOL_VALUES, lambda tools: [tool.model_dump(exclude_unset=True) for tool in tools]),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    by_shape(
        '"none", "auto", "required" or the name of a function',
        {str: Literal["none", "auto", "required"], dict: NamedTool},
    ),
]
TemplateValues = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VALUES), _at_most(MAX_TEMPLATE_VALUES)]


def with_read_arguments(calls: Any) -> Any:
    """The `tool_calls` of an earlier message with their arguments as objects, as chat templates expect them.

    OpenAI's messages have them as JSON text. What is no such text stays as it is. Raises RequestError for a text with
    more parts than a body may have.
    """
    if not isinstance(calls, list):
        return calls
    return [_read_one(call) for call in calls]


def _read_one(call: Any) -> Any:
    try:
        arguments = call["function"]["arguments"]
        read = load(arguments.encode(), "the text of a tool call's arguments") if isinstance(arguments, str) else None
    except (TypeError, LookupError, UnicodeEncodeError):  # of another shape
        return call
    except RequestError as error:
        if error.code != "malformed_json":
            raise
        return call
    return {**call, "function": {**call["function"], "arguments": read}} if isinstance(read, dict) else call
