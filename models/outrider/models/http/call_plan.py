"""Plans one completion call: how its texts are generated, cut and shown. The same for the cloud and the device.

How a model writes tool calls and reasoning is found from what its chat template contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.models.grammar.reasoning import BEGIN, END, marks_reasoning, opens_reasoning
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.chat_reader import ChatStyle
from outrider.models.http.errors import FieldError
from outrider.models.http.logprobs import LogprobWriter
from outrider.models.http.openai import ChatRequest, CompletionRequest, GenerationRequest
from outrider.models.http.openai_fields import NamedTool
from outrider.models.http.shapes import Look
from outrider.models.text.tokenizer import Tokenizer

MARKERS: Final = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
"""Of tool calls. Where they are special tokens, text must show them to be read."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes. tools: the format of its calls, a key of `tool_calls.PARSERS`; None: none that is known.

    has_reasoning: its template marks reasoning by `<think>`.
    """

    tools: str | None = None
    has_reasoning: bool = False


def dialect_of(tokenizer: Tokenizer) -> Dialect:
    """The dialect of this tokenizer's chat template."""
    with_tools = tokenizer.template_source(has_tools=True) or ""
    return Dialect(_tools_in(with_tools), marks_reasoning(tokenizer))


def _tools_in(template: str) -> str | None:
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return None if "<function=" in template else "hermes"  # Qwen3-Coder writes XML there
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return "llama"
    return None


def shown_ids(tokenizer: Tokenizer, *, has_tools: bool, has_reasoning: bool) -> frozenset[int]:
    """Special tokens that the text must show, so that calls and reasoning can be found in it."""
    names = [*(MARKERS if has_tools else ()), *((BEGIN, END) if has_reasoning else ())]
    return frozenset(index for name in names if (index := tokenizer.token_id(name)) is not None) & tokenizer.special_ids


def chat_style(body: GenerationRequest, dialect: Dialect, model: str) -> ChatStyle:
    """How the texts of a call are read. Raises FieldError for tools that this model's texts cannot be read for."""
    if not isinstance(body, ChatRequest):
        return ChatStyle()
    if body.may_call_tools and dialect.tools is None:
        raise FieldError(
            "unsupported_parameter",
            f"tools is not supported: the chat template of {model} has no tool calls that this server can read "
            "(Hermes, Llama 3, Mistral); leave it out",
            param="tools",
        )
    return ChatStyle(
        tools=dialect.tools if body.may_call_tools else None,
        has_reasoning=dialect.has_reasoning,
        is_one_call=body.parallel_tool_calls is False,
        is_forced=isinstance(body.tool_choice, NamedTool),
        shows_reasoning=body.include_reasoning is not False,
    )


def text_style(body: GenerationRequest, style: ChatStyle, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> TextStyle:
    """How the texts of a call are cut and shown. stop_ids: end a text."""
    return TextStyle(
        stop_strings=tuple(body.stop_strings),
        stop_ids=stop_ids,
        includes_stop=bool(body.include_stop_str_in_output),
        skips_special=body.skip_special_tokens is not False,
        shown=shown_ids(tokenizer, has_tools=style.tools is not None, has_reasoning=style.has_reasoning),
        keeps_pieces=body.num_logprobs is not None,
    )


def engine_logprobs(body: GenerationRequest) -> int | None:
    """Logprobs that a text needs: those to show, or those to choose the best by."""
    if body.num_logprobs is not None:
        return body.num_logprobs
    return 0 if body.num_each > body.num_kept else None


def look_of(body: GenerationRequest, style: ChatStyle, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> Look:
    """How the answer shows its texts. prompts: token ids of each prompt."""
    num_kept = body.num_kept
    insides = [style.has_reasoning and opens_reasoning(tokenizer, tuple(prompt)) for prompt in prompts]
    num_top = body.num_logprobs
    return Look(
        num_choices=len(prompts) * num_kept,
        logprobs=None if num_top is None else LogprobWriter(tokenizer, num_top),
        echoes=[echo for echo in _echoes(body, tokenizer, prompts) for _ in range(num_kept)],
        style=style,
        insides=[inside for inside in insides for _ in range(num_kept)],
    )


def _echoes(body: GenerationRequest, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What is echoed of each prompt: its text as it came; the text of its ids, or of those that are left of it."""
    if not isinstance(body, CompletionRequest) or not body.echo:
        return []
    return [
        given if isinstance(given, str) and body.truncate_prompt_tokens is None else tokenizer.decode(ids)
        for given, ids in zip(body.prompts(), prompts, strict=True)
    ]
