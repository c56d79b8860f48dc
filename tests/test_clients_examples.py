"""Tests examples of clients' documents and of ours, unchanged but for address, key and model."""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import llm
import openai
import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai.types import Completion
from pydantic import BaseModel
from tests.local_endpoint import LocalEndpoint, serve_local
from tests.scripted import ScriptedRuntime
from tests.serving import FakeServer, serve_fake
from tests.test_clients import ASKED, CHAT_UI, MESSAGES, ROOT, USER, chat_text, plain_text, unknown, url

__all__ = ["url"]  # a fixture


@pytest.fixture(scope="module")
def strict(url: str) -> Iterator[Any]:
    """Refuses an answer that is not typed as OpenAI's."""
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0, _strict_response_validation=True) as opened:
        yield opened


def test_openais_example_of_logprobs(cloud: FakeServer, strict: Any) -> None:
    """From the cookbook: the likeliest tokens at each place, whole and streamed."""
    asked: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **ASKED}
    found = strict.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(found) == 12 and all(len(each.top_logprobs) == 2 for each in found)
    assert bytes(byte for each in found for byte in each.bytes).decode(errors="replace") == chat_text(cloud)
    with strict.chat.completions.stream(**asked) as stream:
        assert list(stream)
        assert stream.current_completion_snapshot.choices[0].logprobs.content == found
    legacy = strict.completions.create(prompt="zip", logprobs=2, n=2, best_of=3, **ASKED)
    assert [len(choice.logprobs.tokens) for choice in legacy.choices] == [12, 12]
    assert sum(len(each) >= 2 for each in legacy.choices[0].logprobs.top_logprobs) == 12


def gathered_by(client: Any, **asked: Any) -> tuple[Any, list[str]]:
    """The choice that the client's own stream gathers, and the kinds of its events."""
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_completion().choices[0], kinds


def test_openais_example_of_predicted_outputs(cloud: FakeServer, strict: Any) -> None:
    """From the guide: code that is written again, with a small change; usage says how much of it was used."""
    code = chat_text(cloud)
    asked: dict[str, Any] = {"messages": MESSAGES, "prediction": {"type": "content", "content": code}, **ASKED}
    completion = strict.chat.completions.create(**asked)
    details = completion.usage.completion_tokens_details
    assert completion.choices[0].message.content == code
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens >= 0
    stream = strict.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == code


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get current temperature for a given location.",
            "parameters": {
                "type": "object",
                "properties": {"location": {"type": "string", "description": "City and country"}},
                "required": ["location"],
                "additionalProperties": False,
            },
        },
    }
]


TOOL_TEMPLATE: Final = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.location }}{% endfor %}\n{% endfor %}assistant: "
)


@contextmanager
def clients_of(written: str) -> Iterator[list[Any]]:
    """OpenAI's clients of a verifier whose target would write this, and of an endpoint before it."""
    options: Any = {"api_key": "unused", "max_retries": 0, "_strict_response_validation": True}
    with (
        serve_fake(runtime=ScriptedRuntime(written, "assistant: "), chat_template=TOOL_TEMPLATE) as server,
        serve_local(server.url) as endpoint,
        openai.OpenAI(base_url=f"{server.url}/v1", **options) as of_server,
        openai.OpenAI(base_url=f"{endpoint.url}/v1", **options) as of_endpoint,
    ):
        yield [of_server, of_endpoint]


def test_openais_example_of_tools() -> None:
    """From the guide: a call, its result, the answer; whole, and as the client's own stream gathers it."""
    written = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
    asked: dict[str, Any] = {"model": "fake", "tools": TOOLS, "temperature": 0}
    with clients_of(written) as clients:
        for client in clients:
            (choice,) = client.chat.completions.create(messages=WEATHER, **asked).choices
            gathered, kinds = gathered_by(client, messages=WEATHER, **asked)
            for each in (choice, gathered):
                (call,) = each.message.tool_calls or []
                assert (each.finish_reason, call.type, each.message.content) == (
                    "tool_calls",
                    "function",
                    "Let me look.",
                )
                assert json.loads(call.function.arguments) == {"location": "Paris"}
            assert "tool_calls.function.arguments.done" in kinds
            result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "14"}
            messages = [*WEATHER, choice.message, result]
            (final,) = client.chat.completions.create(messages=messages, tool_choice="none", **asked).choices
            assert (final.message.tool_calls, final.finish_reason) == (None, "stop")


