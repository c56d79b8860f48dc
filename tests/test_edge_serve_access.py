"""Tests who may call the local endpoint, what it refuses at its start and later, and the command that serves it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from tests.commands import KEY, OTHER_KEY, Outrider
from tests.hostile_pages import FOREIGN, JSON, ask_as_page
from tests.local_endpoint import (
    MESSAGES,
    PROMPT,
    LocalEndpoint,
    body,
    expected,
    leaving_ids_to,
    local_core,
    serve_local,
    serve_process,
)
from tests.raw_client import post
from tests.serving import FakeServer, StepGate, bearer, code_of, serve_fake
from tests.waiting import run

from outrider.cloud.api.state import ServerSettings
from outrider.edge.serve.neighbours import OwnUser
from outrider.edge.serve.server import LocalServer
from outrider.edge.serve.state import LocalSettings
from outrider.models.errors import RequestError, TokenizerMismatch
from outrider.models.http.security import KeyRing, PagePolicy
from outrider.models.ingress.sockets import open_socket

POSTS: dict[str, dict[str, Any]] = {
    "/v1/completions": body(),
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/outrider/generate": {"prompt": "a", "max_tokens": 1, "seed": 1},
    "/v1/outrider/verify": {"id": "cmpl-none"},
}
STATUSES = dict.fromkeys(POSTS, 200) | {"/v1/outrider/verify": 404}
"""Of whoever may call."""


@pytest.mark.parametrize(("headers", "status", "code"), FOREIGN)
def test_a_page_of_another_site_cannot_call(
    local: LocalEndpoint, headers: dict[str, str], status: int, code: str
) -> None:
    """No route, as at the verifier; nor may it read by a name that resolves to this machine."""
    with httpx.Client() as web:
        for path, whole in POSTS.items():
            assert code_of(ask_as_page(web, local.url + path, headers, whole)) == (status, code)
        for path in ("/v1/models", "/v1/outrider/info", "/metrics", "/") if code == "host_not_allowed" else ():
            assert web.get(local.url + path, headers=headers).status_code == 403


def test_its_own_page_may_call_every_route(local: LocalEndpoint) -> None:
    """As a browser sends its requests."""
    headers = JSON | {"origin": local.url, "sec-fetch-site": "same-origin"}
    for path, whole in POSTS.items():
        answer = httpx.post(local.url + path, json=whole, headers=headers, timeout=30.0)
        assert answer.status_code == STATUSES[path], answer.text


def test_a_key_opens_no_route_to_a_page_of_another_site(cloud: FakeServer) -> None:
    """Nor is there a route without the key."""
    with serve_local(cloud.url, LocalSettings(KeyRing([KEY]))) as local:
        foreign = bearer(KEY) | {"origin": "https://evil.example"}
        for path, whole in POSTS.items():
            assert local.refusal(403, whole, path, headers=foreign) == "origin_not_allowed"
            assert local.refusal(401, whole, path) == "unauthorized"


def test_cors_is_for_configured_origins_only(cloud: FakeServer) -> None:
    """A page of an allowed origin may ask and read answers, errors too."""
    origin = "https://chat.example.com"
    given = f"{origin.replace('chat', 'Chat')}:443/"  # as a browser would not write it
    pages = PagePolicy(is_keyless=True, allowed_origins=[given])
    # Also what OpenAI's client adds in a page.
    named = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": named}
    foreign = ("https://other.example.com", "null", "http://chat.example.com")
    with serve_local(cloud.url, LocalSettings(pages=pages, allowed_origins=(given,))) as local:
        url = f"{local.url}/v1/completions"
        for each, codes in (
            (origin, (200, 400)),
            *((other, (400, 403)) for other in (*foreign, f"{origin}.evil.example", f"{origin}:4443")),
        ):
            preflight = httpx.options(url, headers={"Origin": each, **asked})
            answer = httpx.post(url, json={}, headers={"Origin": each})
            assert (preflight.status_code, answer.status_code) == codes
            allowed = {found.headers.get("access-control-allow-origin") for found in (preflight, answer)}
            assert allowed == {origin if each == origin else None}


def test_keys_and_bounds() -> None:
    """A key where one is configured; the device's own goes to the verifier only. Texts and bodies are bounded."""
    gate, text, long = StepGate(), "/v1/completions", body(3000, stream=True)
    settings = LocalSettings(KeyRing([KEY, OTHER_KEY]), max_body_bytes=2000, max_requests=2, max_own=1)
    with (
        serve_fake(ServerSettings(KeyRing([KEY * 2])), gate=gate) as guarded,
        serve_local(guarded.url, settings, api_key=KEY * 2) as local,
        httpx.Client(base_url=local.url, headers=bearer(KEY), timeout=30.0) as client,
    ):
        for path, key, status in (
            ("/v1/models", {}, 401),
            ("/v1/models", bearer(KEY * 2), 401),
            ("/v1/models/a/b", {}, 401),
            ("/health/ready", {}, 200),
        ):
            assert httpx.get(local.url + path, headers=key).status_code == status
        counted = local.core.metrics.requests
        assert counted["/v1/models", "GET", 401] == 2 and counted["/v1/models/{model:path}", "GET", 401] == 1
        off = client.get("/metrics")
        assert code_of(off) == (404, "not_found") and "start it with --metrics" in off.json()["error"]["message"]
        assert client.post(text, json=body(stop="x" * 3000)).status_code == 413
        assert code_of(client.post(text, json=body(prompt=["a", "b"])))[1] == "invalid_parameter"
        with client.stream("POST", text, json=long):
            refused = client.post(text, json=body())
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            with client.stream("POST", text, json=long, headers=bearer(OTHER_KEY)):
                local.core.places.max_each = 5
                assert code_of(client.post(text, json=body())) == (503, "overloaded")
        gate.open()
        local.wait_until(local.is_at_rest)


