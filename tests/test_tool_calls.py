"""Tool calls and reasoning in a model's text: each format, cut anywhere; and which texts a chat with tools allows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.local_endpoint import serve_local
from tests.scripted import ScriptedRuntime
from tests.serving import code_of, fake_tokenizer, serve_fake
from tests.test_openai_fields import with_tokens

from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http.call_plan import FREE_TEXT, _tools_in, grammar_of_call, tool_grammar
from outrider.models.http.chat_reader import ChatReader, ChatStyle
from outrider.models.http.errors import FieldError
from outrider.models.http.openai import ChatRequest
from outrider.models.http.openai_fields import Tool, with_read_arguments

PARIS = {"city": "Paris", "note": 'a "quoted" {brace} \\ and </tool_call>', "days": [1, {"n": None}]}
ONE = f'{{"name": "weather", "arguments": {json.dumps(PARIS)}}}'
TWO = '{"arguments": {}, "name": "time"}'
LLAMA = ONE.replace('"arguments"', '"parameters"')

# Format, text, content, calls as (name, arguments).
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [("weather", PARIS)]),
    (
        "hermes",
        f"Let me look.\n<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
        "Let me look.",
        [("weather", PARIS), ("time", {})],
    ),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [("time", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "x": 5, "arguments": {"a": 1}, "y": [1]}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ["a", {"b": 1}]}</tool_call>', "", [("f", ["a", {"b": 1}])]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"', "", [("f", {"a": 1})]),
    ("hermes", "a <tool_call>no object</tool_call> b", "a <tool_call>no object</tool_call> b", []),
    ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    ("hermes", "less < than <tool", "less < than <tool", []),
    ("hermes", f"<tool_call>{TWO}</tool_call>\n Done.", "Done.", [("time", {})]),
    ("mistral", f"[TOOL_CALLS][{TWO}]\n Done.", "Done.", [("time", {})]),
    ("mistral", "[TOOL_CALLS]time[ARGS]{}\n Done.", "Done.", [("time", {})]),
    ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]", "", [("weather", PARIS), ("time", {})]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS)}", "", [("weather", PARIS)]),
    (
        "mistral",
        f"Wait. [TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{json.dumps(PARIS)}[TOOL_CALLS]time[ARGS]{{}}",
        "Wait.",
        [("weather", PARIS), ("time", {})],
    ),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ("mistral", "[TOOL_CALLS][5]", "[TOOL_CALLS][5]", []),
    ("mistral", "[TOOL_CALLS] [5]", "[TOOL_CALLS] [5]", []),
    ("llama", LLAMA, "", [("weather", PARIS)]),
    ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("weather", PARIS)] * 2),
    ("llama", '{"answer": 42} is JSON', '{"answer": 42} is JSON', []),
    ("llama", "Just text {", "Just text {", []),
    ("llama", '{"name": "Alice", "age": 30}', '{"name": "Alice", "age": 30}', []),
    ("llama", '<|python_tag|>{"name": "now"}', "", [("now", {})]),
]


def read(reader: ChatReader, pieces: list[str]) -> tuple[str, str, list[dict[str, Any]]]:
    """Content, reasoning and calls, put together from deltas as a client does."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        delta = reader.push(piece, is_last=index == len(pieces) - 1)
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert (content, reasoning) == (reader.content, reader.reasoning)
    assert calls == [call["function"] for call in reader.calls]
    return content, reasoning, calls


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({min(place, len(text)) for place in at} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)] or [""]


@given(case=st.sampled_from(CASES), at=st.lists(st.integers(0, 220), max_size=40), is_split=st.booleans())
def test_calls_are_found_however_the_text_is_cut(
    case: tuple[str, str, str, list[tuple[str, Any]]], at: list[int], is_split: bool
) -> None:
    """Also character by character; the arguments are the model's own text."""
    tools, text, expected, calls = case
    reader = ChatReader(ChatStyle(tools=tools))
    content, _, found = read(reader, list(text) if is_split else cut(text, at))
    assert content == expected
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls
    assert reader.reason("stop") == ("tool_calls" if calls else "stop") and reader.reason("length") == "length"


