"""Who may call a server: pages of other sites, names of hosts, owners by address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from tests.hostile_pages import FOREIGN, JSON, ask_as_page
from tests.raw_client import SESSION
from tests.serving import FakeServer, bearer, code_of, serve_fake

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.server.access import page_policy_of
from outrider.cloud.server.options import ServeOptions
from outrider.models.errors import ConfigError, RequestError
from outrider.models.http.limits import RateLimiter
from outrider.models.http.security import OWNER, Gate, GatePaths, GateSettings, KeyRing, PagePolicy

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    """A client that keeps no connection."""
    with httpx.Client(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        yield client


# Pages


BODIES: dict[str, dict[str, Any]] = {
    "/v1/sessions": SESSION,
    "/v1/verify": {"items": [{"prefix": [1]}]},
    "/v1/completions": {"prompt": [1], "max_tokens": 1},
    "/v1/sessions/x/drafts": {"base": 0, "paths": [[1]]},
}
PROBES = ("/health/live", "/health/ready", "/livez", "/readyz")


@pytest.mark.parametrize(("headers", "status", "code"), FOREIGN)
def test_a_page_of_another_site_cannot_call(
    server: FakeServer, web: httpx.Client, headers: dict[str, str], status: int, code: str
) -> None:
    """A page can post text to any server without its browser asking first; its name may resolve to this machine."""
    for path, body in BODIES.items():
        assert code_of(ask_as_page(web, server.url + path, headers, body)) == (status, code)
    if status == 403:
        assert code_of(web.delete(server.url + "/v1/sessions/x", headers=headers)) == (status, code)
        assert {web.get(server.url + probe, headers=headers).status_code for probe in PROBES} == {200}
    if "origin" not in headers:  # following a link is no write
        for path in ("/v1/models", "/openapi.json", "/metrics"):
            answer = web.get(server.url + path, headers=headers)
            assert answer.status_code == (403 if code == "host_not_allowed" else 200)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": "Application/JSON;charset=UTF-8"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "cross-site"},
        {"origin": "http://[::1]:3000"},
        {"sec-fetch-site": "same-origin"},
        *({"host": host} for host in ("localhost", "LOCALHOST:8000", "chat.localhost:1", "127.8.9.1", "[::1]:8000")),
    ],
)
def test_what_runs_on_this_machine_may_call(server: FakeServer, web: httpx.Client, headers: dict[str, str]) -> None:
    """It could call anyway. JSON is announced in any case and with its charset."""
    for (path, body), status in zip(BODIES.items(), (200, 200, 200, 404), strict=True):
        assert ask_as_page(web, server.url + path, JSON | headers, body).status_code == status
    for path in ("/v1/models", "/openapi.json", *PROBES):
        assert web.get(server.url + path, headers=headers).status_code == 200


OWN = PagePolicy(is_keyless=True, allowed_origins=["https://chat.example/"], allowed_hosts=["own.example"])


@pytest.mark.parametrize(
    ("keys", "pages", "answers"),
    [
        ([KEY], PagePolicy(is_keyless=False), [("any.example", None, 200)]),
        (
            [KEY],
            PagePolicy(is_keyless=False, allowed_hosts=["Api.example"]),
            [("api.example:443", None, 200), ("any.example", None, 403)],
        ),
        ([], PagePolicy(is_keyless=True, allowed_hosts=["api.example", "::2"]), [("[::2]:9", None, 200)]),
        ([], PagePolicy(is_keyless=True, allowed_hosts=["*"]), [("any.example", None, 200)]),
        (
            [],
            OWN,
            [
                ("localhost", "https://chat.example", 200),
                ("localhost", "https://chat.example:8443", 403),
                ("own.example:8000", "https://own.example:8000", 200),
                ("own.example:8000", "https://own.example", 403),
            ],
        ),
    ],
    ids=["keys", "keys and hosts", "hosts", "any host", "origins"],
)
def test_hosts_and_origins_can_be_allowed(
    web: httpx.Client, keys: list[str], pages: PagePolicy, answers: list[tuple[str, str | None, int]]
) -> None:
    """With keys any host may be called unless a list is given; what the list names is taken beside loopback."""
    with serve_fake(ServerSettings(keys=KeyRing(keys), pages=pages)) as server:
        for host, origin, status in answers:
            headers = {"host": host} | bearer(KEY) | ({"origin": origin} if origin else {})
            assert web.get(server.url + "/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    "wrong", [{"allowed_origins": ["chat.example"]}, {"allowed_hosts": ["http://x"]}, {"allowed_hosts": ["x:8"]}]
)
def test_what_is_no_host_and_no_origin_is_refused(wrong: dict[str, list[str]]) -> None:
    """Where the server starts."""
    with pytest.raises(ConfigError, match="expected"):
        PagePolicy(is_keyless=True, **wrong)


@pytest.mark.parametrize(
    ("options", "is_keyless", "allowed", "refused"),
    [
        ({}, True, "localhost", "server.example"),
        ({"host": "server.example"}, True, "server.example:8000", "other.example"),
        ({"host": "server.example"}, True, "192.0.2.1:8000", "192.0.2.2"),
        ({"host": "server.example", "allowed_host": ["api.example"]}, True, "server.example", "other.example"),
        ({"host": "0.0.0.0", "allowed_host": ["api.example"]}, True, "api.example", "other.example"),
        ({"host": "::"}, True, "any.example", None),
        ({"host": "server.example"}, False, "any.example", None),
        ({"host": "server.example", "allowed_host": ["api.example"]}, False, "api.example", "server.example"),
    ],
)
def test_the_options_decide_which_hosts_may_call(
    options: dict[str, Any], is_keyless: bool, allowed: str, refused: str | None
) -> None:
    """A wildcard address without keys takes any host: that is what --insecure-no-keys says. A name of --host may be
    called, and the address that it stands for.
    """
    address = options.get("host", "127.0.0.1").replace("server.example", "192.0.2.1")
    pages = page_policy_of(ServeOptions(bundle="x", **options), address, is_keyless=is_keyless)
    pages.require_host(allowed.encode())
    if refused is not None:
        with pytest.raises(RequestError, match=r"--allowed-host"):
            pages.require_host(refused.encode())


# Owners


def test_without_keys_the_owner_is_the_address() -> None:
    """A session is its address' own; with keys it is the key's, whatever the address and what headers claim."""
    headers = [(b"host", b"localhost"), (b"x-forwarded-for", b"203.0.113.7"), (b"forwarded", b"for=203.0.113.7")]
    headers += [(b"authorization", f"Bearer {KEY}".encode()), (b"x-real-ip", b"203.0.113.7")]

    def owner(keys: KeyRing, client: tuple[str, int] | None) -> bytes:
        app = AsyncMock()
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers, "client": client}
        asyncio.run(Gate(app, GateSettings(keys), GatePaths())(scope, None, None))  # type: ignore[arg-type]
        return bytes(app.call_args.args[0][OWNER])

    addresses = [("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 1), None]
    first, again, other, unknown = (owner(KeyRing(), client) for client in addresses)
    assert first == again and len({first, other, unknown}) == 3
    assert len({owner(KeyRing([KEY]), client) for client in addresses}) == 1


def test_an_owners_rate_holds_and_tables_of_owners_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds' worth in one burst, then the rate. A bucket that is full again is forgotten; and there are never
    more than so many. So are those of all limits.
    """
    now = 0.0
    limiter = RateLimiter(2.0, clock=lambda: now)
    for number in range(1000):
        now += 0.01
        limiter.admit(b"%d" % number)
    assert len(limiter) <= 201
    for num_admitted, pause_s in ((3, 0.5), (1, 0.0)):  # of the last one, whose bucket is not full and so is kept
        for _ in range(num_admitted):
            limiter.admit(b"999")
        with pytest.raises(RequestError, match="2 requests per second"):
            limiter.admit(b"999")
        now += pause_s
    monkeypatch.setattr(limiter, "_most", 10)
    for number in range(100):
        limiter.admit(b"x%d" % number)
    assert len(limiter) <= 10
