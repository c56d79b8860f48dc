"""Tests the attack that is generated from the API's document: that it reaches every route and field, what it gets."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import httpx
import pytest
from bench.attacks.bounds import Case, Requests
from bench.attacks.described import described, local_document, verifier_document
from pydantic import BaseModel, Field
from tests.drafts import make_draft
from tests.fake_runtime import FakeBatchRuntime
from tests.local_endpoint import serve_local
from tests.serving import FakeServer, serve_fake
from tools.api_page import KEYLESS, application

from outrider.cloud.api.openapi import own_codes, shared_codes
from outrider.cloud.api.state import ServerSettings
from outrider.edge.serve.state import LocalSettings
from outrider.models.client.exchange import Exchange
from outrider.models.http.security import KeyRing
from outrider.models.wire.protocol import ErrorAnswer

DRAFT = "cpu-int8"
ROOM = 20_000
CONTEXT = 200
VOCAB_SIZE = 300
MOST_IN_CIRCLES = 500


def requests_of(document: dict[str, Any], **names: str) -> Requests:
    return Requests(document, room=ROOM, max_tokens=2, context=CONTEXT, vocab_size=VOCAB_SIZE, names=names)


@pytest.fixture(scope="module")
def verifier() -> Requests:
    return requests_of(verifier_document(), model="fake", name=DRAFT, path="tokenizer.json")


@pytest.fixture(scope="module")
def local() -> Requests:
    return requests_of(local_document(), model="fake")


class Inner(BaseModel):
    words: list[str] = Field(default_factory=list, max_length=7)


class New(BaseModel):
    name: str = Field(max_length=17)
    inner: Inner | None = None
    level: int = Field(default=0, ge=-3, le=5)


def test_a_new_route_and_its_fields_are_in_it_by_themselves() -> None:
    """Also a route that the document leaves out."""
    app = application()

    @app.post("/v1/new")
    async def new(body: New) -> None: ...

    @app.get("/v1/hidden", include_in_schema=False)
    async def hidden() -> None: ...

    requests = requests_of(described(app))
    assert {"POST /v1/new", "GET /v1/hidden"} <= set(requests.routes)
    fields = requests.fields("POST /v1/new")
    assert set(fields) == {("name",), ("inner",), ("inner", "words"), ("inner", "words", "[]"), ("level",)}
    assert fields["level",] == [5, -3] and {len(text) for text in fields["name",]} == {17}
    bodies = [json.loads(requests.request(case)[3]) for case in requests.singles("POST /v1/new")]
    assert any(len((body.get("inner") or {}).get("words", ())) == 7 for body in bodies)
    assert all(New.model_validate(body) for body in bodies if len(json.dumps(body)) < 10_000)


@pytest.mark.parametrize("whose", ["verifier", "local"])
def test_every_field_of_every_route_is_reached(whose: str, request: pytest.FixtureRequest) -> None:
    """Alone, and each two of a route: a request's body has the values where the fields are."""
    requests: Requests = request.getfixturevalue(whose)
    assert len(requests.routes) > 20
    for route in requests.routes:
        fields, reached = set(requests.fields(route)), set()
        assert not route.startswith(("PUT", "PATCH")) and (fields or not route.startswith("POST"))
        for case in requests.singles(route):
            if case.media == "application/json":
                raw = requests.request(case)[3]
                assert len(raw) <= ROOM + 2048, case
                reached |= {
                    field for field, _ in case.values if field[0].startswith("{") or has(json.loads(raw), field)
                }
        assert reached == fields, route
    pairs = {frozenset(field for field, _ in case.values) for case in requests.pairs("POST /v1/completions")}
    assert frozenset({("n",), ("logprobs",)}) in pairs and frozenset({("prompt",), ("echo",)}) in pairs


def has(body: Any, field: tuple[str, ...]) -> bool:
    """Whether the body has a value there; in a list or mapping, its first."""
    if not field:
        return True
    if field[0] == "[]":
        return isinstance(body, list) and bool(body) and has(body[0], field[1:])
    if field[0] == "{}":
        return isinstance(body, dict) and bool(body) and has(next(iter(body.values())), field[1:])
    return isinstance(body, dict) and field[0] in body and has(body[field[0]], field[1:])


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    drafts = tmp_path_factory.mktemp("drafts")
    make_draft(drafts / DRAFT, rate=0.75)
    runtime = FakeBatchRuntime(vocab_size=VOCAB_SIZE, max_positions=CONTEXT + 56)
    with serve_fake(ServerSettings(max_body_bytes=ROOM + 2048), runtime=runtime, drafts=drafts) as server:
        yield server


