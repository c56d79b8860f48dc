"""Which texts a chat with tools or reasoning allows: forced calls, strict functions, JSON beside calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.local_endpoint import serve_local
from tests.scripted import ScriptedRuntime
from tests.serving import fake_tokenizer, serve_fake
from tests.test_openai_fields import with_tokens
from tests.test_tool_calls import CITY, is_allowed

from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http.call_plan import FREE_TEXT, grammar_of_call, tool_grammar
from outrider.models.http.chat_reader import ChatStyle
from outrider.models.http.errors import FieldError
from outrider.models.http.openai import ChatRequest
from outrider.models.http.openai_fields import Tool

USER: Any = [{"role": "user", "content": "zip"}]
CITIES: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
DAYS: Any = {**CITIES, "properties": {"city": {"type": "integer", "minimum": 1, "maximum": 9}}}


def tool(name: str, parameters: Any = None, **others: Any) -> dict[str, Any]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **others}
    return {"type": "function", "function": function}


def spec_of(style: ChatStyle | None = None, tokenizer: Any = None, prompt: Any = (), **fields: Any) -> Any:
    body = ChatRequest.model_validate({"messages": USER, **fields})
    return grammar_of_call(body, style or ChatStyle("hermes"), tokenizer or fake_tokenizer(), [prompt])


WRITTEN = {"hermes": "<tool_call>\n{}\n</tool_call>", "mistral": "[TOOL_CALLS][{}]", "llama": "{}"}


@pytest.mark.parametrize("form", list(WRITTEN))
@pytest.mark.parametrize("is_one", [True, False])
def test_strict_calls_in_free_text(form: str, is_one: bool) -> None:
    """Any text, and calls whose arguments follow the schema: what the parser reads as a call is one of the grammar."""
    tools = [Tool.model_validate(tool("weather", CITY, strict=True)), Tool.model_validate(tool("time"))]
    grammar = tool_grammar(form, tools, fake_tokenizer(), is_one=is_one, content=FREE_TEXT)
    key = "parameters" if form == "llama" else "arguments"

    def written(name: str, arguments: Any) -> str:
        return WRITTEN[form].replace("{}", json.dumps({"name": name, key: arguments}))

    good, bad = written("weather", {"city": "Paris"}), written("weather", {"days": 3})
    for text in ("", "Sure.\n", "less < than <tool and [TOOL", good, written("time", {"any": [1]})):
        assert is_allowed(grammar, text), text
    for text in (bad, written("other", {}), f"{good}{bad}"):
        assert not is_allowed(grammar, text), text
    before = "Sure. <|python_tag|>" if form == "llama" else "Sure. "
    assert is_allowed(grammar, before + good) and not is_allowed(grammar, before + bad)
    two = {"hermes": f"{good}\n{good}", "mistral": f"{good[:-1]}, {good[13:]}", "llama": f"{good}; {good}"}
    assert is_allowed(grammar, two[form]) is not is_one


def test_json_beside_calls() -> None:
    """`response_format` is the content's, and calls stay possible; a regular expression beside tools is refused."""
    tools = [tool("weather", CITY)]
    good = WRITTEN["hermes"].replace("{}", json.dumps({"name": "weather", "arguments": {"city": "Paris"}}))
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY, "strict": True}}
    for fields, text in (
        ({"response_format": schema}, '{"city":"Rome"}'),
        ({"response_format": {"type": "json_object"}}, '{"a":[1]}'),
        ({"guided_choice": ["yes", "no"]}, "no"),
    ):
        spec = spec_of(tools=tools, **fields)
        assert is_allowed(spec.text, good) and is_allowed(spec.text, text), fields
        assert not is_allowed(spec.text, "Sure.") and not is_allowed(spec.text, good.replace("city", "town"))
        forced = spec_of(tools=tools, tool_choice="required", **fields)
        assert is_allowed(forced.text, good) and not is_allowed(forced.text, text)
    assert spec_of(tools=tools) is None and spec_of(tools=tools, tool_choice="none") is None
    assert spec_of(ChatStyle(), guided_regex="a") == GrammarSpec("regex", "a")
    with pytest.raises(FieldError, match="beside a grammar of kind regex") as refused:
        spec_of(tools=tools, guided_regex="a")
    assert refused.value.param == "tools"