def test_clients_with_keys_share_nothing_that_the_verifier_keeps(cloud: FakeServer) -> None:
    """It knows one client, this device: whose prompt begins as another's would learn it from `cached_tokens`."""
    with serve_local(cloud.url, LocalSettings(KeyRing([KEY, KEY + "-2"]))) as local:
        cached = [
            httpx.post(f"{local.url}/v1/completions", json=body(1, prompt="secret " * 20), headers=bearer(key)).json()
            for key in (KEY, KEY + "-2", KEY)
        ]
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for each in cached] == [False, False, True]


def owner_layer(*tables: Path) -> tuple[Callable[..., None], AsyncMock]:
    """Calls an app behind the check of the connection's owner, and the app."""
    app = AsyncMock()

    def call(client: tuple[str, int], server: tuple[str, int], path: str = "/v1/models") -> None:
        scope = {"type": "http", "method": "GET", "path": path, "client": client, "server": server}
        run(OwnUser(app, ["/health/live"], tables)(scope, None, None))  # type: ignore[arg-type]

    return call, app


def test_another_user_of_the_machine_cannot_call_without_a_key(tmp_path: Path) -> None:
    """The system's table says whose the connection is; one that is closed, or not there, is nobody's."""
    table = tmp_path / "tcp"
    through, app = owner_layer(table, tmp_path / "none")

    def call(host: str, rows: Sequence[str], path: str = "/v1/models", server: str = "127.0.0.1") -> None:
        table.write_text("\n".join(["  sl  local_address ...", *rows, ""]))
        through((host, 4660), (server, 8077), path)

    def row(user: int, local: str = "0100007F:1234", state: str = "01") -> str:
        return f"   0: {local} 0100007F:1F8D {state} 00000000:00000000 00:00000000 00000000 {user} 0 77"

    own = os.getuid()
    for host, rows in (
        ("127.0.0.1", [row(4321, "0100007F:9999"), row(own)]),
        ("127.0.0.1", [row(0)]),
        ("::ffff:127.0.0.1", [row(own, "0000000000000000FFFF00000100007F:1234")]),
        ("::1", [row(own, "00000000000000000000000001000000:1234")]),
        ("192.0.2.8", [row(own, "080200C0:1234")]),
    ):
        call(host, rows)
    call("192.0.2.7", [], server="192.0.2.8")  # not over loopback: the gate's business
    call("127.0.0.1", [], path="/health/live")
    assert app.call_count == 7
    others = [row(4321, "080200C0:1234"), row(4321)]
    for host, rows, server in (
        ("127.0.0.1", [row(4321)], "127.0.0.1"),
        ("127.0.0.1", [row(4321, state="06")], "127.0.0.1"),
        ("127.0.0.1", [row(0, state="06")] if own else [], "127.0.0.1"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("192.0.2.8", others, "127.0.0.1"),  # a program may call from any address of its machine
        ("127.0.0.1", others, "192.0.2.8"),
    ):
        with pytest.raises(RequestError, match="another user") as refused:
            call(host, rows, server=server)
        assert (refused.value.code, refused.value.status) == ("other_user", 403)
    assert app.call_count == 7


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_system_names_the_owner_of_one_connection(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading the tables, which takes milliseconds. Who listens at the caller's address is not the caller."""
    empty = tmp_path / "tcp"
    empty.write_text("  sl  local_address ...\n")
    call, app = owner_layer(empty)
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"no sockets on {host}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as connection:
        server, client = listener.getsockname()[:2], connection.getsockname()[:2]
        call(client, server)
        assert app.call_count == 1
        for other in (server, (host, 1), client):
            if other == client:
                monkeypatch.setattr("outrider.edge.serve.neighbours.owner_of", lambda *_: 4321)
            with pytest.raises(RequestError, match="another user"):
                call(other, server)
    assert app.call_count == 1


AS_NOBODY = """
import encodings.idna, json, os, socket, sys  # the other user may not read the library
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for request in json.loads(sys.argv[2]):
    for count, ends, waits in ((1, False, True), (1, False, False), (1, True, True), (4, False, True)):
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30.0) as connection:
            connection.sendall(request.encode() * count)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            print(waits and connection.recv(65536)[9:12].decode() or "left")
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can call as another user")
@pytest.mark.parametrize(
    ("settings", "key", "refused"),
    [
        (LocalSettings(), None, 403),
        (LocalSettings(any_user=True), None, None),
        (LocalSettings(KeyRing([KEY])), KEY, None),
        (LocalSettings(KeyRing([KEY])), OTHER_KEY, 401),
    ],
    ids=["without a key", "with --any-user", "with the key", "with a wrong key"],
)
def test_a_real_other_user(cloud: FakeServer, settings: LocalSettings, key: str | None, refused: int | None) -> None:
    """At every route: plainly, leaving without an answer, with its writing side closed, and pipelined. It is refused,
    and the verifier has no text of it; with --any-user or the key it is answered, and root always is.
    """
    with serve_local(cloud.url, settings) as local:
        headers = [f"Authorization: Bearer {key}"] if key else []
        requests = [post(path, json.dumps(whole).encode(), *headers).decode() for path, whole in POSTS.items()]
        command = [sys.executable, "-c", AS_NOBODY, str(httpx.URL(local.url).port), json.dumps(requests)]
        before = cloud.core.engine.stats().totals
        done = subprocess.run(command, capture_output=True, text=True)
        found = done.stdout.split()
        assert len(found) == 4 * len(POSTS), done.stderr
        local.wait_until(local.is_at_rest)
        if refused:
            assert set(found[::4]) == {str(refused)} and set(found) == {str(refused), "left"}
            assert cloud.core.engine.stats().totals == before
        else:
            assert [int(plain) for plain in found[::4]] == list(STATUSES.values())
        assert local.post(body(max_tokens=1), headers=bearer(KEY) if settings.keys else {})["choices"]
        local.wait_until(local.is_at_rest)


def test_a_verifier_that_fails_is_reported(cloud: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """No verifier: 503, so that clients try again. One that refuses the device's key: 502. No prompt is logged."""
    hidden, long = LocalSettings(shows_details=False), body(prompt="a b " * 9000)
    with serve_local("http://127.0.0.1:9") as alone:
        answer = httpx.post(f"{alone.url}/v1/completions", json=body())
        assert code_of(answer) == (503, "no_verifier") and answer.headers["retry-after"] == "1"
    with serve_fake(ServerSettings(KeyRing([KEY]))) as guarded, serve_local(guarded.url, hidden) as local:
        answer = httpx.post(f"{local.url}/v1/completions", json=body())
        assert code_of(answer) == (502, "verifier_refused")
        assert guarded.url not in answer.text and "verifier_refused" in caplog.text
    with serve_local(cloud.url, hidden) as local:
        with leaving_ids_to(cloud, local):
            answer = httpx.post(f"{local.url}/v1/completions", json=body(logit_bias={"99999999": 1}))
        assert code_of(answer) == (400, "token_out_of_range")
        assert "from http" not in answer.text and f"(from {cloud.url})" in caplog.text
        assert (400, local.refusal(400, long)) == code_of(httpx.post(f"{cloud.url}/v1/completions", json=long))
    assert PROMPT not in caplog.text


def test_a_draft_for_another_target_is_refused_at_the_start(cloud: FakeServer) -> None:
    """Its token ids would mean other text."""
    core = local_core(cloud.url, fingerprint="0" * 64)
    with open_socket("127.0.0.1", 0) as sock, pytest.raises(TokenizerMismatch, match="made for this target"):
        run(LocalServer(core, drain_s=0.0).startup([sock]))


def test_the_command_serves_the_text_of_outrider_run(cloud: FakeServer, fake_bundle: Path, outrider: Outrider) -> None:
    """As a process: it says where it listens, and SIGTERM ends it."""
    given = ["--cloud", cloud.url, "--draft", fake_bundle, "--runtime", "ngram"]
    with serve_process(*given) as process:
        answer = httpx.post(f"{process.url}/v1/completions", json=body(), timeout=30.0)
    assert "draft: n-gram lookup, no model\n" in process.out and process.code in (0, -signal.SIGTERM)
    assert "Traceback" not in process.log and PROMPT not in process.log
    sampled = ["--temperature", "0.8", "--param", "top_p=0.95", "--seed", "5", "--max-tokens", "48", "--ignore-eos"]
    shown = outrider("run", PROMPT, *given, *sampled).out.removesuffix("\n")
    assert shown == answer.json()["choices"][0]["text"] == expected()


def test_threads_at_work_give_the_event_loop_its_turn_soon(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's loop shares one process with the indexing of documents."""
    intervals: list[float] = []
    monkeypatch.setattr("sys.setswitchinterval", intervals.append)
    monkeypatch.setattr("outrider.edge.cli.serve.configure_logging", lambda format_: None)
    shown = outrider("serve", "--port", "0", "--draft", "nowhere", code=2)
    assert intervals == [0.001] and "nowhere" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "nowhere"], "nowhere"),
        (["--host", "0.0.0.0"], "refusing to listen on 0.0.0.0 without API keys"),
        (["--width", "9"], "width is '9'"),
        (["--depth", "deep"], "expected auto or a number"),
        (["--cloud", "ftp://x"], "the cloud's address"),
        (["--tls-cert", "x.pem"], "HTTPS needs both"),
        (["--allowed-origin", "chat"], "an allowed origin is 'chat'"),
    ],
)
def test_a_mistake_shows_before_the_draft_is_loaded(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    """One clear line, and exit code 2."""
    monkeypatch.setattr(
        "outrider.edge.cli.draft_source.default_draft", lambda choice: pytest.fail("a draft was exported")
    )
    monkeypatch.setattr("outrider.edge.cli.serve.configure_logging", lambda format_: None)
    shown = outrider("serve", "--port", "0", *options, code=2)
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_models_and_paths(local: LocalEndpoint) -> None:
    """The target is the one model; other names and other paths are 404, other methods 405."""

    (card,) = httpx.get(f"{local.url}/v1/models").json()["data"]
    assert card["id"] == "fake" and card == httpx.get(f"{local.url}/v1/models/fake").json()
    assert local.refusal(404, body(model="other")) == "model_not_found"
    for path, status, code in (
        ("/v1/models/other", 404, "model_not_found"),
        ("/v1/models/", 404, "model_not_found"),
        ("/v1/chat/completions/", 404, "not_found"),  # no redirect, which would be to what Host says
        ("/health/live/", 404, "not_found"),
        ("/v1/nothing", 404, "not_found"),
        ("/v1/completions", 405, "method_not_allowed"),
    ):
        assert code_of(httpx.get(local.url + path)) == (status, code)


def test_probes(local: LocalEndpoint) -> None:
    """Readiness says what drafts, and whether a verifier answers."""
    assert httpx.get(local.url + "/health/live").json() == {"status": "live"}
    url = f"{local.url}/health/ready"
    ready = httpx.get(url)
    assert ready.status_code == httpx.head(url).status_code == 200
    # A page may come under a name of its own that resolves to this machine; probes do, too.
    assert httpx.get(url, headers={"Host": "evil.example"}).json() == {"status": "ready"}
    assert ready.json()["model"] == "fake" and ready.json()["draft_sequences"] == 4
    (cloud,) = ready.json()["clouds"]
    assert (cloud["state"], cloud["model"]) == ("up", "fake") and cloud["round_trip_ms"] >= 0.0
    with serve_local("http://127.0.0.1:9") as alone:
        answer = httpx.get(f"{alone.url}/health/ready")
        assert answer.status_code == 503 and answer.json()["status"] == "no_verifier"
        assert [each["state"] for each in answer.json()["clouds"]] == ["down"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ],
)
@pytest.mark.parametrize(
    ("path", "whole"), [("/v1/completions", body()), ("/v1/chat/completions", {"messages": MESSAGES})]
)
def test_what_the_verifier_does_not_offer_is_refused_by_name(
    local: LocalEndpoint, fields: dict[str, Any], param: str, path: str, whole: dict[str, Any]
) -> None:
    """With OpenAI's shape of errors."""
    named = {"code": "unsupported_parameter", "param": param, "type": "invalid_request_error"}
    error = local.post(whole | fields, path, 400)["error"]
    assert error | named == error