def test_the_verifier_answers_as_documented(cloud: FakeServer, verifier: Requests) -> None:
    """Each answer has a documented status and code, and what it asks for bounds its size; nothing is held after it, not
    until the collector runs, either.
    """
    paths = verifier_document()["paths"]
    shared = shared_codes(needs_key=True)
    with httpx.Client(base_url=cloud.url, timeout=30.0) as client, nothing_large_in_circles():
        for case, answer in answers(client, verifier):
            method, _, path = case.route.partition(" ")
            documented = paths[path][method.lower()].get("responses")
            if answer.status_code < 400:
                assert documented is None or str(answer.status_code) in documented, case
            elif method != "HEAD":
                own = own_codes(method.lower(), path).get(answer.status_code, ())
                code = ErrorAnswer.model_validate_json(answer.content).error.code
                assert code in (*own, *shared.get(answer.status_code, ())), (case, answer.text)
                assert answer.status_code != 500, (case, answer.text)
    cloud.wait_until(lambda: holds_parked_prefixes_only(cloud))
    assert cloud.core.bodies.held.total == 0


def test_without_a_key_every_route_refuses_or_is_open(verifier: Requests) -> None:
    """At once, whatever the body: what is open needs no body."""
    largest = [max(verifier.singles(route), key=verifier.size) for route in verifier.routes]
    settings = ServerSettings(keys=KeyRing(["sixteen-characters"]), max_body_bytes=ROOM + 2048)
    with serve_fake(settings) as server, httpx.Client(base_url=server.url) as client:
        for case in largest:
            expected = 200 if case.route.partition(" ")[2] in KEYLESS else 401
            assert send(client, verifier, case, 0).status_code == expected, case
        assert server.is_empty()


def test_the_local_endpoint_answers_with_its_shape(cloud: FakeServer, local: Requests) -> None:
    """The same for `outrider serve`, whose errors have the same shape."""
    settings = LocalSettings(max_body_bytes=ROOM + 2048, shows_metrics=True)
    with (
        serve_local(cloud.url, settings) as endpoint,
        httpx.Client(base_url=endpoint.url, timeout=30.0) as client,
        nothing_large_in_circles(),
    ):
        for case, answer in answers(client, local):
            if answer.status_code >= 400 and not case.route.startswith("HEAD"):
                ErrorAnswer.model_validate_json(answer.content)
                assert answer.status_code < 500, (case, answer.text)
        endpoint.wait_until(endpoint.is_at_rest)


@contextmanager
def nothing_large_in_circles() -> Iterator[None]:
    """What a request had is freed with it. Objects in circles wait for the collector, with all that they hold: a
    traceback that is kept has the whole request.
    """
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        large = [each for one in gc.garbage for each in (one, *gc.get_referents(one)) if is_large(each)]
        assert not large, {str(each)[:200] for each in large}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def is_large(one: object) -> bool:
    """Whether it grows with what a request asks for. The test's own client leaves bodies as bytes."""
    if isinstance(one, Exchange | FrameType):
        return True  # an exchange has the body that was sent
    return isinstance(one, list | tuple | set | bytearray) and len(one) > MOST_IN_CIRCLES


def holds_parked_prefixes_only(server: FakeServer) -> bool:
    """Those of requests with `keep_prefix`, and of /v1/verify, which are given up when a sequence needs them."""
    stats, core = server.core.engine.stats(), server.core
    is_idle = stats.running == stats.queued == core.slots.num_taken == len(core.sessions) == 0
    return is_idle and stats.free_blocks + stats.parked_blocks == stats.num_blocks


def answers(client: httpx.Client, requests: Requests) -> Iterator[tuple[Case, httpx.Response]]:
    """Of every value of every field, and of a few of the pairs. Checks their sizes."""
    for route in requests.routes:
        # Of each field's values the largest, and every ninth of the others.
        singles = [case for n, case in enumerate(requests.singles(route)) if not n % 9 or not case.values[0][1]]
        for number, case in enumerate((*singles, *itertools.islice(requests.pairs(route), 0, None, 297))):
            answer = send(client, requests, case, number)
            body = requests.request(case, number)[3]
            assert len(answer.content) <= (1 << 17) + 4 * len(body) + 4096 * num_tokens(body), case
            yield case, answer


def send(client: httpx.Client, requests: Requests, case: Case, number: int) -> httpx.Response:
    method, path, media, body = requests.request(case, number)
    return client.request(method, path, content=body, headers={"content-type": media} if body else {})


def num_tokens(body: bytes) -> int:
    """As many as the texts of a request may have."""
    try:
        asked = json.loads(body)
    except ValueError:
        return 0
    longest = asked.get("max_completion_tokens") or asked.get("max_tokens") or CONTEXT
    texts = max(asked.get("n") or 1, asked.get("best_of") or 1) * len(asked.get("prompt") or "a")
    return int(min(longest, CONTEXT + 56) * min(texts, 128))
