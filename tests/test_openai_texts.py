"""Stop strings of sessions, predicted outputs and calls of tools, at the verifier and at the local endpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from tests.agents import SURE, generate
from tests.local_endpoint import LocalEndpoint, fake_draft, serve_local
from tests.scripted import ScriptedRuntime
from tests.serving import FakeServer, code_of, fake_tokenizer, run_session, serve_fake, target_tokens
from tests.test_openai_fields import CHAT, MESSAGES, PARAMS, PROMPT, chunks, client, complete, refused, text_of

from outrider.cloud.api import sessions
from outrider.cloud.api.completions import Generation, _Sequence
from outrider.cloud.api.stream import SessionText
from outrider.cloud.seam import CommitEvent, EndEvent, SequenceUsage
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.results import GenerationRequest
from outrider.models.errors import RequestError
from outrider.models.http import openai_answers, shapes
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.chat_reader import ChatReader
from outrider.models.http.errors import FieldError
from outrider.models.http.shapes import Delta
from outrider.models.http.sse import Inbox
from outrider.models.text import predicted as predicted_texts
from outrider.models.text.predicted import PredictionFollower
from outrider.models.wire.protocol import TextCut

__all__ = ["client"]  # a fixture


def session_stop(prompt: list[int], tokens: list[int], stop: str) -> tuple[int, int]:
    """Tokens up to the one that completes the stop string, and the characters before it, one token at a time."""
    for count in range(1, len(tokens) + 1):
        text = fake_tokenizer().detokenizer(context=prompt).push(tokens[:count])
        if stop in text:
            return count, text.index(stop)
    raise AssertionError("the text does not have it")


def test_a_session_ends_at_a_stop_string(cloud: FakeServer) -> None:
    """The commits end with the token that completes it, across tokens, drafted or not; the end says where."""
    ids = fake_tokenizer().encode(PROMPT)
    tokens = target_tokens(ids, 40, PARAMS)
    text = fake_tokenizer().decode(tokens)
    with httpx.Client(base_url=cloud.url) as client:
        for begin, length in ((6, 1), (9, 3), (14, 7)):
            stop = text[begin : begin + length]
            count, chars = session_stop(ids, tokens, stop)
            body: dict[str, Any] = {"prompt": ids, "max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True}
            found = run_session(client, body | {"stop": ["never there", stop]})
            assert (found.tokens, found.end.reason, found.end.usage.completion_tokens) == (
                tokens[:count],
                "stop",
                count,
            )
            assert found.end.cut == TextCut(tokens=count, chars=chars, stop=stop)
            # One that went on with the text from any place: also from inside the stop string, and from behind it.
            for done in (count - 1, count):
                rest = {"prompt": ids + tokens[:done], "generated": done, "max_tokens": 40 - done, "stop": [stop]}
                again = run_session(client, body | rest)
                assert (again.tokens, again.end.reason) == (tokens[done:count], "stop")
                assert again.end.cut is not None and again.end.cut.chars == chars
        assert fake_tokenizer().decode(ids).endswith("(")  # in the prompt it is no part of the text
        whole = run_session(client, body | {"stop": [PROMPT]})
        assert (whole.tokens, whole.end.reason, whole.end.cut) == (tokens, "length", None)
        cloud.wait_until(cloud.is_empty)
        answer = client.post("/v1/sessions", json=body | {"generated": len(ids) + 1})
        assert answer.json()["error"]["param"] == "generated"


def test_the_devices_text_ends_with_the_session(
    cloud: FakeServer, local: LocalEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides cut at the same character; where special tokens are shown, only the device can know where."""
    made: list[SessionText] = []

    def kept(*args: Any) -> SessionText:
        made.append(SessionText(*args))
        return made[-1]

    monkeypatch.setattr(sessions, "SessionText", kept)
    with httpx.Client(base_url=local.url) as client:
        text = text_of(client, max_tokens=60)
        stop = text[20:24]
        found = complete(client, max_tokens=60, stop=stop)
        (server,) = made
        cloud.wait_until(cloud.is_empty)
        assert found["choices"][0]["text"] == text[: text.index(stop)] and server.cut is not None
        assert (server.cut.chars, server.cut.tokens) == (text.index(stop), found["usage"]["completion_tokens"])
        shown = complete(client, max_tokens=60, stop=stop, skip_special_tokens=False)
        assert shown["choices"] == found["choices"] and len(made) == 1


