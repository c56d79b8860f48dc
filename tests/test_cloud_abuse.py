"""Tests that hostile bodies cost little: one error each, memory in proportion, no text tokenized in vain."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.engine_harness import refused
from tests.hostile_bodies import (
    CHAT,
    COMPLETIONS,
    DRAFTS,
    HOSTILE_BODIES,
    MAX_BYTES,
    RENDER,
    SESSIONS,
    VERIFY,
    HostileBody,
)
from tests.local_endpoint import serve_local
from tests.serving import (
    JSON,
    FakeServer,
    StepGate,
    code_of,
    fake_tokenizer,
    open_session,
    serve_fake,
)
from tests.waiting import TIMEOUT_S, lets_other_threads_run

from outrider.cloud.api import completions
from outrider.cloud.api.admission import Admission
from outrider.cloud.api.draft_posts import MAX_DRAFT_BYTES
from outrider.cloud.api.state import DraftLimits, ServerSettings
from outrider.cloud.api.verify import VerifyEnvelope
from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import Strikes
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http import openai
from outrider.models.http.bodies import (
    MAX_JSON_COMMAS,
    MAX_JSON_PARTS,
    load,
    parse,
)
from outrider.models.http.encoding import encode_chat, encode_prediction, encode_prompts
from outrider.models.http.errors import from_validation
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import DraftRequest, SessionRequest

MESSAGES: dict[str, type[BaseModel]] = {
    COMPLETIONS: openai.CompletionRequest,
    CHAT: openai.ChatRequest,
    RENDER: openai.RenderRequest,
    SESSIONS: SessionRequest,
    DRAFTS: DraftRequest,
    VERIFY: VerifyEnvelope,
}


def named(body: HostileBody) -> str:
    return f"{body.path}: {body.name}"


@pytest.fixture(scope="module")
def server_and_session() -> Iterator[tuple[FakeServer, str]]:
    """A server with one open session, and its id. Its budgets take all drafts, however fast they come."""
    settings = ServerSettings(draft_limits=DraftLimits(session_burst=1e6, owner_burst=1e6))
    with (
        serve_fake(settings, gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
        open_session(client, {"prompt": [1], "max_tokens": 10}) as session,
    ):
        yield server, session.opened.session
        server.gate.open()
        assert list(session.events)


@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=named)
def test_a_hostile_body_gets_one_error(
    server_and_session: tuple[FakeServer, str], body: HostileBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many elements are wrong, validation stops at the first; no such text is tokenized."""
    server, session = server_and_session
    num_faults: list[int] = []

    def spy(faults: list[Any], **options: Any) -> RequestError:
        num_faults.append(len(faults))
        return from_validation(faults, **options)

    for module in ("models.http.bodies", "cloud.api.verify"):
        monkeypatch.setattr(f"outrider.{module}.from_validation", spy)
    encode, sought = Mock(return_value=[]), AsyncMock()
    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Admission, "sought", sought)
    content = body.make(MAX_DRAFT_BYTES if body.path == DRAFTS else MAX_BYTES)
    answer = httpx.post(server.url + body.path.format(session=session), content=content, headers=JSON, timeout=60)
    assert (answer.status_code // 100, answer.json()["error"]["code"]) == (4, body.code)
    assert sum(num_faults) <= 2 and not encode.called and not sought.called and len(answer.content) < 1000


@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=named)
def test_a_hostile_body_takes_little_memory(body: HostileBody) -> None:
    """Parsing takes at most 12 times the largest body; integers take 10 times their digits."""
    content = body.make(MAX_BYTES)
    tracemalloc.start()
    try:
        with suppress(RequestError):
            parse(MESSAGES[body.path], content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * MAX_BYTES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a\\"[{:,é'), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a\\":', max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(json_values, st.integers(1, 12), st.integers(1, 5), st.integers(1, 8))
def test_the_parts_of_a_body_are_counted_as_json_does(value: Any, limit: int, max_keys: int, max_commas: int) -> None:
    """Marks inside strings do not count, also beside escaped quotes and backslashes."""
    found = Counter(strings=isinstance(value, str))

    def count(value: Any) -> None:
        if isinstance(value, dict | list):
            inside = list(value.values()) if isinstance(value, dict) else value
            keys = len(value) if isinstance(value, dict) else 0
            strings = keys + sum(isinstance(each, str) for each in inside)
            found.update(parts=1 + keys, keys=keys, commas=max(0, len(inside) - 1), strings=strings)
            for each in inside:
                count(each)

    count(value)
    text = json.dumps(value, ensure_ascii=False).encode()
    most_commas = max(max_commas, len(text) * max_commas >> 20)
    are_too_many = max(found["parts"], found["strings"]) > limit
    limits: Any = {"MAX_JSON_PARTS": limit, "MAX_JSON_KEYS": max_keys, "MAX_JSON_COMMAS": max_commas}
    with patch.multiple("outrider.models.http.bodies", **limits):
        if are_too_many or found["keys"] > max_keys or found["commas"] > most_commas:
            with pytest.raises(RequestError):
                load(text)
        else:
            assert load(text) == value


def test_a_prompt_of_short_ids_is_taken_up_to_a_bound() -> None:
    """A body full of digits is refused before it is read."""
    first, last = b'{"max_tokens":1,"prompt":[', b"5]}"
    assert parse(SessionRequest, first + b"5," * (MAX_JSON_COMMAS - 1) + last).prompt == [5] * MAX_JSON_COMMAS
    with pytest.raises(RequestError, match="the body has more than 240000 commas between elements; send less"):
        parse(SessionRequest, first + b"5," * MAX_JSON_COMMAS + last)
    assert len(load(b"[" + b"12345," * MAX_JSON_COMMAS * 2 + b"1]")) == 2 * MAX_JSON_COMMAS + 1  # of a longer body


def test_text_full_of_brackets_is_no_structure() -> None:
    """A prompt of code may have more brackets than a body may have lists."""
    body = openai.CompletionRequest(prompt='[{"a": \\"b\\"}]\\\\' * (MAX_JSON_PARTS // 4))
    assert parse(openai.CompletionRequest, body.model_dump_json().encode()).prompt == body.prompt


NUMBERS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"), (True, "1")
)
MARKS: dict[str, tuple[Any, ...]] = {"ignore_eos": (1, "true")}


@pytest.mark.parametrize(
    ("path", "body", "wrong"),
    [
        (
            SESSIONS,
            {"prompt": [1], "max_tokens": 1},
            {**NUMBERS, **MARKS, "prompt": ([True],), "stop_ids": ([True],), "patience_ms": (True,)}
            | {"draft_lag_ms": (True,)},
        ),
        (VERIFY, {"prefix": [1]}, {**NUMBERS, "prefix": ([True],), "draft": ([True],)}),
        (
            COMPLETIONS,
            {"prompt": "a"},
            {**NUMBERS, **MARKS, "stream": (1, "true"), "prompt": ([1, True],), "stop_token_ids": ([True],)},
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, NUMBERS),
    ],
)
def test_booleans_numbers_and_strings_are_not_each_other(
    server_and_session: tuple[FakeServer, str], path: str, body: dict[str, Any], wrong: dict[str, tuple[Any, ...]]
) -> None:
    """In every route, for every field; the error names it."""
    with httpx.Client(base_url=server_and_session[0].url) as client:
        for name, value in ((name, value) for name, values in wrong.items() for value in values):
            sent = body | {name: value}
            answer = client.post(path, json={"items": [sent]} if path == VERIFY else sent)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_parameter"), sent
            assert f"{error['param']}.".startswith(f"items.0.{name}." if path == VERIFY else f"{name}."), sent


def test_an_integer_is_a_number_and_a_fraction_is_no_integer() -> None:
    """`"temperature": 1` is fine; `"max_tokens": 1.0` is refused, as OpenAI does."""
    assert parse(openai.CompletionRequest, b'{"prompt":"a","temperature":1,"top_p":1}').temperature == 1.0
    with pytest.raises(RequestError, match="max_tokens"):
        parse(openai.CompletionRequest, b'{"prompt":"a","max_tokens":1.0}')


def test_tokenizing_a_long_text_lets_other_threads_run() -> None:
    """Another thread gets the interpreter while a text is tokenized."""
    tokenizer = fake_tokenizer()
    assert lets_other_threads_run(lambda: tokenizer.encode("def verify(tokens) " * 20_000), attempts=5)


@given(st.text(max_size=60))
def test_a_text_is_no_longer_than_its_tokens_can_be(text: str) -> None:
    """The bound by which texts are refused refuses none that fits."""
    tokenizer = fake_tokenizer()
    assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_token_chars


@pytest.mark.parametrize("unit", ["\N{GRINNING FACE}", "verify "])
def test_a_text_of_far_too_many_tokens_is_tokenized_in_part(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of it as shows that it has too many; one that may fit is tokenized as a whole."""
    tokenizer, encode, tokenized = fake_tokenizer(), Tokenizer.encode, [0]

    def spy(self: Tokenizer, text: str, **options: Any) -> list[int]:
        ids = encode(self, text, **options)
        tokenized.append(len(ids))
        return ids

    def encoded(**fields: Any) -> Any:
        return encode_prompts(tokenizer, 4000, openai.CompletionRequest.model_validate(fields))

    monkeypatch.setattr(Tokenizer, "encode", spy)
    text = unit * 60_000
    with refused("context_length_exceeded", match="characters, which are more than the 4000 tokens"):
        encoded(prompt=text)
    most = 4 * (1 << 15)  # of a part: a character may have four tokens
    assert len(tokenized) == 2 and sum(tokenized) <= most
    for more in ({"prompt": text, "truncate_prompt_tokens": 3}, {"prompt": "a", "suffix": text}):
        with pytest.raises(RequestError, match=r"characters, which are more than the (16384 tokens .* cuts|4000 )"):
            encoded(**more)
    assert max(tokenized) <= most
    dense = [{"role": "user", "content": "\N{GRINNING FACE}" * 40_000}]
    chat = openai.RenderRequest.model_validate({"messages": dense, "truncate_prompt_tokens": 3})
    with pytest.raises(RequestError, match=r"more than the 18000 tokens that this server takes before it cuts"):
        encode_chat(tokenizer, 9000, chat)
    assert max(tokenized) <= most
    long = unit * 9_000  # over the context, yet not by far
    assert encoded(prompt=long, truncate_prompt_tokens=3) == [encode(tokenizer, long)[-3:]]
    predicted = {"prompt": "a", "prediction": {"type": "content", "content": text}}
    with pytest.raises(RequestError, match="expected at most 16384 tokens"):
        encode_prediction(tokenizer, openai.CompletionRequest.model_validate(predicted))
    assert max(tokenized) <= most and encoded(prompt=unit * 100) == [encode(tokenizer, unit * 100)]


def test_texts_are_tokenized_after_slots_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that gets no slot costs no tokenizing, and one that is refused later frees its slots."""
    with (
        serve_fake(ServerSettings(max_sessions=2), gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        with (
            client.stream("POST", SESSIONS, json={"prompt": [1], "max_tokens": 2}),
            client.stream("POST", SESSIONS, json={"prompt": [1], "max_tokens": 2}),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
                for path, body in (
                    (COMPLETIONS, {"prompt": "a"}),
                    (CHAT, {"messages": [{"role": "user"}]}),
                    (SESSIONS, {}),
                ):
                    assert client.post(path, json=body).json()["error"]["code"] == "too_many_sessions"
            server.gate.open()
        server.wait_until(server.is_empty)
        assert client.post(COMPLETIONS, json={"prompt": ["a", ""]}).status_code == 400
        long = {"messages": [{"role": "user", "content": "a" * 100_000}]}
        assert client.post(CHAT, json=long).status_code == 400
        server.wait_until(server.is_empty)


def test_what_waits_for_a_thread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations to render, by a queue of their own, since sessions that run are no reason to refuse a device's next
    one; grammars of sessions by their slots.
    """
    freed = threading.Event()

    def block(*_: Any) -> list[int]:
        assert freed.wait(TIMEOUT_S)
        return [1]

    monkeypatch.setattr(completions, "encode_chat", block)
    monkeypatch.setattr(completions, "MAX_WAITING_RENDERS", 1)
    monkeypatch.setattr(GrammarSpec, "__post_init__", block)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    ruled = {"prompt": [1], "max_tokens": 1, "grammar": {"kind": "regex", "text": "a"}}
    with (
        serve_fake(ServerSettings(max_sessions=1)) as server,
        httpx.Client(base_url=server.url) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        rendered = [pool.submit(client.post, RENDER, json=chat) for _ in range(3)]
        server.wait_until(lambda: server.core.renders.num_waiting == 1)
        session = pool.submit(client.post, SESSIONS, json=ruled)
        server.wait_until(lambda: server.core.slots.num_taken == 1)
        for path, body in ((RENDER, chat), (SESSIONS, ruled)):
            assert code_of(client.post(path, json=body)) == (429, "too_many_sessions")
        freed.set()
        assert [each.result().json().get("tokens") for each in rendered] == [[1]] * 3
        session.result()
        server.wait_until(lambda: server.core.renders.num_taken == server.core.slots.num_taken == 0)


def test_a_grammar_is_read_in_a_thread_and_only_where_it_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of 60 kB takes some 50 ms: none of the event loop, and none for a client whose grammars are refused."""
    noted = list[str]()

    def spy(self: GrammarSpec) -> None:
        noted.append(threading.current_thread().name)
        raise RequestError("invalid_grammar", "read")

    monkeypatch.setattr(GrammarSpec, "__post_init__", spy)
    grammar = {"kind": "regex", "text": "a"}
    with serve_fake() as cloud, serve_local(cloud.url) as local:
        calls: tuple[tuple[str, Any], ...] = (
            (cloud.url + COMPLETIONS, {"prompt": "a", "guided_regex": "a"}),
            (cloud.url + SESSIONS, {"prompt": [1], "max_tokens": 1, "grammar": grammar}),
            (cloud.url + VERIFY, {"items": [{"prefix": [1], "grammar": grammar}]}),
            (local.url + COMPLETIONS, {"prompt": "a", "guided_regex": "a"}),
        )
        assert [httpx.post(url, json=body).json()["error"]["code"] for url, body in calls] == ["invalid_grammar"] * 4
        assert len(noted) == 4 and all(name.startswith("outrider-texts") for name in noted)
        monkeypatch.setattr(Strikes, "seconds_left", lambda *_: 5.0)
        assert [httpx.post(url, json=body).json()["error"]["code"] for url, body in calls] == ["too_many_grammars"] * 4
        free = {"prompt": "a", "max_tokens": 1, "response_format": {"type": "text"}}
        assert httpx.post(cloud.url + COMPLETIONS, json=free).status_code == 200 and len(noted) == 4
        cloud.wait_until(cloud.is_empty)
