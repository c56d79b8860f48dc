"""Tests what many cheap requests of one client cost the others: they wait for each other, and pages are made once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from starlette.responses import JSONResponse
from tests.local_endpoint import chunks_of
from tests.serving import serve_fake

from outrider.cloud.api import openapi
from outrider.cloud.api.draft_posts import DraftsEndpoint
from outrider.cloud.api.metrics import Metrics
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.seam import EngineStats, Totals
from outrider.models.errors import RequestError
from outrider.models.http import answers, openai, security, shapes
from outrider.models.http.errors import Throttled
from outrider.models.http.limits import Pacer
from outrider.models.http.security import Gate, GatePaths, GateSettings, KeyRing
from outrider.models.http.shapes import Delta, PackedLogprobs
from outrider.models.process.tally import RequestTally

KEY = "a-key-of-this-test"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long requests are to wait; they do not."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(round(seconds, 6))

    monkeypatch.setattr(security.asyncio, "sleep", sleep)  # type: ignore[attr-defined]
    return found


def test_a_clients_requests_are_spaced_and_probes_are_never_refused(waits: list[float]) -> None:
    """A burst at once, then so many a second: of a key, of an address for all that come without an accepted one, who
    get fewer, and of an address where no key is needed.
    """

    async def app(*_: Any) -> None:
        pass

    def asked(num: int, path: str = "/v1/models", key: str = "", address: str = "10.0.0.1") -> list[float]:
        headers = [(b"host", b"localhost"), *([(b"authorization", f"Bearer {key}".encode())] if key else [])]
        scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "client": (address, 1)}
        waits.clear()
        for _ in range(num):
            try:
                asyncio.run(paced(scope, None, None))  # type: ignore[arg-type]
            except RequestError as error:
                if error.code != "unauthorized":
                    raise
        return list(waits)

    probes = GatePaths(probes=frozenset({"/health"}))
    paced = Gate(app, GateSettings(KeyRing([KEY])), probes)
    paced._requests = Pacer(100.0, 3, clock=lambda: 0.0)
    paced._strangers = Pacer(10.0, 3, clock=lambda: 0.0)
    paced._probes = Pacer(10.0, 1, clock=lambda: 0.0)
    assert asked(5) == [0.1, 0.2]
    assert asked(2, key="a-key-that-nobody-has") == [0.3, 0.4]
    assert asked(3, key=KEY) == asked(3, address="10.0.0.2") == []
    asked(15)
    with pytest.raises(Throttled, match="retry later"):
        asked(2)
    assert asked(1, key=KEY) == [0.01]
    assert asked(6, "/health") == [0.1, 0.2, 0.3, 0.4, 0.5]
    paced = Gate(app, GateSettings(), probes)
    paced._requests = Pacer(10.0, 1, clock=lambda: 0.0)
    assert asked(2) == [0.1]


def test_refused_drafts_wait_and_accepted_ones_do_not(waits: list[float]) -> None:
    """Their route is not paced: a device posts many times a second, within budgets of its own."""
    refusal: RequestError | None = RequestError("unauthorized", "no key", status=401)

    async def deliver(*_: Any) -> Any:
        if refusal is not None:
            raise refusal
        return {"type": "http.response.start", "status": 204, "headers": []}, b""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status", statuses[-1:]))

    def asked(num: int, address: str = "10.0.0.1") -> list[float]:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9")]
        scope = {"type": "http", "method": "POST", "path": "/v1/sessions/a/drafts", "headers": headers}
        waits.clear()
        statuses.clear()
        for _ in range(num):
            asyncio.run(paced({**scope, "client": (address, 1)}, receive, send))
        assert statuses[0] == (204 if refusal is None else refusal.status)
        return [each for each in waits if each]

    statuses: list[Any] = []
    paced = DraftsEndpoint(
        ServerSettings(),
        GatePaths(),
        RequestTally(),
        find=lambda *_: None,
        deliver=deliver,
        deliver_long=deliver,
        num_dropped=Counter(),
    )
    paced._refused = Pacer(10.0, 3, clock=lambda: 0.0)
    assert asked(5) == [0.1, 0.2] and asked(3, "10.0.0.2") == []
    assert max(asked(40)) == 2.0
    refusal = RequestError("draft_ahead", "base is past what is committed")
    assert asked(40) == []
    refusal = None
    assert asked(40) == []


def test_a_client_is_forgotten_once_it_could_send_a_burst_again() -> None:
    """And there are never more clients than so many."""
    now = 0.0
    pacer = Pacer(10.0, 2, clock=lambda: now)
    for number in range(1000):
        pacer.wait_s(b"%d" % number, 1.0)
        now += 0.01
    assert len(pacer) <= 11


def test_the_openapi_document_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask for it."""
    rendered: list[object] = []

    def counted(content: Any) -> JSONResponse:
        rendered.append(content)
        return JSONResponse(content)

    monkeypatch.setattr(openapi, "JSONResponse", counted)
    with serve_fake() as server, httpx.Client(base_url=server.url) as client:
        first, *others = [client.get("/openapi.json") for _ in range(3)]
        assert first.json()["paths"] and all(each.content == first.content for each in others)
        assert first.headers["content-type"] == "application/json" and len(rendered) == 1


