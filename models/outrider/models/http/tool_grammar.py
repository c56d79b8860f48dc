"""Writes the grammar of a text that must be calls of given tools, in Lark with JSON schemas, as llguidance reads it.

For `tool_choice` "required" or a function's name: the arguments follow the schemas of the tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from outrider.models.http.tools import Tool
from outrider.models.tokenizer import Tokenizer

_ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}


def tool_grammar(form: str, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_one: bool) -> str:
    """Lark rules for one call of one of the tools, or for one after the other. form: a key of `tool_calls.PARSERS`."""
    key = "parameters" if form == "llama" else "arguments"
    calls = "\n".join(f"call_{index}: %json {_call_schema(tool, key)}" for index, tool in enumerate(tools))
    one_of = " | ".join(f"call_{index}" for index in range(len(tools)))
    if form == "hermes":
        begin, end = _marker(tokenizer, "<tool_call>"), _marker(tokenizer, "</tool_call>")
        call, between = f'{begin} "\\n" one "\\n" {end}', '"\\n"'
        start = "call" if is_one else f"call ({between} call)*"
        return f"start: {start}\ncall: {call}\none: {one_of}\n{calls}\n"
    if form == "mistral":
        begin = _marker(tokenizer, "[TOOL_CALLS]")
        start = f'{begin} "[" one "]"' if is_one else f'{begin} "[" one (", " one)* "]"'
        return f"start: {start}\none: {one_of}\n{calls}\n"
    start = "one" if is_one else 'one ("; " one)*'
    return f"start: {start}\none: {one_of}\n{calls}\n"


def _call_schema(tool: Tool, key: str) -> str:
    function = tool.function
    arguments = function.parameters if function.parameters is not None else _ANY_ARGUMENTS
    # References of a schema point at its own root, which is one level deeper here.
    properties = {"name": {"const": function.name}, key: _moved(arguments, f"#/properties/{key}")}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["name", key],
        "additionalProperties": False,
    }
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _marker(tokenizer: Tokenizer, text: str) -> str:
    """A marker in Lark: by its id where it is a special token, which has no text there."""
    index = tokenizer.token_id(text)
    return f"<[{index}]>" if index is not None and index in tokenizer.special_ids else json.dumps(text)
