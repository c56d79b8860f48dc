"""Reads which grammar a request asks for: OpenAI's `response_format`, vLLM's `structured_outputs`, its guided_* names.

Knows no tokenizer and compiles nothing. Everything that would be ignored is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from outrider.models.errors import RequestError
from outrider.models.grammar.bounds import MAX_JSON_BYTES, read_json
from outrider.models.grammar.spec import GrammarSpec, check_size, dump_schema, invalid_grammar
from outrider.models.http.errors import FieldError

T = TypeVar("T")

_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
FIELDS: Final = ("response_format", "structured_outputs", *_GUIDED, "guided_whitespace_pattern")
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
MAX_VALUES: Final = MAX_JSON_BYTES // 2
"""Of a field, nested ones too: a grammar with more has too many bytes. For the models of requests to bound."""
MAX_SPACED_CHARS: Final = 4 * MAX_JSON_BYTES
"""Of a schema's text, with its spaces and line breaks."""
_OPTIONS: Final = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_NAMES: Final[dict[type, str]] = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}
_EXPECTED: Final[dict[type, str]] = {dict: "an object", bool: "true or false", str: "a text"}


def grammar_of(fields: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar that a request's fields ask for; None for free text.

    fields: the request's values of `FIELDS`, as parsed JSON; those that are missing or null ask for nothing. Raises
    FieldError `invalid_grammar` or `unsupported_parameter`, naming the field.
    """
    asked = [name for name in FIELDS if fields.get(name) is not None and name != "guided_whitespace_pattern"]
    found = [spec for name in asked if (spec := _named(name, fields)) is not None]
    if len(found) > 1:
        raise FieldError(
            "invalid_grammar", f"both {asked[0]} and {asked[1]} ask for a grammar; leave one out", param=asked[1]
        )
    return found[0] if found else None


def _named(name: str, fields: Mapping[str, Any]) -> GrammarSpec | None:
    try:
        if name == "response_format":
            return _response_format(fields[name])
        if name == "structured_outputs":
            return _structured_outputs(fields[name], name)
        options = {"whitespace_pattern": fields.get("guided_whitespace_pattern")}
        return _structured_outputs({_GUIDED[name]: fields[name], **options}, name)
    except FieldError:
        raise
    except RequestError as error:
        raise FieldError(error.code, f"{name}: {error}", param=name, status=error.status) from None


def _response_format(value: Any) -> GrammarSpec | None:
    param = "response_format"
    kind = _checked(value, dict, param).get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return GrammarSpec("json_object")
        case "json_schema":
            param = f"{param}.json_schema"
            body = _checked(value.get("json_schema"), dict, param)
            if "schema" not in body:
                raise FieldError("invalid_grammar", f"{param} has no schema; add one", param=param)
            # OpenAI enforces a schema where it is strict, and does what it can otherwise.
            return GrammarSpec.json_schema(_parsed(body["schema"]), lenient=not _flag(body, "strict", param))
        case _:
            shown = repr(kind)[:60] if isinstance(kind, str) else _kind_of(kind)
            raise FieldError(
                "unsupported_parameter",
                f"response_format.type is {shown}; expected text, json_object or json_schema",
                param=param,
            )


def _structured_outputs(value: Any, param: str) -> GrammarSpec | None:
    given = _checked(value, dict, param)
    asked = {key: one for key, one in given.items() if one is not None and not key.startswith("_")}
    if unknown := next((key for key in asked if key not in (*_KINDS, *_OPTIONS)), None):
        raise FieldError(
            "unsupported_parameter", f"{param}.{unknown[:100]} is not supported; leave it out", param=param
        )
    options: dict[str, Any] = {}
    if "disable_any_whitespace" in asked:
        options["flexible"] = not _flag(asked, "disable_any_whitespace", param)
    if "whitespace_pattern" in asked:
        pattern = f"{param}: the whitespace pattern"
        options["pattern"] = _checked(asked["whitespace_pattern"], str, pattern, param)
    kinds = [key for key in _KINDS if key in asked and asked[key] is not False]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise FieldError("invalid_grammar", f"{param} has {kinds[0]} and {kinds[1]}; leave one out", param=param)
    given = asked[kinds[0]]
    match kinds[0]:
        case "json":
            if _flag(asked, "disable_additional_properties", param):
                given = _closed(_parsed(given))
            return GrammarSpec.json_schema(_parsed(given), **options)
        case "json_object":
            _flag(asked, "json_object", param)
            return GrammarSpec.json_schema({"type": "object"}, **options)
        case "choice":
            if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
                raise FieldError("invalid_grammar", f"{param}: the choices are not a list of texts", param=param)
            return GrammarSpec("choice", dump_schema(given))
        case kind:
            text = _checked(given, str, f"{param}: {kind}", param)
            return GrammarSpec("regex" if kind == "regex" else "grammar", text)


def _parsed(schema: Any) -> Any:
    """A schema; vLLM takes its text too. Raises RequestError for a text that is too large, before it is read."""
    if isinstance(schema, str):
        if len(schema) > MAX_SPACED_CHARS:
            raise invalid_grammar(f"the schema has {len(schema):,} characters; expected at most {MAX_SPACED_CHARS:,}")
        # An escape may stand for one byte.
        fewest = len(schema) - sum(map(schema.count, " \t\r\n\\")) - 4 * schema.count("\\u")
        if fewest > MAX_JSON_BYTES:
            raise invalid_grammar(
                f"the schema has {fewest:,} bytes besides spaces and escapes; expected at most {MAX_JSON_BYTES:,}"
            )
        return read_json(schema)
    return schema


def _closed(schema: Any) -> Any:
    """The schema, whose objects have no properties but those that it names. Raises RequestError for what is no JSON."""

    def close(inside: dict[str, Any]) -> dict[str, Any]:
        return {"additionalProperties": False, **inside} if isinstance(inside.get("properties"), dict) else inside

    text = dump_schema(schema)
    check_size(text)  # it only grows
    return json.loads(text, object_hook=close)


def _checked(value: Any, kind: type[T], name: str, param: str | None = None) -> T:
    """The value, if it is of this kind. name: what an error calls it. param: the field that it names; None: `name`."""
    if not isinstance(value, kind):
        found = f"{name} is a {_kind_of(value)}; expected {_EXPECTED[kind]}"
        raise FieldError("invalid_grammar", found, param=param or name)
    return value


def _flag(values: Mapping[str, Any], key: str, param: str) -> bool:
    value = values.get(key)
    return value is not None and _checked(value, bool, f"{param}.{key}")


def _kind_of(value: Any) -> str:
    return _NAMES.get(type(value), "number")
