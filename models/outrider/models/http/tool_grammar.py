"""Writes the grammar of a text that is calls of given tools, or free text, in Lark with JSON schemas, for llguidance.

For `tool_choice` "required" or a function's name, strict functions, and tools beside a JSON schema of the content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from outrider.models.http.openai_fields import Tool
from outrider.models.text.tokenizer import Tokenizer

_ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
# As chat templates show calls to the model. Without it a model could write spaces for ever.
_SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY: Final = r"/(.|\n)*/"
_NO_OBJECT: Final = r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"
"""Text that the Llama parser does not take for a call."""
FREE_TEXT: Final = "free_text"


def tool_grammar(
    form: str, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_one: bool, content: str | None = None
) -> str:
    """Lark rules for one call of one of the tools, or for one after the other.

    form: a key of `tool_calls.PARSERS`. content: what the text may be instead: None, calls only; `FREE_TEXT`, any text,
    also before the calls; else the right side of a rule.
    """
    key = "parameters" if form == "llama" else "arguments"
    rules = [f"call_{index}: %json {_call_schema(tool, key)}" for index, tool in enumerate(tools)]
    rules.append("one: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    is_free = content == FREE_TEXT
    plain = _NO_OBJECT if form == "llama" else _ANY
    if form == "hermes":
        begin, end = _marker(tokenizer, "<tool_call>"), _marker(tokenizer, "</tool_call>")
        first = _opened(tokenizer, "<tool_call>", rules) if is_free else begin
        call = f'{first} "\\n" one "\\n" {end}'
        calls = call if is_one else f'{call} ("\\n" {begin} "\\n" one "\\n" {end})*'
    elif form == "mistral":
        first = _opened(tokenizer, "[TOOL_CALLS]", rules) if is_free else _marker(tokenizer, "[TOOL_CALLS]")
        calls = f'{first} "[" one "]"' if is_one else f'{first} "[" one (", " one)* "]"'
    else:
        calls = "one" if is_one else 'one ("; " one)*'
        if is_free:  # the tag is optional, and only a call follows it
            tagged = _opened(tokenizer, "<|python_tag|>", rules, plain)
            rules.append(f"calls: {calls}")
            calls = f"calls | {tagged} calls"
    if content is not None:
        rules.append(f"content: {plain if is_free else content}")
        calls = f"{calls} | content"
    return "\n".join([f"start: {calls}", *rules, ""])


def _opened(tokenizer: Tokenizer, marker: str, rules: list[str], text: str = _ANY) -> str:
    """What free text and the marker after it are called; adds the rules. The text has no marker."""
    rules.append(f"TEXT: {text}")
    spelled = _marker(tokenizer, marker)
    if spelled.startswith("<["):  # a text has no special token
        rules.append(f"opened: TEXT {spelled}")
    else:
        rules.append(f"opened[lazy]: TEXT {spelled}")
    return "opened"


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
        # As `response_format`: keywords that the library does not know count where the schema is strict.
        "x-guidance": {**_SPELLING, **({} if function.strict else {"lenient": True})},
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
