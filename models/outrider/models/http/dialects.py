"""Finds how a model writes tool calls and reasoning, from what its chat template contains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.models.grammar.reasoning import BEGIN, END, marks_reasoning
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
