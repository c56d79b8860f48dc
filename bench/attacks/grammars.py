"""Lists grammars that are costly to compile or to follow: bodies for the attacks by bodies."""

from __future__ import annotations

import json
from typing import Any


def hostile_grammars() -> dict[str, tuple[str, bytes]]:
    """Name -> (path, body). Before they were bounded, these took seconds, 500 MB, or ended the process."""
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
    return {
        f"grammar: {name}": ("/v1/sessions", json.dumps({**body, "grammar": grammar}).encode())
        for name, grammar in grammars.items()
    }
