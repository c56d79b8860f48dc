"""Tests OpenAI's client, unchanged but for address, key and model: schemas, errors, keys and cancelled calls.

Each talks to the local endpoint and to the verifier itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ValidationError
from tests.local_endpoint import LocalEndpoint, serve_local
from tests.serving import FakeServer, StepGate, serve_fake
from tools import fields_page

from outrider.cloud.api.state import ServerSettings
from outrider.edge.serve.state import LocalSettings
from outrider.models.http.openai import ChatRequest
from outrider.models.http.security import KeyRing

ROOT = Path(__file__).parent.parent
CHAT_UI = ROOT / "examples" / "chat_ui"
KEY = "a-key-of-your-own"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "zip"}]
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 12, "seed": 7}
LONG: Any = {"model": "fake", "prompt": "zip", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
SENT_BY_CLIENTS: dict[str, Any] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_p": 1,
    "user": "someone",
    "stop": None,
    "extra_body": {"logprobs": None, "store": False, "parallel_tool_calls": True, "metadata": {"chat": "1"}},
}
"""Fields that LangChain, `llm`, chat windows and agents send without being asked; none changes the text."""


@pytest.fixture(scope="module", params=["endpoint", "verifier"])
def url(request: pytest.FixtureRequest, cloud: FakeServer, local: LocalEndpoint) -> str:
    return f"{local.url if request.param == 'endpoint' else cloud.url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as opened:
        yield opened


def choice_of(cloud: FakeServer, path: str, **fields: Any) -> dict[str, Any]:
    """What the verifier answers to a plain request."""
    # verify: no certificates to load, which takes longer than the answer
    return dict(httpx.post(f"{cloud.url}/v1/{path}", json=ASKED | fields, verify=False).json()["choices"][0])


def chat_text(cloud: FakeServer, messages: Any = MESSAGES, **fields: Any) -> str:
    return str(choice_of(cloud, "chat/completions", messages=messages, **fields)["message"]["content"])


def plain_text(cloud: FakeServer, prompt: str = "zip", **fields: Any) -> str:
    return str(choice_of(cloud, "completions", prompt=prompt, **fields)["text"])


def unknown(message: BaseModel, prefix: str = "") -> set[str]:
    """Fields of an answer that OpenAI's types do not have."""
    found = {prefix + name for name in message.model_extra or ()}
    for name in type(message).model_fields:
        value = getattr(message, name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                found |= unknown(each, f"{prefix}{name}.")
    return found


# OpenAI's client


def test_models_are_listed(client: Any) -> None:
    """And found by name; `max_model_len` is the one field that OpenAI does not have."""
    (model,) = client.models.list()
    assert client.models.retrieve(model.id) == model and model.id == "fake"
    assert unknown(Model.model_validate(model.model_dump(exclude_unset=True), strict=True)) == {"max_model_len"}


def test_a_chat_answer_has_openais_schema(cloud: FakeServer, client: Any) -> None:
    """Strictly, with all fields that the schema requires; `seed` and `metrics` are the additions."""
    before_s = int(time.time())
    whole = json.loads(client.chat.completions.with_raw_response.create(messages=MESSAGES, **ASKED).content)
    chat = ChatCompletion.model_validate(whole, strict=True)
    assert unknown(chat) == {"seed", "metrics"} and whole["seed"] == 7
    message = {"role": "assistant", "content": chat_text(cloud), "refusal": None}
    assert message["content"]
    assert whole["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert re.fullmatch(r"chatcmpl-[\w-]{16}", chat.id) and before_s <= chat.created <= time.time()
    assert chat.model == "fake" and chat.system_fingerprint == cloud.core.model.target != ""
    usage: Any = chat.usage
    assert usage.completion_tokens == 12 and usage.completion_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_a_completion_has_openais_schema(cloud: FakeServer, client: Any) -> None:
    """As the chat's; a stream's chunks differ from the type only in what OpenAI's own have too: no reason yet."""
    whole = json.loads(client.completions.with_raw_response.create(prompt="zip", **ASKED).content)
    completion = Completion.model_validate(whole, strict=True)
    assert unknown(completion) == {"seed", "metrics"} and completion.id.startswith("cmpl-")
    text = plain_text(cloud)
    assert text and whole["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    assert completion.system_fingerprint == cloud.core.model.target
    *chunks, last = client.completions.create(prompt="zip", stream=True, **ASKED)
    for chunk in chunks:
        with pytest.raises(ValidationError) as refused:
            Completion.model_validate(chunk.model_dump(exclude_unset=True), strict=True)
        assert [error["loc"] for error in refused.value.errors()] == [("choices", 0, "finish_reason")]
    Completion.model_validate(last.model_dump(exclude_unset=True), strict=True)
    assert "".join(chunk.choices[0].text for chunk in [*chunks, last]) == text


def test_a_stream_has_openais_schema(cloud: FakeServer, client: Any) -> None:
    """The role first, the reason last, then usage, then [DONE]; one id throughout."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.chat.completions.with_streaming_response.create(messages=MESSAGES, **ASKED, **options) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    parsed = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert [unknown(chunk) for chunk in parsed] == [{"seed"}] * (len(parsed) - 1) + [{"seed", "metrics"}]
    assert len({(each.id, each.created, each.model, each.system_fingerprint) for each in parsed}) == 1
    assert parsed[0].system_fingerprint == cloud.core.model.target
    *pieces, usage = parsed
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == 12
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].finish_reason for each in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == chat_text(cloud)


def test_what_clients_send_unasked_changes_nothing(cloud: FakeServer, client: Any) -> None:
    """Neutral values of fields that are not offered, and fields that have no effect."""
    chat = client.chat.completions.create(messages=MESSAGES, **ASKED, **SENT_BY_CLIENTS)
    assert chat.choices[0].message.content == chat_text(cloud)
    assert client.completions.create(prompt=["zip"], **ASKED, **SENT_BY_CLIENTS).choices[0].text == plain_text(cloud)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_each_field_of_openais_works_is_refused_or_is_without_effect(kind: str) -> None:
    """Nothing that a client can ask for is dropped because nobody knew it; docs/fields.md says what each does."""
    page = fields_page.PAGE.read_text(encoding="utf-8")
    assert page == fields_page.page(), "run make docs"
    for name in (*fields_page.OPENAI[kind], *fields_page.VLLM[kind]):
        assert fields_page.state_of(name, fields_page.REQUESTS[kind]) is not None and f"| `{name}` |" in page
    assert not set(fields_page.IGNORED) & (set(ChatRequest.model_fields) | set(ChatRequest.neutral_values()))


USER: Any = [{"role": "user", "content": "zip"}]
Call = Callable[[Any], object]
ERRORS: list[tuple[Call, type[openai.APIStatusError], str, str | None, str]] = [
    (
        lambda c: c.chat.completions.create(model="fake", messages=USER, n=129),
        openai.BadRequestError,
        "invalid_parameter",
        "n",
        "n: Input should be less than or equal to 128",
    ),
    (
        lambda c: c.chat.completions.create(model="fake", messages=USER, functions=[{"name": "f"}]),
        openai.BadRequestError,
        "unsupported_parameter",
        "functions",
        "functions is not supported, except as []",
    ),
    (
        lambda c: c.chat.completions.create(
            model="fake", messages=USER, extra_body={"response_format": {"type": "structural_tag"}}
        ),
        openai.BadRequestError,
        "unsupported_parameter",
        "response_format",
        "response_format.type is 'structural_tag'",
    ),
    (
        lambda c: c.chat.completions.create(
            model="fake", messages=USER, tools=[{"type": "function", "function": {"name": "f"}}]
        ),
        openai.BadRequestError,
        "unsupported_parameter",
        "tools",
        "tools is not supported: the chat template of fake has no tool calls",
    ),
    (
        lambda c: c.chat.completions.create(model="fake", messages=USER, moderation={"model": "omni"}),
        openai.BadRequestError,
        "unsupported_parameter",
        "moderation",
        "moderation is not supported",
    ),
    (
        lambda c: c.completions.create(model="fake", prompt="zip", max_tokens=-1),
        openai.BadRequestError,
        "invalid_parameter",
        "max_tokens",
        "max_tokens: Input should be greater than or equal to 1",
    ),
    (
        lambda c: c.chat.completions.create(model="fake", messages=[]),
        openai.BadRequestError,
        "invalid_parameter",
        "messages",
        "messages: ",
    ),
    (
        lambda c: c.chat.completions.create(model="gpt-4", messages=USER),
        openai.NotFoundError,
        "model_not_found",
        "model",
        "this server serves fake, and no model",
    ),
    (lambda c: c.models.retrieve("gpt-4"), openai.NotFoundError, "model_not_found", "model", "this server serves fake"),
    (
        lambda c: c.responses.create(model="fake", input="zip"),
        openai.NotFoundError,
        "unsupported_endpoint",
        None,
        "use /v1/chat",
    ),
    (
        lambda c: c.embeddings.create(model="fake", input="zip"),
        openai.NotFoundError,
        "not_found",
        None,
        "there is no /v1/embeddings",
    ),
]


@pytest.mark.parametrize(
    ("call", "kind", "code", "param", "words"),
    ERRORS,
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_errors_are_typed_and_named(
    client: Any, call: Call, kind: type[openai.APIStatusError], code: str, param: str | None, words: str
) -> None:
    """The client raises its own error; code, field and message are ours."""
    with pytest.raises(kind, match=re.escape(words)) as raised:
        call(client)
    assert (raised.value.code, raised.value.param, raised.value.type) == (code, param, "invalid_request_error")


def test_a_key_that_is_not_accepted(cloud: FakeServer) -> None:
    """AuthenticationError from both; the accepted key gets the text. The endpoint's own key is another."""
    with (
        serve_fake(ServerSettings(KeyRing([KEY * 2]))) as guarded,
        serve_local(guarded.url, LocalSettings(KeyRing([KEY])), api_key=KEY * 2) as endpoint,
    ):
        for server, key in ((guarded, KEY * 2), (endpoint, KEY)):
            with client_of(server) as client:
                with pytest.raises(openai.AuthenticationError, match="this API key is not accepted") as raised:
                    client.models.list()
                assert raised.value.code == "unauthorized"
                accepted = client.with_options(api_key=key).completions.create(prompt="zip", **ASKED)
                assert accepted.choices[0].text == plain_text(cloud)


def client_of(server: FakeServer | LocalEndpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@contextmanager
def refuses(kind: type[openai.APIStatusError], code: str) -> Iterator[None]:
    """Each call is refused in this way, with the advice to try again in a second."""
    with pytest.raises(kind) as raised:
        yield
    assert (raised.value.code, raised.value.response.headers["retry-after"]) == (code, "1")


def test_a_busy_endpoint_and_one_without_a_verifier() -> None:
    """RateLimitError and InternalServerError, with `Retry-After`, which the client obeys where it retries; more texts
    than there are places are refused for good.
    """
    with (
        serve_fake(gate=StepGate()) as server,
        serve_local(server.url, LocalSettings(max_own=1)) as busy,
        serve_local("http://127.0.0.1:9") as alone,
        client_of(busy) as client,
        client_of(alone) as other,
    ):
        server.gate.allow(3)
        with pytest.raises(openai.BadRequestError, match="at most 1 here"):
            client.completions.create(prompt=["zip", "all"], **ASKED)
        with client.completions.create(prompt="zip", stream=True, **ASKED) as stream:
            next(iter(stream))
            with refuses(openai.RateLimitError, "too_many_requests"):
                client.completions.create(prompt="zip", **ASKED)
            server.gate.open()
        with refuses(openai.InternalServerError, "no_verifier"):
            other.completions.create(prompt="zip", **ASKED)


def test_a_busy_verifier() -> None:
    """RateLimitError, with `Retry-After`, for more texts at once than a key may have, and BadRequestError, which no
    client repeats, for a call that has more of them itself.
    """
    with serve_fake(ServerSettings(max_sessions=1), gate=StepGate()) as busy, client_of(busy) as client:
        for several in ({"prompt": ["zip", "all"]}, {"prompt": "zip", "n": 2}):
            with pytest.raises(openai.BadRequestError, match="asks for 2 texts; this client may have 1") as refused:
                client.completions.create(**several, **ASKED)
            assert refused.value.param == "n"
        with (
            client.completions.create(prompt="zip", stream=True, **ASKED),
            refuses(openai.RateLimitError, "too_many_sessions"),
        ):
            client.completions.create(prompt="all", **ASKED)
        busy.gate.open()
        busy.wait_until(busy.is_empty)
        assert client.completions.create(prompt="zip", **ASKED).choices[0].text


@pytest.mark.parametrize(
    ("is_local", "words"), [(True, "shutting down"), (False, "shut down before the request was complete")]
)
def test_a_stream_that_the_server_ends_raises(is_local: bool, words: str) -> None:
    """The error event of a stream becomes the client's APIError, with our code; new texts are refused meanwhile."""
    with (
        serve_fake(gate=StepGate(), drain_s=30.0) as server,
        serve_local(server.url, drain_s=30.0) as endpoint,
        client_of(endpoint if is_local else server) as client,
    ):
        server.gate.allow(3)
        ends = (endpoint if is_local else server).server
        stream = client.completions.create(**LONG, stream=True)
        assert next(stream).choices[0].text
        ends.begin_drain(30.0)
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            client.completions.create(prompt="zip", **ASKED)
        ends.begin_drain(0.0)
        if not is_local:
            server.gate.open()
        with pytest.raises(openai.APIError, match=words) as raised:
            list(stream)
        assert refused.value.code == raised.value.code == "shutting_down" and refused.value.status_code == 503


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_local", [True, False], ids=["endpoint", "verifier"])
async def test_a_cancelled_call_frees_everything(is_local: bool, is_stream: bool) -> None:
    """AsyncOpenAI: a task that is cancelled ends the text, which without it could not end: the target stands still."""
    gate = StepGate()

    async def ask(client: openai.AsyncOpenAI) -> None:
        if not is_stream:
            await client.completions.create(**LONG)
            return
        async for chunk in await client.completions.create(**LONG, stream=True):
            gate.allow(0 if chunk.choices[0].text else 1)

    with serve_fake(gate=gate) as server, serve_local(server.url) as endpoint:
        gate.allow(2)
        address = endpoint.url if is_local else server.url
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
            task = asyncio.create_task(ask(client))
            await asyncio.to_thread(server.wait_until, lambda: server.core.engine.stats().running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        if is_local:
            endpoint.wait_until(endpoint.is_at_rest)
        server.wait_until(lambda: server.core.slots.num_taken == 0)
        gate.open()
        server.wait_until(server.is_empty)