def test_a_schema_is_enforced_as_a_whole_only_where_it_is_strict() -> None:
    """As `response_format`: of another one, what the library knows."""
    unknown = {**CITY, "properties": {"city": {"type": "string"}, "all": {"type": "array", "uniqueItems": True}}}
    compiler = GrammarCompiler(fake_tokenizer(), fake_tokenizer().size, [0])
    try:
        assert compiler.compile(spec_of(tools=[tool("f", unknown)], tool_choice="required"))
        with pytest.raises(Exception, match="uniqueItems"):
            compiler.compile(spec_of(tools=[tool("f", unknown, strict=True)]))
        wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8)}}
        many = [tool(f"f{i}", wide, strict=True) for i in range(64)]
        assert compiler.compile(spec_of(tools=many)).state().may_stop
        assert compiler.compile(spec_of(tools=many, tool_choice="required")).state().forced()
    finally:
        compiler.close()
    wider = {"type": "object", "properties": {f"p{i}": {} for i in range(300)}}
    with pytest.raises(FieldError, match="2,416 properties") as refused:
        spec_of(tools=[tool(f"f{i}", wider, strict=True) for i in range(8)])
    assert refused.value.param == "tools"


def test_a_grammar_begins_after_the_reasoning(tmp_path: Path) -> None:
    """Where the prompt has opened it, or the model opens it; at once where the prompt has closed it."""
    tokenizer = with_tokens(tmp_path, ["<think>", "</think>"])
    style = ChatStyle(has_reasoning=True)
    json_object = {"response_format": {"type": "json_object"}}
    begin, end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    for prompt, after, opener in (
        ([5, 6], "</think>", "<think>"),
        ([5, begin], "</think>", ""),
        ([5, begin, *tokenizer.encode("\n"), end, *tokenizer.encode("\n\n")], "", ""),
    ):
        spec = spec_of(style, tokenizer, prompt, **json_object)
        assert (spec.kind, spec.after, spec.opener) == ("json_object", after, opener)
    forced = spec_of(ChatStyle("hermes", True), tokenizer, [begin], tools=[tool("f")], tool_choice="required")
    assert (forced.kind, forced.after) == ("grammar", "</think>")
    assert spec_of(ChatStyle(), tokenizer, [begin], **json_object) == GrammarSpec("json_object")
    # No single token ends the reasoning: the text has none, or is refused.
    assert spec_of(style, None, fake_tokenizer().encode("assistant: "), **json_object) == GrammarSpec("json_object")
    with pytest.raises(FieldError, match="no single token"):
        spec_of(style, None, fake_tokenizer().encode("assistant: <think>"), **json_object)


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% endfor %}assistant: "
)


@pytest.fixture(scope="module")
def callers() -> Iterator[list[httpx.Client]]:
    """A verifier whose target tries a call with a wrong argument, and an endpoint before it."""
    wrong = '<tool_call>\n{"name": "weather", "arguments": {"city": 17}}\n</tool_call>'
    runtime = ScriptedRuntime(wrong, "assistant: ")
    with (
        serve_fake(runtime=runtime, chat_template=TEMPLATE) as server,
        serve_local(server.url) as endpoint,
        httpx.Client(base_url=server.url, timeout=30.0) as first,
        httpx.Client(base_url=endpoint.url, timeout=30.0) as second,
    ):
        yield [first, second]


def test_calls_follow_their_schemas(callers: list[httpx.Client]) -> None:
    """`required`, a function's name and strict functions, with drafts and without; the texts are the same."""
    strict = tool("weather", CITIES, strict=True)
    named = {"type": "function", "function": {"name": "days"}}
    both = [tool("weather", CITIES), tool("days", DAYS)]
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": both, "tool_choice": "required", "parallel_tool_calls": False}, "weather", "tool_calls"),
        ({"tools": both, "tool_choice": named}, "days", "stop"),
        ({"tools": [strict], "parallel_tool_calls": False}, "weather", "tool_calls"),
    ]
    for fields, name, reason in cases:
        found = []
        for client in callers:
            asked = {"messages": USER, "max_tokens": 300, "seed": 3, "temperature": 0.0, **fields}
            answer = client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert (call["function"]["name"], choice["finish_reason"]) == (name, reason)
            arguments = json.loads(call["function"]["arguments"])
            assert list(arguments) == ["city"]
            assert arguments["city"] in (["Paris", "Rome"] if name == "weather" else range(1, 10))
            found.append(call["function"])
        assert found[0] == found[1]


def test_a_tools_schema_that_cannot_be_used_is_refused(callers: list[httpx.Client]) -> None:
    """By its keyword."""
    bad = tool("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, strict=True)
    for client in callers:
        answer = client.post("/v1/chat/completions", json={"messages": USER, "tools": [bad]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_grammar") and "uniqueItems" in error["message"]
