"""Lists grammars that are costly to compile or to follow: bodies for the attacks by bodies."""

from __future__ import annotations

import json
from typing import Any, Final

TEMPLATE: Final = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""Of a target whose chats may have tools."""
_CHAT: Final = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 64, "temperature": 1.0}


def hostile_grammars() -> dict[str, tuple[str, bytes]]:
    """Name -> (path, body), of sessions and chats. Before they were bounded, these took seconds, 500 MB, or ended the
    process.
    """
    defs: dict[str, Any] = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1500)}
    rules = "\n".join(f'A{i}: A{i + 1} | "x{i}"' for i in range(800))
    schemas: dict[str, Any] = {
        "definitions that refer to the next one": {"$defs": {**defs, "a1500": {}}, "$ref": "#/$defs/a0"},
        "500 properties, four times": {
            "allOf": [{"properties": {f"p{i}_{j}": {"type": "string"} for i in range(500)}} for j in range(4)]
        },
        "a multiple of a large number": {"type": "integer", "multipleOf": 999983},
        "many multiples": {"prefixItems": [{"type": "integer", "multipleOf": 97 + i} for i in range(90)]},
        "patterns that double": {
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^(.*[a-m].{{{30 + i}}}[n-z].*)$"} for i in range(20)
            }
        },
    }
    grammars: dict[str, dict[str, Any]] = {
        **{name: {"kind": "json_schema", "text": json.dumps(schema)} for name, schema in schemas.items()},
        "repetition of repetition": {"kind": "regex", "text": "((((a{100}){100}){100}){100})"},
        "an automaton that doubles": {"kind": "regex", "text": ".*[a-m].{200}[n-z].{100}"},
        "rules that refer to the next one": {"kind": "grammar", "text": f'start: A0\n{rules}\nA800: "x"'},
        "ambiguous rules": {"kind": "grammar", "text": 'start: a a a a\na: (a a | "x" | "")*'},
    }
    body = {"prompt": [5, 9], "max_tokens": 64, "temperature": 1.0}
    chats = {name: _asked_in_chat(grammar) for name, grammar in grammars.items()} | _hostile_tools(schemas)
    return {
        f"grammar: {name}": ("/v1/sessions", json.dumps({**body, "grammar": grammar}).encode())
        for name, grammar in grammars.items()
    } | {
        f"a chat's grammar: {name}": ("/v1/chat/completions", json.dumps({**_CHAT, **fields}).encode())
        for name, fields in chats.items()
    }


def _asked_in_chat(grammar: dict[str, Any]) -> dict[str, Any]:
    """The fields of OpenAI's and vLLM's that ask for this grammar."""
    if grammar["kind"] != "json_schema":
        return {"structured_outputs": {grammar["kind"]: grammar["text"]}}
    schema = {"name": "a", "schema": json.loads(grammar["text"]), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _hostile_tools(schemas: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields of chats whose grammar has many schemas, as many as the bounds take, or one that is costly."""

    def functions(schema: Any, count: int) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": {"name": f"function_{index}", "parameters": schema, "strict": True}}
            for index in range(count)
        ]

    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(480)}}
    small = {"type": "object", "properties": {name: {"type": "string"} for name in "abc"}}
    named = {"type": "function", "function": {"name": "function_0"}}
    return {
        "four functions of 480 properties": {"tools": functions(wide, 4)},
        "128 functions": {"tools": functions(small, 128), "tool_choice": "required"},
        **{
            f"a function: {name}": {"tools": functions(schemas[name], 1), "tool_choice": named}
            for name in ("definitions that refer to the next one", "many multiples", "patterns that double")
        },
    }
