"""Says which texts a completion call allows: by its own grammar, by its tools, after the model's reasoning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from outrider.models.errors import RequestError
from outrider.models.grammar.reasoning import after_reasoning
from outrider.models.grammar.spec import GrammarSpec, dump_schema, with_whitespace
from outrider.models.http.chat_reader import ChatStyle
from outrider.models.http.errors import FieldError
from outrider.models.http.openai import ChatRequest, GenerationRequest
from outrider.models.http.tool_grammar import FREE_TEXT, tool_grammar
from outrider.models.text.tokenizer import Tokenizer

_JSON_OBJECT: Final = GrammarSpec("json_schema", '{"type":"object"}')


def grammar_of_call(
    body: GenerationRequest, style: ChatStyle, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
) -> GrammarSpec | None:
    """The grammar of the texts of a call; None for free text.

    style: by `plan.chat_style`. prompts: token ids of each; a chat has one. Raises FieldError `invalid_grammar` or
    `unsupported_parameter`.
    """
    spec = body.grammar()
    if not isinstance(body, ChatRequest):
        return spec
    if style.tools is not None:
        spec = _with_tools(body, style, style.tools, tokenizer, spec)
    if spec is None or not style.has_reasoning:
        return spec
    try:
        return after_reasoning(spec, tokenizer, prompts[0])
    except RequestError as error:
        raise FieldError(error.code, str(error), param="response_format") from None


def _with_tools(
    body: ChatRequest, style: ChatStyle, form: str, tokenizer: Tokenizer, asked: GrammarSpec | None
) -> GrammarSpec | None:
    """The grammar where tools may be called. asked: that of the content."""
    is_one = style.is_one_call or style.is_forced
    content: str | None = None
    tools = body.tools_of_grammar
    if not tools:
        if asked is None and not body.has_strict_tools:
            return None
        tools = body.tools or []
        content = FREE_TEXT if asked is None else _content(asked)
    try:
        return GrammarSpec("grammar", tool_grammar(form, tools, tokenizer, is_one=is_one, content=content))
    except RequestError as error:
        raise FieldError(error.code, f"tools: {error}", param="tools", status=error.status) from None


def _content(asked: GrammarSpec) -> str:
    """A rule's right side for the content beside calls."""
    match asked.kind:
        case "json_schema" | "json_object":
            text = asked.text if asked.kind == "json_schema" else _JSON_OBJECT.text
            schema: Any = with_whitespace(json.loads(text), flexible=False)
            return f"%json {dump_schema(schema)}"
        case "choice":
            texts = dict.fromkeys(json.loads(asked.text))
            return " | ".join(json.dumps(each, ensure_ascii=False) for each in texts)
        case kind:
            raise FieldError(
                "unsupported_parameter",
                f'tools is not supported beside a grammar of kind {kind}; leave it out, or set tool_choice to "none"',
                param="tools",
            )