WEATHER: Any = [{"role": "user", "content": "What is the weather like in Paris today?"}]


class CalendarEvent(BaseModel):
    """Of OpenAI's guide to structured outputs."""

    name: str
    date: str
    participants: list[str]


class GetWeather(BaseModel):
    """Of OpenAI's guide to function calling."""

    location: str
    unit: Literal["celsius", "fahrenheit"]


def test_openais_example_of_a_json_schema() -> None:
    """From the guide: `parse` with a class; whole, and as the client's own stream gathers it."""
    event = CalendarEvent(name="Science Fair", date="Friday", participants=["Alice", "Bob"])
    asked: dict[str, Any] = {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
        ],
        "response_format": CalendarEvent,
        "temperature": 0,
    }
    # What is outside the schema is not written: the text ends where the object does.
    with clients_of(event.model_dump_json() + " I hope this helps!") as clients:
        for client in clients:
            (choice,) = client.chat.completions.parse(**asked).choices
            assert choice.message.parsed == event and choice.finish_reason == "stop"
            gathered, kinds = gathered_by(client, **asked)
            assert (gathered.message.parsed, gathered.message.content) == (event, choice.message.content)
            assert kinds[-1] == "content.done"
            with pytest.raises(openai.LengthFinishReasonError):
                client.chat.completions.parse(max_tokens=3, **asked)


def test_openais_example_of_strict_tools() -> None:
    """From the guide: `pydantic_function_tool`, which is strict; chosen by the model, required, and by its name."""
    weather = GetWeather(location="Paris, France", unit="celsius")
    call = json.dumps({"name": "GetWeather", "arguments": weather.model_dump() | {"unit": "kelvin"}})
    asked: dict[str, Any] = {"model": "fake", "messages": WEATHER, "temperature": 0, "parallel_tool_calls": False}
    asked["tools"] = [openai.pydantic_function_tool(GetWeather)]
    named = {"type": "function", "function": {"name": "GetWeather"}}
    with clients_of(f"<tool_call>\n{call}\n</tool_call>") as clients:
        for client in clients:
            choices = [
                client.chat.completions.parse(**asked, **choice).choices[0]
                for choice in ({}, {"tool_choice": "required"}, {"tool_choice": named})
            ]
            gathered, _ = gathered_by(client, **asked)
            calls = [each.message.tool_calls for each in (*choices, gathered)]
            parsed = [call.function.parsed_arguments for (call,) in calls]
            assert all(isinstance(each, GetWeather) and each.location == weather.location for each in parsed)
            assert parsed[-1] == parsed[0]


def test_a_langchain_chain(cloud: FakeServer, url: str) -> None:
    """prompt | ChatOpenAI | StrOutputParser: whole, streamed, several at a time, and without waiting."""
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{topic}")])
    chain = prompt | ChatOpenAI(base_url=url, api_key="unused", **ASKED) | StrOutputParser()
    assert chain.invoke({"topic": "zip"}) == chat_text(cloud)
    pieces = list(chain.stream({"topic": "zip"}))
    assert "".join(pieces) == chat_text(cloud) and len(pieces) > 2
    topics = ["zip", "all", "def"]
    expected = [chat_text(cloud, [MESSAGES[0], {"role": "user", "content": topic}]) for topic in topics]
    assert chain.batch([{"topic": topic} for topic in topics]) == expected
    assert asyncio.run(chain.ainvoke({"topic": "zip"})) == expected[0]