@pytest.mark.parametrize(("max_age_s", "num"), [(1e9, 20), (0.0, 62)])
async def test_metrics_are_made_once_a_while_for_all_who_ask(max_age_s: float, num: int) -> None:
    """So many at once, whatever versions of the two formats they ask for."""
    asked = 0

    def stats() -> EngineStats:
        nonlocal asked
        asked += 1
        return EngineStats(Totals(), 0, 0, 0, 0, 1, 1, 0.0, None, None)

    metrics = Metrics(stats, lambda: 0, max_age_s=max_age_s)
    wanted = (
        "text/plain; version=0.0.4",
        *(f"application/openmetrics-text; version=1.0.{n}" for n in range(29)),
        "*/*",
    )
    found = [await metrics.exposition(accept) for accept in wanted * 2]
    assert asked == num and found[0][1] != found[1][1] and b"outrider_sessions_open" in found[-2][0]


def test_a_whole_answer_with_logprobs_is_written_in_turns() -> None:
    """Bit for bit what the stream's chunks add up to; no piece of it is large, and most of it is held compressed."""
    body = {
        "model": "fake",
        "prompt": "def f",
        "max_tokens": 200,
        "n": 8,
        "logprobs": 20,
        "ignore_eos": True,
        "seed": 3,
        "temperature": 1.0,
    }
    with serve_fake() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post("/v1/completions", json=body)
        assert whole.headers.get("transfer-encoding") == "chunked"
        streamed: dict[int, dict[str, list[Any]]] = {}
        for chunk in chunks_of(client.post("/v1/completions", json=body | {"stream": True})):
            for choice in chunk["choices"]:
                found = streamed.setdefault(choice["index"], {})
                for name, values in choice["logprobs"].items():
                    found.setdefault(name, []).extend(values)
    choices = whole.json()["choices"]
    assert [choice["logprobs"] for choice in choices] == [streamed[index] for index in range(8)]
    assert all(len(choice["logprobs"]["tokens"]) == 200 for choice in choices)


async def test_a_stream_of_many_texts_is_written_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wake-up brings goes out in pieces where it takes long to write; others have their turn between them."""

    class Texts:
        async def deltas(self) -> AsyncIterator[list[Delta]]:
            yield [Delta(index, "zip") for index in range(3)]

    seen = list[str]()

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    monkeypatch.setattr(answers, "_TURN_S", -1.0)
    beside = asyncio.create_task(other())
    body = openai.CompletionRequest.model_validate({"prompt": "a", "stream": True})
    async for piece in answers._stream(cast(Any, Texts()), shapes.CompletionShape("fake", 1, None), body):
        seen.append("done" if piece == answers.DONE else "text")
    beside.cancel()
    assert seen == ["text", "other", "text", "other", "text", "done"]


def test_an_owners_answers_hold_so_many_logprobs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too large alone fails for good, one beside others for now; what was counted is given back."""
    monkeypatch.setattr(answers, "MAX_LOGPROB_BYTES", 10_000)
    body = {"model": "fake", "prompt": "def f", "max_tokens": 40, "logprobs": 5, "ignore_eos": True}
    with serve_fake() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        held = server.core.held_answers

        def asked(num_tokens: int) -> tuple[int, str | None]:
            answer = client.post("/v1/completions", json=body | {"max_tokens": num_tokens})
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert asked(40) == (200, None)
        server.wait_until(lambda: held.total == 0)  # the client has the last byte before the server goes on
        with monkeypatch.context() as patched:
            patched.setattr(shapes.CompletionShape, "whole", lambda *_: 1 / 0)
            assert asked(40) == (500, "internal_error") and held.total == 0
        assert asked(400) == (400, "answer_too_large") and held.total == 0
        owner = b"127.0.0.1"
        held.add(owner, 9_000)
        assert asked(40) == (503, "too_many_bytes") and held.total == 9_000
        held.add(owner, -9_000)
        assert asked(40) == (200, None)
        server.wait_until(lambda: held.total == 0)


def test_packed_logprobs_are_a_fraction_of_their_json() -> None:
    """Of 300 tokens with the 20 likeliest of each."""
    tops = [{f"token {rank}": -rank - index / 7 for rank in range(20)} for index in range(300)]
    found: dict[str, Any] = {"tokens": ["x"] * 300, "top_logprobs": tops, "refusal": None}
    packed = PackedLogprobs({name: [] if values else None for name, values in found.items()})
    num_held = 0
    for index in range(300):
        part = {name: values[index : index + 1] if values else None for name, values in found.items()}
        num_held += packed.add(part)
    assert 20_000 < num_held < len(json.dumps(found)) / 2
    pieces = list(packed.pieces())
    assert json.loads(b"".join(pieces)) == found and max(map(len, pieces)) < 1 << 17
    assert json.loads(b"".join(PackedLogprobs({"content": [], "refusal": None}).pieces())) == {
        "content": [],
        "refusal": None,
    }
