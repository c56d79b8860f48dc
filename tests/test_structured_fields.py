"""The fields that ask for structured output, as clients of OpenAI and of vLLM send them."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from outrider.models.grammar.spec import KINDS, GrammarSpec
from outrider.models.http.errors import FieldError
from outrider.models.http.openai import ChatRequest, CompletionRequest
from outrider.models.wire.fields import GrammarField
from outrider.models.wire.protocol import SessionRequest
from outrider.models.wire.verify import VerifyItem

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def asked(**fields: Any) -> GrammarSpec | None:
    return CompletionRequest.model_validate({"prompt": "x", **fields}).grammar()


def guidance(spec: GrammarSpec | None) -> Any:
    assert spec is not None
    return json.loads(spec.text).get("x-guidance")


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}]
)
def test_free_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_openai_response_format() -> None:
    """A strict schema is enforced as a whole; of another one, what the library knows."""
    body: dict[str, Any] = {"name": "n", "description": "d", "schema": SCHEMA}
    strict, lenient = (
        asked(response_format={"type": "json_schema", "json_schema": body | {"strict": strict}})
        for strict in (True, None)
    )
    assert strict == GrammarSpec.json_schema(SCHEMA) and guidance(lenient) == {"lenient": True}
    assert asked(response_format={"type": "json_object"}) == GrammarSpec("json_object")
    chat = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    assert ChatRequest.model_validate(chat).grammar() == GrammarSpec("json_object")


@pytest.mark.parametrize("name", ["structured_outputs", "guided"])
def test_vllm_names_old_and_new(name: str) -> None:
    """Both ways to say it make the same grammar."""

    def ask(**kinds: Any) -> GrammarSpec | None:
        if name == "structured_outputs":
            return asked(structured_outputs=kinds)
        return asked(**{f"guided_{key}": value for key, value in kinds.items()})

    assert guidance(ask(json=SCHEMA, whitespace_pattern="[ ]?")) == {"whitespace_pattern": "[ ]?"}
    for kind, value, expected in (
        ("json", SCHEMA, GrammarSpec.json_schema(SCHEMA)),
        ("json", json.dumps(SCHEMA), GrammarSpec.json_schema(SCHEMA)),
        ("regex", "a+", GrammarSpec("regex", "a+")),
        ("choice", ["a", "b"], GrammarSpec("choice", '["a","b"]')),
        ("grammar", 'root ::= "a"', GrammarSpec("grammar", 'root ::= "a"')),
        ("json_object", True, GrammarSpec.json_schema({"type": "object"})),
        ("json_object", False, None),
    ):
        assert ask(**{kind: value}) == expected, kind


def test_vllm_options_of_whitespace_and_properties() -> None:
    flexible = asked(structured_outputs={"json": SCHEMA, "disable_any_whitespace": False})
    assert guidance(flexible) == {"whitespace_flexible": True}
    spec = asked(structured_outputs={"json": {"items": SCHEMA}, "disable_additional_properties": True})
    assert spec is not None and json.loads(spec.text)["items"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "is a text; expected an object"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "'structural_tag'"),
        ({"response_format": {"type": 5}}, "response_format", "number"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "expected an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema",
            "no schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format", "object"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not supported"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "number; expected a text"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "list of texts"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not JSON"),
        # Sizes before anything is parsed, or grows.
        ({"guided_json": "[" + '"\\u00e9", ' * 17_000}, "guided_json", "68,001 bytes besides spaces and escapes"),
        (
            {"structured_outputs": {"json": [{"properties": {}}] * 4_000, "disable_additional_properties": True}},
            "structured_outputs",
            "has 72,001 bytes",
        ),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "leave one out"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "leave one out"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as refusal:
        asked(**fields)
    assert refusal.value.param == param and refusal.value.code in ("invalid_grammar", "unsupported_parameter")


def test_the_wire_carries_a_grammar() -> None:
    """Sessions and verify items take the same field, and its kinds are those of the spec."""
    spec = GrammarSpec("regex", "a+", after="</think>")
    assert get_args(GrammarField.model_fields["kind"].annotation) == KINDS
    sent = SessionRequest(prompt=[1], max_tokens=1, grammar=spec.to_wire()).model_dump_json()
    item = VerifyItem(prefix=[1], grammar=spec.to_wire())
    for request, expected in (
        (SessionRequest.model_validate_json(sent), spec),
        (item, spec),
        (VerifyItem(prefix=[1]), None),
    ):
        assert GrammarSpec.of_wire(request.grammar) == expected
    for wrong in ({"text": "a" * 70_000}, {"text": "a", "lenient": True}):
        with pytest.raises(ValidationError):
            GrammarField.model_validate({"kind": "regex", **wrong})