def test_langchain_reads_usage_and_fingerprint(cloud: FakeServer, url: str) -> None:
    """And raises OpenAI's error where a chain needs what is not offered."""
    model = ChatOpenAI(base_url=url, api_key="unused", max_retries=0, stream_usage=True, **ASKED)
    message, gathered = model.invoke("zip"), functools.reduce(operator.add, model.stream("zip"))
    facts = {"system_fingerprint": cloud.core.model.target, "finish_reason": "length"}
    assert message.response_metadata.items() >= facts.items() and gathered.content == message.content
    assert message.usage_metadata["output_tokens"] == gathered.usage_metadata["output_tokens"] == 12
    schema = {"title": "name", "type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        model.with_structured_output(schema, strict=True).invoke("zip")


def test_llm_with_its_configuration(
    cloud: FakeServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of examples/chat_ui/README.md: a chat model, two turns of it, and a model for completions."""
    (lines,) = re.findall(r"```yaml\n(.*?)```", (CHAT_UI / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    written = lines.replace("http://127.0.0.1:8077/v1", url).replace("outrider-reference-target", "fake")
    (tmp_path / "extra-openai-models.yaml").write_text(written, encoding="utf-8")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    options = {"seed": 7, "max_tokens": 12}
    turns = llm.get_model("outrider").conversation()
    first = turns.prompt("zip", system="Be brief.", **options)
    assert first.text() == chat_text(cloud) and first.usage().output == 12
    again = turns.prompt("all", system="Be brief.", **options)
    assert again.text() == chat_text(
        cloud,
        [*MESSAGES, {"role": "assistant", "content": first.text()}, {"role": "user", "content": "all"}],
    )
    assert llm.get_model("outrider").prompt("zip", stream=False, **options).text() == chat_text(cloud, USER)
    assert llm.get_model("outrider-completion").prompt("zip", **options).text() == plain_text(cloud)


def test_llm_without_configuration(cloud: FakeServer, local: LocalEndpoint, tmp_path: Path) -> None:
    """The command of the README, as a process."""
    (line,) = re.findall(r"^llm openai endpoint .*-m .*$", (CHAT_UI / "README.md").read_text(encoding="utf-8"), re.M)
    words = [local.url + "/v1" if word.startswith("http:") else word for word in shlex.split(line)[1:]]
    words[words.index("-m") + 1] = "fake"
    command = [sys.executable, "-m", "llm", *words[:-1], "-o", "seed", "7", "-o", "max_tokens", "12", "zip"]
    known = os.environ | {"LLM_USER_PATH": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=known, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().replace("\r\n", "\n") == chat_text(cloud, USER) + "\n"


@pytest.mark.parametrize("name", ["openai_client.py", "langchain_chain.py"])
@pytest.mark.parametrize("is_chat", [True, False])
def test_examples_run(
    cloud: FakeServer,
    local: LocalEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    is_chat: bool,
) -> None:
    """The text is the cloud's own for the same prompt and seed."""
    is_chain = name == "langchain_chain.py"
    monkeypatch.setenv("OPENAI_BASE_URL", f"{local.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setattr(sys, "argv", [name, "zip", *([] if is_chat else ["--completion"])])
    runpy.run_path(str(CHAT_UI / name), run_name="__main__")
    if is_chat:
        messages = [MESSAGES[0], {"role": "user", "content": "Tell me about zip."}] if is_chain else USER
        expected = chat_text(cloud, messages, max_tokens=64)
    elif is_chain:  # the library has a temperature of its own
        expected = plain_text(cloud, "# zip\n", max_tokens=64, temperature=0.7)
    else:
        expected = plain_text(cloud, max_tokens=64)
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n") != ""


def test_a_target_without_a_template_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the reference pair's."""
    with serve_fake(has_chat_template=False) as plain, serve_local(plain.url) as local:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{local.url}/v1")
        monkeypatch.setattr(sys, "argv", ["openai_client.py", "zip"])
        with pytest.raises(SystemExit, match=r"no chat template.*; add --completion"):
            runpy.run_path(str(CHAT_UI / "openai_client.py"), run_name="__main__")


def test_the_lines_of_the_document(local: LocalEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/serve.md: curl and OpenAI's client give one text for one seed."""
    document = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8").replace("http://127.0.0.1:8077", local.url)
    (line,) = re.findall(r"^curl .*?def walk.*?'$", document, re.MULTILINE | re.DOTALL)
    program = shutil.which("curl")
    assert program is not None
    done = subprocess.run([program, "-sS", *shlex.split(line)[1:]], capture_output=True, check=False)
    completion = Completion.model_validate_json(done.stdout, strict=True)
    assert completion.choices[0].text and unknown(completion) == {"seed", "metrics"}
    (block,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    exec(block.replace("stream=True", "stream=True, temperature=0.8, seed=7"), {})
    assert capsys.readouterr().out == completion.choices[0].text