def test_arguments_are_streamed() -> None:
    """A client sees them before the call is over: what was cut by the length is a beginning."""
    reader = ChatReader(ChatStyle(tools="hermes"))
    first = reader.push('<tool_call>{"name": "f", "arguments": {"a": "lo')
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "lo'}
    assert reader.push("ng", is_last=True) == {"tool_calls": [{"index": 0, "function": {"arguments": "ng"}}]}


THOUGHT = f"I may <tool_call>{TWO}</tool_call>"
AFTER_THOUGHT = f"<think>{THOUGHT}</think>\n<tool_call>{ONE}</tool_call>"


@pytest.mark.parametrize(
    ("style", "text", "thought", "reason"),
    [
        # `parallel_tool_calls: false` keeps the first; a named `tool_choice` ends with "stop", as OpenAI's.
        (
            {"is_one_call": True, "is_forced": True},
            f"<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>",
            "",
            "stop",
        ),
        # A call in the reasoning is none.
        ({"has_reasoning": True}, AFTER_THOUGHT, THOUGHT, "tool_calls"),
        ({"has_reasoning": True, "shows_reasoning": False}, AFTER_THOUGHT, "", "tool_calls"),
    ],
    ids=["one that is forced", "after reasoning", "after hidden reasoning"],
)
def test_one_call_is_found(style: dict[str, bool], text: str, thought: str, reason: str) -> None:
    """And nothing is said."""
    reader = ChatReader(ChatStyle(tools="hermes", **style))
    content, reasoning, (call,) = read(reader, list(text))
    assert (content, reasoning, call["name"], reader.reason("stop")) == ("", thought, "weather", reason)


REASONING = [
    (False, "<think>\nA <b>\n</think>\n\nSo.", "A <b>", "So."),
    (False, " \n<think>A</think>", "A", ""),
    (False, "No thought. <think>", "", "No thought. <think>"),
    (False, "<thin", "", "<thin"),
    (True, "A\n\nB\n</think>\nSo. </think>", "A\n\nB", "So. </think>"),
    (True, "never ends ", "never ends", ""),
]


