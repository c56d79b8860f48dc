"""Tool calls and reasoning in a model's text: each format, cut anywhere, and text that only looks like it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serving import fake_tokenizer

from outrider.models.errors import RequestError
from outrider.models.http.call_plan import _tools_in, tool_grammar
from outrider.models.http.chat_reader import ChatReader, ChatStyle
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
    ("llama", LLAMA, "", [("weather", PARIS)]),
    ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("weather", PARIS)] * 2),
    ("llama", '{"answer": 42} is JSON', '{"answer": 42} is JSON', []),
    ("llama", "Just text {", "Just text {", []),
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


def test_one_call_and_a_forced_one() -> None:
    """`parallel_tool_calls: false` keeps the first; a named `tool_choice` ends with "stop", as OpenAI's."""
    reader = ChatReader(ChatStyle(tools="hermes", is_one_call=True, is_forced=True))
    _, _, found = read(reader, [f"<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>"])
    assert [call["name"] for call in found] == ["weather"] and reader.reason("stop") == "stop"


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


def test_calls_after_reasoning() -> None:
    """A call in the reasoning is none."""
    text = f"<think>I may <tool_call>{TWO}</tool_call></think>\n<tool_call>{ONE}</tool_call>"
    content, thought, calls = read(ChatReader(ChatStyle(tools="hermes", has_reasoning=True)), list(text))
    assert content == "" and thought.startswith("I may <tool_call>") and [call["name"] for call in calls] == ["weather"]
    hidden = ChatReader(ChatStyle(tools="hermes", has_reasoning=True, shows_reasoning=False))
    assert read(hidden, list(text))[1] == ""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=f>{% endif %}", None),
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


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama"])
@pytest.mark.parametrize("is_one", [True, False])
def test_the_grammar_of_calls_allows_what_the_parser_reads(form: str, is_one: bool) -> None:
    """Calls with arguments of their schema, and nothing else: no other name, no wrong argument, no free text."""
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": CITY}}),
        Tool.model_validate({"type": "function", "function": {"name": "time"}}),
    ]
    grammar = tool_grammar(form, tools, fake_tokenizer(), is_one=is_one)
    key = "parameters" if form == "llama" else "arguments"

    def written(*calls: tuple[str, Any]) -> str:
        texts = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
        if form == "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        return f"[TOOL_CALLS][{', '.join(texts)}]" if form == "mistral" else "; ".join(texts)

    one: tuple[str, Any] = ("weather", {"city": "Paris", "days": 3})
    two: tuple[str, Any] = ("time", {})
    assert is_allowed(grammar, written(one)) and is_allowed(grammar, written(two))
    assert is_allowed(grammar, written(one, two)) is not is_one
    for wrong in (("other", {}), ("weather", {"days": 3}), ("weather", {"city": "x" * 9}), ("weather", {"city": 5})):
        assert not is_allowed(grammar, written(wrong))
    assert not is_allowed(grammar, "Sure. " + written(two))
    _, _, found = read(ChatReader(ChatStyle(tools=form)), [written(one)])
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == [one]


def is_allowed(grammar: str, text: str) -> bool:
    """Whether the whole text is in the grammar, byte by byte."""
    tokens = llguidance.LLTokenizer("byte")
    spec = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(tokens, spec)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_bytes(text.encode())
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
