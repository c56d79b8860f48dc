"""Defines the OpenAI-compatible requests; `openai_answers` has the answers.

An unsupported field that would change the output is refused by name. Unknown fields are ignored, because clients send
many. Additions to OpenAI's fields: `top_k`, `min_p`, `ignore_eos`, `stop_token_ids`, `priority`, `deadline_ms` and most
logit processors of `openai_fields` in requests.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http import structured
from outrider.models.http.errors import FieldError
from outrider.models.http.openai_fields import (
    NEUTRAL,
    REASONS,
    GrammarValue,
    NamedTool,
    Prediction,
    ProcessorParameters,
    Prompt,
    Stop,
    StreamOptions,
    TemplateValues,
    TextOrParts,
    Tool,
    ToolChoice,
    Tools,
    is_neutral,
    with_read_arguments,
)
from outrider.models.picks.sampling import MAX_SEED, SamplingParams
from outrider.models.wire.fields import (
    DEADLINE,
    MAX_COUNT,
    MAX_TOP_LOGPROBS,
    MODEL,
    PRIORITY,
    DeadlineMs,
    Integer,
    Number,
    Priority,
    StopIds,
)

MAX_CHOICES: Final = 128
"""Texts of one call, over all its prompts; OpenAI's for one prompt."""
MAX_MESSAGES: Final = 2048
DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default for /v1/completions; chat continues to the end of the context."""


Truncation = Annotated[
    Integer | None,
    Field(ge=-1, le=MAX_COUNT, description="use the prompt's last tokens only; -1: as many as fit"),
]


def _document_unsupported(schema: dict[str, Any], model: type[GenerationRequest]) -> None:
    for name, neutral in model.neutral_values().items():
        schema["properties"][name] = {"enum": [*neutral, None], "description": "not supported: these change nothing"}


class GenerationRequest(ProcessorParameters):
    """Fields of both kinds of completion. null means the default."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_document_unsupported)

    _unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = Field(default=None, description=MODEL)
    max_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    temperature: Number | None = Field(
        default=None, ge=0.0, le=100.0, description="1 if unset; 0, and anything under 0.0001, is greedy"
    )
    top_p: Number | None = Field(default=None, ge=0.0, le=1.0, description="0 is greedy")
    top_k: Integer | None = Field(default=None, ge=-1, le=MAX_COUNT, description="0 or -1: off")
    min_p: Number | None = Field(default=None, ge=0.0, le=1.0)
    seed: Integer | None = Field(default=None, ge=0, le=MAX_SEED, description="random if unset, and reported")
    stop: Stop | None = None
    stop_token_ids: StopIds | None = Field(default=None, description="beside the model's own")
    ignore_eos: StrictBool | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = Field(default=None, ge=1, le=MAX_CHOICES, description="texts for each prompt; 1 if unset")
    prediction: Prediction | None = Field(default=None, description="a text that the answer may repeat")
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    truncate_prompt_tokens: Truncation = None
    add_special_tokens: StrictBool | None = None
    priority: Priority | None = Field(default=None, description=PRIORITY)
    deadline_ms: DeadlineMs | None = Field(default=None, description=DEADLINE)
    response_format: GrammarValue = Field(default=None, description="text, json_object or json_schema, as OpenAI's")
    structured_outputs: GrammarValue = Field(
        default=None, description="json, json_object, regex, choice or grammar, as vLLM's"
    )
    guided_json: GrammarValue = None
    guided_json_object: GrammarValue = None
    guided_regex: GrammarValue = None
    guided_choice: GrammarValue = None
    guided_grammar: GrammarValue = None
    guided_whitespace_pattern: GrammarValue = None

    @classmethod
    def neutral_values(cls) -> dict[str, tuple[Any, ...]]:
        """Unsupported fields, each with the values, besides null, that change nothing."""
        return {**NEUTRAL, **cls._unsupported}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            for name, neutral in cls.neutral_values().items():
                if name in raw and not is_neutral(raw[name], neutral):
                    allowed = f", except as {' or '.join(map(json.dumps, neutral))}" if neutral else ""
                    reason = f": {REASONS[name]}" if name in REASONS else ""
                    words = f"{name} is not supported{allowed}; leave it out{reason}"
                    raise FieldError("unsupported_parameter", words, param=name)
        return raw

    @property
    def stop_strings(self) -> list[str]:
        """Strings before which the text ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def grammar(self) -> GrammarSpec | None:
        """The grammar that the request asks for; None for free text. Raises as `grammar_of`."""
        return structured.grammar_of({name: getattr(self, name) for name in structured.FIELDS})

    @property
    def repeats_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_prompts(self) -> int:
        """Prompts of the call: a conversation is one."""
        return 1

    def most_tokens(self, max_positions: int) -> int:
        """Tokens that a text may have. max_positions: of the model."""
        return self.max_tokens or max_positions

    @property
    def num_each(self) -> int:
        """Texts to generate for each prompt."""
        return self.num_kept

    @property
    def num_kept(self) -> int:
        """Texts of each prompt in the answer."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to show for each token; None: no logprobs."""
        return None

    def require_few(self, num_prompts: int) -> None:
        """Raises FieldError for more texts than one call may have."""
        if (num := num_prompts * self.num_each) > MAX_CHOICES:
            raise FieldError(
                "invalid_parameter",
                f"n: the request asks for {num} texts; expected at most {MAX_CHOICES} in all. Send several requests",
                param="n",
            )

    def sampling(self) -> SamplingParams:
        """The sampler's parameters, with a random seed if none was given. Raises SamplingError."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature < 1e-4 or self.top_p == 0.0:  # OpenAI's ranges have both, and `SamplingParams` refuses them
            temperature = 0.0
        return SamplingParams(
            temperature=temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            # 53 bits, so that a reported seed survives clients whose numbers are floats.
            seed=secrets.randbits(53) if self.seed is None else self.seed,
        )


def _none_for_false(value: Any) -> Any:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    _unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "max_completion_tokens": (),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }

    prompt: Prompt = Field(examples=["def add(a, b):"])
    best_of: Integer | None = Field(
        default=None, ge=1, le=MAX_CHOICES, description="texts to choose the n best of, by mean logprob; not streamed"
    )
    echo: StrictBool | None = Field(default=None, description="the text begins with the prompt")
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS), BeforeValidator(_none_for_false)] | None = Field(
        default=None, description="likeliest tokens to show for each token, besides the token itself"
    )
    suffix: str | None = Field(default=None, description="what follows the text, where the model can fill in")

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.num_kept:
            raise FieldError(
                "invalid_parameter", f"best_of: expected at least n, which is {self.num_kept}", param="best_of"
            )
        if self.stream and self.num_each > self.num_kept:
            raise FieldError(
                "invalid_parameter", "best_of: a stream cannot choose; leave one of them out", param="best_of"
            )
        if self.echo and self.logprobs is not None:
            raise FieldError(
                "unsupported_parameter",
                "echo is not supported with logprobs: this server has none of the prompt; leave one of them out",
                param="echo",
            )
        if self.echo and self.suffix:
            raise FieldError("invalid_parameter", "echo: with suffix, expected false; leave it out", param="echo")
        return self

    @property
    def num_prompts(self) -> int:
        """Prompts of the call."""
        return len(self.prompts())

    def most_tokens(self, max_positions: int) -> int:
        """Tokens that a text may have."""
        return self.max_tokens or DEFAULT_MAX_TOKENS

    @property
    def num_each(self) -> int:
        """Texts to generate for each prompt."""
        return max(self.best_of or 1, self.num_kept)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to show for each token; None: no logprobs."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatMessage(BaseModel):
    """One turn of a conversation. The chat template gets other fields unchanged, unless they are null."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: TextOrParts | None = None

    def for_template(self, developer: str = "developer") -> dict[str, Any]:
        """The message for a chat template: its content is one text. developer: what the template calls this role."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        # Templates ask whether a field is there, and clients send back all fields of an answer.
        others = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if calls := others.pop("tool_calls", None):
            others["tool_calls"] = with_read_arguments(calls)
        role = developer if self.role == "developer" else self.role
        return {**others, "role": role, "content": content or ""}


Messages = Annotated[
    list[ChatMessage],
    Field(
        fail_fast=True,
        min_length=1,
        max_length=MAX_MESSAGES,
        examples=[[{"role": "user", "content": "Write a function that adds two numbers."}]],
    ),
]


class Conversation(BaseModel):
    """What becomes a prompt through a chat template."""

    model_config = ConfigDict(extra="ignore")

    messages: Messages
    chat_template_kwargs: TemplateValues | None = Field(default=None, description="variables for the chat template")
    tools: Tools | None = Field(default=None, description="functions that the model may call")
    truncate_prompt_tokens: Truncation = None

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools that the template shows to the model."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None


class RenderRequest(Conversation):
    """POST /v1/render: a conversation, to be made token ids by the model's chat template. A chat request is one too."""

    model: str | None = Field(default=None, description=MODEL)
    tokenizer: str | None = Field(default=None, description="fingerprint of the caller's; another one is refused")