@given(case=st.sampled_from(REASONING), at=st.lists(st.integers(0, 40), max_size=20))
def test_reasoning_is_split_from_content(case: tuple[bool, str, str, str], at: list[int]) -> None:
    """However the text is cut; without the spaces around it."""
    is_inside, text, thought, said = case
    reader = ChatReader(ChatStyle(has_reasoning=True), is_inside=is_inside)
    assert read(reader, cut(text, at))[:2] == (said, thought)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=f>{% endif %}", None),
        ("{% if tools %}<tool_call>{name}<arg_key>{% endif %}", None),
        ("{% for tool in tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endfor %}", "mistral"),
        ("{% if tools is not none %}<|python_tag|>{% endif %}", "llama"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_what_the_template_contains(template: str, expected: str | None) -> None:
    """None for one that no parser here can read."""
    assert _tools_in(template) == expected


def test_earlier_calls_reach_the_template_as_objects() -> None:
    """OpenAI's messages have arguments as text, templates expect objects; what is no object stays."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (read_call,) = with_read_arguments([call])
    assert read_call["function"]["arguments"] == {"a": 1} and call["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]
    for odd in ("[" * 60_000, "5", "x", None):
        broken = {"function": {"arguments": odd}}
        assert with_read_arguments([broken, 3]) == [broken, 3]
    assert with_read_arguments("x") == "x"
    with pytest.raises(RequestError, match="the text of a tool call's arguments has more than 65536 objects"):
        with_read_arguments([{"function": {"arguments": "[" + "[]," * 70_000 + "0]"}}])


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 8}},
}


FORMS = ("hermes", "mistral", "llama")


def written(form: str, *calls: tuple[str, Any]) -> str:
    """These calls, name and arguments each, as a model writes them."""
    key = "parameters" if form == "llama" else "arguments"
    texts = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return f"[TOOL_CALLS][{', '.join(texts)}]" if form == "mistral" else "; ".join(texts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_one", [True, False])
def test_the_grammar_of_calls_allows_what_the_parser_reads(form: str, is_one: bool) -> None:
    """Calls with arguments of their schema, and nothing else: no other name, no wrong argument, no free text."""
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": CITY}}),
        Tool.model_validate({"type": "function", "function": {"name": "time"}}),
    ]
    grammar = tool_grammar(form, tools, fake_tokenizer(), is_one=is_one)
    write = partial(written, form)
    one: tuple[str, Any] = ("weather", {"city": "Paris", "days": 3})
    two: tuple[str, Any] = ("time", {})
    wrongs: Any = (("other", {}), ("weather", {"days": 3}), ("weather", {"city": "x" * 9}), ("weather", {"city": 5}))
    expected = {write(one): True, write(two): True, write(one, two): not is_one, "Sure. " + write(two): False}
    expected |= {write(wrong): False for wrong in wrongs}
    assert {text: is_allowed(grammar, text) for text in expected} == expected
    _, _, found = read(ChatReader(ChatStyle(tools=form)), [write(one)])
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == [one]


def is_allowed(grammar: str, text: str) -> bool:
    """Whether the whole text is in the grammar, byte by byte."""
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_bytes(text.encode())
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


USER: Any = [{"role": "user", "content": "zip"}]


def tool(name: str, parameters: Any = None, **others: Any) -> dict[str, Any]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **others}
    return {"type": "function", "function": function}


NAMES = ["Paris", "Rome"]
CITIES: Any = {
    "type": "object",
    "properties": {"city": {"enum": NAMES}},
    "required": ["city"],
    "additionalProperties": False,
}
DAYS: Any = {**CITIES, "properties": {"city": {"type": "integer", "minimum": 1, "maximum": 9}}}
STRICT = tool("weather", CITIES, strict=True)
BOTH = [tool("weather", CITIES), tool("days", DAYS)]


def spec_of(style: ChatStyle | None = None, tokenizer: Any = None, prompt: Any = (), **fields: Any) -> Any:
    body = ChatRequest.model_validate({"messages": USER, **fields})
    return grammar_of_call(body, style or ChatStyle("hermes"), tokenizer or fake_tokenizer(), [prompt])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_one", [True, False])
def test_strict_calls_in_free_text(form: str, is_one: bool) -> None:
    """Any text, and calls whose arguments follow the schema: what the parser reads as a call is one of the grammar."""
    tools = [Tool.model_validate(tool("weather", CITY, strict=True)), Tool.model_validate(tool("time"))]
    grammar = tool_grammar(form, tools, fake_tokenizer(), is_one=is_one, content=FREE_TEXT)
    right: tuple[str, Any] = ("weather", {"city": "Paris"})
    good, bad = written(form, right), written(form, ("weather", {"days": 3}))
    before = "Sure. <|python_tag|>" if form == "llama" else "Sure. "
    free = ("", "Sure.\n", "less < than <tool and [TOOL", good, written(form, ("time", {"any": [1]})), before + good)
    expected = dict.fromkeys((bad, written(form, ("other", {})), f"{good}{bad}", before + bad), False)
    expected |= dict.fromkeys(free, True) | {written(form, right, right): not is_one}
    assert {text: is_allowed(grammar, text) for text in expected} == expected


def test_json_beside_calls() -> None:
    """`response_format` is the content's, and calls stay possible; a regular expression beside tools is refused."""
    tools = [tool("weather", CITY)]
    good = written("hermes", ("weather", {"city": "Paris"}))
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY, "strict": True}}
    for fields, text in (
        ({"response_format": schema}, '{"city":"Rome"}'),
        ({"response_format": {"type": "json_object"}}, '{"a":[1]}'),
        ({"guided_choice": ["yes", "no"]}, "no"),
    ):
        spec, forced = spec_of(tools=tools, **fields), spec_of(tools=tools, tool_choice="required", **fields)
        found = [is_allowed(spec.text, each) for each in (good, text, "Sure.", good.replace("city", "town"))]
        assert found == [True, True, False, False], fields
        assert is_allowed(forced.text, good) and not is_allowed(forced.text, text)
    assert spec_of(tools=tools) is None and spec_of(tools=tools, tool_choice="none") is None
    assert spec_of(ChatStyle(), guided_regex="a") == GrammarSpec("regex", "a")
    with pytest.raises(FieldError, match="beside a grammar of kind regex") as refused:
        spec_of(tools=tools, guided_regex="a")
    assert refused.value.param == "tools"


