"""Reads which grammar a request asks for: OpenAI's `response_format`, vLLM's `structured_outputs`, its guided_* names.

Knows no tokenizer and compiles nothing. Everything that would be ignored is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outrider.models.errors import RequestError
from outrider.models.grammar.bounds import MAX_JSON_BYTES, read_json
from outrider.models.grammar.spec import GrammarSpec, dump_schema, invalid_grammar, with_whitespace
from outrider.models.http.errors import FieldError

JSON_OBJECT: Final[dict[str, Any]] = {"type": "object"}

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


def grammar_of(fields: Mapping[str, Any], *, after: str = "") -> GrammarSpec | None:
    """The grammar that a request's fields ask for; None for free text.

    fields: the request's values of `FIELDS`, as parsed JSON; those that are missing or null ask for nothing. after: the
    token that ends the model's reasoning, where it reasons first. Raises FieldError `invalid_grammar` or
    `unsupported_parameter`, naming the field.
    """
    asked = [name for name in FIELDS if fields.get(name) is not None and name != "guided_whitespace_pattern"]
    found = [spec for name in asked if (spec := _named(name, fields, after)) is not None]
    if len(found) > 1:
        raise FieldError(
            "invalid_grammar", f"both {asked[0]} and {asked[1]} ask for a grammar; leave one out", param=asked[1]
        )
    return found[0] if found else None


def _named(name: str, fields: Mapping[str, Any], after: str) -> GrammarSpec | None:
    try:
        if name == "response_format":
            return _response_format(fields[name], after)
        if name == "structured_outputs":
            return _structured_outputs(fields[name], after, name)
        options = {"whitespace_pattern": fields.get("guided_whitespace_pattern")}
        return _structured_outputs({_GUIDED[name]: fields[name], **options}, after, name)
    except FieldError:
        raise
    except RequestError as error:
        raise FieldError(error.code, f"{name}: {error}", param=name, status=error.status) from None


def _response_format(value: Any, after: str) -> GrammarSpec | None:
    param = "response_format"
    kind = _object(value, param).get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return GrammarSpec("json_object", after=after)
        case "json_schema":
            body = _object(value.get("json_schema"), f"{param}.json_schema")
            if "schema" not in body:
                raise FieldError(
                    "invalid_grammar",
                    "response_format.json_schema has no schema; add one",
                    param=f"{param}.json_schema",
                )
            strict = _flag(body.get("strict"), f"{param}.json_schema.strict")
            # OpenAI enforces a schema where it is strict, and does what it can otherwise.
            return _schema(body["schema"], after, lenient=not strict)
        case _:
            raise FieldError(
                "unsupported_parameter",
                f"response_format.type is {_shown(kind)}; expected text, json_object or json_schema",
                param=param,
            )


def _structured_outputs(value: Any, after: str, param: str) -> GrammarSpec | None:
    asked = {key: one for key, one in _object(value, param).items() if one is not None and not key.startswith("_")}
    if unknown := next((key for key in asked if key not in (*_KINDS, *_OPTIONS)), None):
        raise FieldError(
            "unsupported_parameter", f"{param}.{unknown[:100]} is not supported; leave it out", param=param
        )
    flexible = asked.get("disable_any_whitespace")
    pattern = asked.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise FieldError("invalid_grammar", f"{param}: the whitespace pattern is no text", param=param)
    options: dict[str, Any] = {
        "flexible": None if flexible is None else not _flag(flexible, f"{param}.disable_any_whitespace"),
        "pattern": pattern,
    }
    kinds = [key for key in _KINDS if key in asked and asked[key] is not False]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise FieldError("invalid_grammar", f"{param} has {kinds[0]} and {kinds[1]}; leave one out", param=param)
    kind, given = kinds[0], asked[kinds[0]]
    match kind:
        case "json":
            if _flag(asked.get("disable_additional_properties"), f"{param}.disable_additional_properties"):
                given = _closed(_parsed(given))
            return _schema(given, after, **options)
        case "json_object":
            _flag(given, f"{param}.json_object")
            return _schema(JSON_OBJECT, after, **options)
        case "choice":
            if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
                raise FieldError("invalid_grammar", f"{param}: the choices are not a list of texts", param=param)
            return GrammarSpec("choice", dump_schema(given), after)
        case _:
            if not isinstance(given, str):
                raise FieldError(
                    "invalid_grammar", f"{param}: {kind} is a {_kind_of(given)}; expected a text", param=param
                )
            return GrammarSpec("regex" if kind == "regex" else "grammar", given, after)


def _schema(
    schema: Any, after: str, *, flexible: bool | None = None, pattern: str | None = None, lenient: bool = False
) -> GrammarSpec:
    made = with_whitespace(_parsed(schema), flexible=flexible, pattern=pattern, lenient=lenient)
    return GrammarSpec("json_schema", dump_schema(made), after)


def _parsed(schema: Any) -> Any:
    """A schema; vLLM takes its text too. Raises RequestError for a text that is too large, before it is read."""
    if isinstance(schema, str):
        if len(schema) > MAX_SPACED_CHARS:
            raise invalid_grammar(f"the schema has {len(schema):,} characters; expected at most {MAX_SPACED_CHARS:,}")
        return read_json(schema)
    return schema


def _closed(schema: Any) -> Any:
    """The schema, whose objects have no properties but those that it names."""

    def close(value: Any, depth: int) -> Any:
        if depth > 200:  # refused by its depth, with its own message
            return value
        if isinstance(value, list):
            return [close(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        inside = {key: close(item, depth + 1) for key, item in value.items()}
        is_object = "properties" in inside and isinstance(inside["properties"], dict)
        return {"additionalProperties": False, **inside} if is_object else inside

    return close(schema, 0)


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError("invalid_grammar", f"{param} is a {_kind_of(value)}; expected an object", param=param)
    return value


def _flag(value: Any, param: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise FieldError("invalid_grammar", f"{param} is a {_kind_of(value)}; expected true or false", param=param)


def _shown(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str) else _kind_of(value)


def _kind_of(value: Any) -> str:
    names: Mapping[type, str] = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