class ChatRequest(Conversation, GenerationRequest):
    """POST /v1/chat/completions."""

    _unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
    }

    max_completion_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: StrictBool | None = None
    top_logprobs: Integer | None = Field(
        default=None, ge=0, le=MAX_TOP_LOGPROBS, description="likeliest tokens to show for each token"
    )
    tool_choice: ToolChoice | None = Field(default=None, description='"auto" if unset')
    parallel_tool_calls: StrictBool | None = Field(default=None, description="false: at most one call is answered")
    include_reasoning: StrictBool | None = Field(default=None, description="false: reasoning is left out")

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError(
                "invalid_parameter", "top_logprobs: expected logprobs to be true as well", param="top_logprobs"
            )
        choice = self.tool_choice
        if not self.tools and not (choice is None or choice in ("none", "auto")):
            raise FieldError("invalid_parameter", "tool_choice: expected tools to choose from", param="tool_choice")
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise FieldError("invalid_parameter", "tool_choice: expected the name of one of tools", param="tool_choice")
        return self

    def most_tokens(self, max_positions: int) -> int:
        """Tokens that a text may have. max_positions: of the model."""
        return self.max_completion_tokens or super().most_tokens(max_positions)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to show for each token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def tools_of_grammar(self) -> list[Tool]:
        """The tools of which the answer must be calls, with arguments of their schemas; empty: any text is allowed."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool.function.name == name]
        return list(self.tools or ()) if self.tool_choice == "required" else []

    @property
    def has_strict_tools(self) -> bool:
        """Whether a call that the answer may hold must follow its schema."""
        return self.may_call_tools and any(tool.function.strict for tool in self.tools or ())

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools that the template shows to the model: none where none may be called."""
        return super().tools_for_template() if self.may_call_tools else None