async def test_an_agent_learns_where_a_stop_string_ends_its_text(
    cloud: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a lost connection, inside the stop string; an older server is asked without it."""
    ids = fake_tokenizer().encode(PROMPT)
    tokens = target_tokens(ids, 40, PARAMS)
    stop = fake_tokenizer().decode(tokens)[14:21]
    count, chars = session_stop(ids, tokens, stop)
    request = GenerationRequest(tuple(ids), PARAMS, 40, ignore_eos=True, stop=(stop,))
    found = await generate([cloud.url], request, depth=FixedDepth(0))
    assert found.tokens == tuple(tokens[:count]) and found.finish_reason == "stop"
    assert found.cut is not None and (found.cut.tokens, found.cut.chars) == (count, chars)
    done, parse = count - 1, cloud.core.bodies.parse
    rest = replace(request, prompt=(*ids, *tokens[:done]), num_generated=done, max_tokens=40 - done)
    again = await generate([cloud.url], rest, depth=FixedDepth(0))
    assert again.tokens == (tokens[done],) and again.cut is not None and again.cut.chars == chars

    async def as_older(owner: bytes, message: Any, body: bytes, **more: Any) -> Any:
        if b'"stop":' in body or b'"prediction":' in body:
            raise FieldError("invalid_parameter", "stop: Extra inputs are not permitted", param="stop")
        return await parse(owner, message, body, **more)

    monkeypatch.setattr(cloud.core.bodies, "parse", as_older)
    old = await generate([cloud.url], replace(request, prediction=(1, 2)), depth=FixedDepth(0))
    assert (old.tokens, old.cut) == (tuple(tokens), None)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_predicted_output_is_drafted_from(is_local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the same, in fewer passes; usage counts the prediction's tokens by whether the text has them.

    The texts of a call share one index, which is not made on the event loop.
    """
    written = "def check(tokens, drafts): return all(token == draft for token, draft in zip(tokens, drafts))"
    predicted = written.replace("all(", "any(")
    tokens, runtime = fake_tokenizer().encode(predicted), ScriptedRuntime(written, PROMPT)
    follower = PredictionFollower(tokens)
    follower.push(fake_tokenizer().encode(written))
    asked: dict[str, Any] = {"max_tokens": 90, "ignore_eos": False, "temperature": 0}
    parts = [{"type": "text", "text": predicted[:10]}, {"type": "text", "text": predicted[10:]}]
    predicting, in_parts = (asked | {"prediction": {"type": "content", "content": each}} for each in (predicted, parts))
    with (
        serve_fake(config=SURE, runtime=runtime) as cloud,
        serve_local(cloud.url, runtime=fake_draft(0.0)) as local,
        httpx.Client(base_url=local.url if is_local else cloud.url) as client,
    ):
        plain, before = complete(client, **asked), cloud.core.engine.stats().totals
        assert plain["choices"][0]["text"] == written and before.lookup_accepted == 0
        found, after = complete(client, **predicting), cloud.core.engine.stats().totals
        details = found["usage"]["completion_tokens_details"]
        assert found["choices"] == plain["choices"]
        assert details["accepted_prediction_tokens"] == follower.num_accepted > 0.8 * len(tokens)
        assert details["rejected_prediction_tokens"] == len(tokens) - follower.num_accepted > 0
        assert after.lookup_accepted > 10 and after.passes - before.passes < before.passes / 2
        assert complete(client, **in_parts)["usage"]["completion_tokens_details"] == details
        check_acceptance(client, predicting, found["metrics"]["speculative_decoding"], len(tokens))
        makers = list[str]()

        def made(pairs: Iterator[int]) -> list[int]:
            makers.append(threading.current_thread().name)
            return sorted(pairs)

        monkeypatch.setattr(predicted_texts, "sorted", made, raising=False)
        several = complete(client, n=3, **predicting)["usage"]["completion_tokens_details"]
        assert several["accepted_prediction_tokens"] == 3 * details["accepted_prediction_tokens"]
        assert len(makers) == 1 and makers[0].startswith("outrider-texts")


def check_acceptance(client: httpx.Client, asked: dict[str, Any], found: dict[str, Any], num_predicted: int) -> None:
    """What an answer says of its drafts, by vLLM's names; a stream says it with its usage, several texts do not."""
    histogram, accepted = found["acceptance_histogram"], found["num_accepted_draft_tokens"]
    assert accepted == sum(count * each for count, each in enumerate(histogram)) > num_predicted * 0.5
    assert found == {
        "num_spec_steps": sum(histogram),
        "num_spec_tokens": len(histogram) - 1,
        "acceptance_histogram": histogram,
        "num_draft_tokens": found["num_draft_tokens"],
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / sum(histogram),
        "draft_acceptance_rate": accepted / found["num_draft_tokens"],
    }
    assert accepted <= found["num_draft_tokens"] and len(histogram) > 2
    *others, last = chunks(client, stream_options={"include_usage": True}, **asked)
    assert last["metrics"]["speculative_decoding"].keys() == found.keys() and last["usage"]["completion_tokens"] > 10
    assert not any("metrics" in other for other in (*others, complete(client, n=2, **asked)))


@pytest.mark.parametrize("text", ["zip " * 20_000, "é" * 500_000], ids=["tokens", "characters"])
def test_a_prediction_is_bounded(client: httpx.Client, text: str) -> None:
    """By its characters before it is tokenized, then by its tokens."""
    assert refused(client, prediction={"type": "content", "content": text}) == ("invalid_parameter", "prediction")


def test_a_prediction_is_found_again_after_a_difference() -> None:
    """Each token counts once, and `rest` is what a resumed session is told."""
    follower, empty = PredictionFollower([1, 2, 3, 4, 5, 6, 7, 8]), PredictionFollower([])
    repeating = PredictionFollower([1, 2, 0, 1, 2, 5, 6, 1, 2, 7])
    for each, tokens, expected in (
        (follower, [1, 2, 9, 9, 4, 5, 6], (5, 3, (7, 8))),
        (follower, [7, 8, 1, 2, 3, 4], (8, 0, (5, 6, 7, 8))),
        (repeating, [1, 2, 0, 9, 1, 2], (3, 7, (0, 1, 2, 5, 6, 1, 2, 7))),  # the nearest place
        (repeating, [5, 9, 6, 1], (7, 3, (2, 7))),
        (empty, [1], (0, 0, ())),
    ):
        each.push(tokens)
        assert (each.num_accepted, each.num_rejected, each.rest) == expected
    assert TextStyle(skips_special=False).is_plain is False


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
    "assistant: {% if thinks %}<think>{% endif %}"
)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