def test_a_schema_is_enforced_as_a_whole_only_where_it_is_strict() -> None:
    """As `response_format`: of another one, what the library knows."""
    unknown = {**CITY, "properties": {"city": {"type": "string"}, "all": {"type": "array", "uniqueItems": True}}}
    with closing(GrammarCompiler(fake_tokenizer(), fake_tokenizer().size, [0])) as compiler:
        assert compiler.compile(spec_of(tools=[tool("f", unknown)], tool_choice="required"))
        with pytest.raises(Exception, match="uniqueItems"):
            compiler.compile(spec_of(tools=[tool("f", unknown, strict=True)]))
        wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8)}}
        many = [tool(f"f{i}", wide, strict=True) for i in range(64)]
        assert compiler.compile(spec_of(tools=many)).state().may_stop
        assert compiler.compile(spec_of(tools=many, tool_choice="required")).state().forced()
    wider = {"type": "object", "properties": {f"p{i}": {} for i in range(300)}}
    with pytest.raises(FieldError, match="2,416 properties") as refused:
        spec_of(tools=[tool(f"f{i}", wider, strict=True) for i in range(8)])
    assert refused.value.param == "tools"


def test_a_grammar_begins_after_the_reasoning(tmp_path: Path) -> None:
    """Where the prompt has opened it, or the model opens it; at once where the prompt has closed it."""
    tokenizer = with_tokens(tmp_path, ["<think>", "</think>"])
    style = ChatStyle(has_reasoning=True)
    json_object = {"response_format": {"type": "json_object"}}
    begin, end = map(tokenizer.token_id, ("<think>", "</think>"))
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
def callers() -> Iterator[list[str]]:
    """A verifier whose target tries a call with a wrong argument, and an endpoint before it: where they answer."""
    wrong = '<tool_call>\n{"name": "weather", "arguments": {"city": 17}}\n</tool_call>'
    runtime = ScriptedRuntime(wrong, "assistant: ")
    with serve_fake(runtime=runtime, chat_template=TEMPLATE) as server, serve_local(server.url) as endpoint:
        yield [f"{each.url}/v1/chat/completions" for each in (server, endpoint)]


@pytest.mark.parametrize(
    ("fields", "name", "reason", "cities"),
    [
        ({"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False}, "weather", "tool_calls", NAMES),
        ({"tools": BOTH, "tool_choice": tool("days")}, "days", "stop", range(1, 10)),
        ({"tools": [STRICT], "parallel_tool_calls": False}, "weather", "tool_calls", NAMES),
    ],
    ids=["required", "a function", "strict"],
)
def test_calls_follow_their_schemas(
    callers: list[str], fields: dict[str, Any], name: str, reason: str, cities: Sequence[Any]
) -> None:
    """`required`, a function's name and strict functions, with drafts and without; the texts are the same."""
    asked = {"messages": USER, "max_tokens": 300, "seed": 3, "temperature": 0.0, **fields}
    answers = [httpx.post(url, json=asked, timeout=30.0).raise_for_status() for url in callers]
    (first,), (second,) = (answer.json()["choices"] for answer in answers)
    (call,), (again,) = (choice["message"]["tool_calls"] for choice in (first, second))
    assert (call["function"]["name"], first["finish_reason"], second["finish_reason"]) == (name, reason, reason)
    arguments = json.loads(call["function"]["arguments"])
    assert list(arguments) == ["city"] and arguments["city"] in cities and call["function"] == again["function"]


def test_a_tools_schema_that_cannot_be_used_is_refused(callers: list[str]) -> None:
    """By its keyword."""
    bad = tool("f", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, strict=True)
    for url in callers:
        answer = httpx.post(url, json={"messages": USER, "tools": [bad]})
        assert code_of(answer) == (400, "invalid_grammar") and "uniqueItems" in answer.json()["error"]["message"]