WRITTEN = '<think>Hm.</think>Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def callers() -> Iterator[tuple[str, str]]:
    """A verifier whose target writes a call, and an endpoint before it."""
    template = TOOL_TEMPLATE + "{# </think> #}"
    runtime = ScriptedRuntime(WRITTEN, "assistant: ")
    with serve_fake(runtime=runtime, chat_template=template) as server, serve_local(server.url) as endpoint:
        yield server.url, endpoint.url


@pytest.fixture(params=[0, 1], ids=["verifier", "endpoint"])
def caller(callers: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=callers[request.param], timeout=30.0) as opened:
        yield opened


def test_a_call_of_a_tool(caller: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """In message and deltas, with the reasoning beside it; without tools the text is content. A whole text is read as
    it comes, too.
    """
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0, "ignore_eos": False}
    pushed = list[str]()

    class Reader(ChatReader):
        def push(self, text: str, *, is_last: bool = False) -> dict[str, Any]:
            pushed.append(text)
            return super().push(text, is_last=is_last)

    with monkeypatch.context() as patch:
        patch.setattr(shapes, "ChatReader", Reader)
        whole = complete(caller, CHAT, tools=TOOLS, **asked)
    assert "".join(pushed) == WRITTEN and max(map(len, pushed)) < len(WRITTEN)
    openai_answers.ChatCompletion.model_validate(whole, strict=True)
    (choice,) = whole["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'} and call["type"] == "function"
    assert (message["content"], message["reasoning_content"], choice["finish_reason"]) == ("Sure.", "Hm.", "tool_calls")
    assert call["id"].startswith("call_")
    streamed = chunks(caller, CHAT, tools=TOOLS, **asked)
    for chunk in streamed:
        openai_answers.ChatChunk.model_validate(chunk, strict=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in streamed]
    content, thought = ("".join(delta.get(name, "") for delta in deltas) for name in ("content", "reasoning_content"))
    arguments = [each["function"]["arguments"] for delta in deltas for each in delta.get("tool_calls", ())]
    assert (content, thought, "".join(arguments)) == ("Sure.", "Hm.", '{"city": "Paris"}')
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = complete(caller, CHAT, **asked, **fields)["choices"]
        assert "tool_calls" not in choice["message"] and choice["message"]["content"].endswith("</tool_call>")
        assert choice["finish_reason"] == "stop"
    message = complete(caller, CHAT, include_reasoning=False, **asked)["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"].startswith("Sure.")


def test_a_choice_of_tools_is_checked(caller: httpx.Client) -> None:
    """The schema of tools, and what may be chosen."""
    named = {"type": "function", "function": {"name": "other"}}
    for fields, param in (
        ({"tools": TOOLS, "tool_choice": named}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": TOOLS * 129}, "tools"),
    ):
        assert refused(caller, CHAT, **fields) == ("invalid_parameter", param), fields


def test_the_responses_api_is_refused_by_name(client: httpx.Client) -> None:
    """With the endpoint that does the same work."""
    answer = client.post("/v1/responses", json={"model": "fake", "input": "zip"})
    assert code_of(answer) == (404, "unsupported_endpoint")
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


async def test_an_error_that_comes_with_the_last_tokens_takes_none_away() -> None:
    """A text that a stop string has ended is whole, however its sequence ends; of another, what came before the error
    is there.
    """
    inbox: Inbox[tuple[int, Any]] = Inbox()
    anything = MagicMock()
    anything.bridge.mailbox.return_value = inbox
    generation, tokens = Generation(anything, b"", 2), target_tokens(fake_tokenizer().encode(PROMPT), 30)
    full = fake_tokenizer().decode(tokens)
    for stop in (full[9:12], "\x00never"):
        assembler = TextStyle((stop,)).assembler(fake_tokenizer(), fake_tokenizer().encode(PROMPT))
        generation.choices.append(_Sequence(assembler, None, 4, recalled=anything, watch=anything, sequence_id=1))
    for index, reason in ((0, "error"), (1, "shutdown")):
        inbox.add((index, CommitEvent(0, tuple(tokens), 0, 0)))
        inbox.add((index, EndEvent(reason, SequenceUsage())))  # type: ignore[arg-type]
    found: list[Delta] = []
    with pytest.raises(RequestError, match="shut down"):
        async for deltas in generation.deltas():
            found += deltas
    assert [(each.index, each.finish_reason) for each in found] == [(0, "stop"), (1, None)]
    assert found[0].text == full[: full.index(full[9:12])] and full.startswith(found[1].text) and found[1].text
