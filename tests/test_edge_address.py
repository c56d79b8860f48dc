"""Tests addresses of clouds: one server has one, passwords in them are shown nowhere, proxies may be wrong."""

from __future__ import annotations
from tests.certificates import make_own, needs_openssl

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from tests.commands import KEY
from tests.serving import serve_fake

from outrider.edge.cli.draft_source import clouds_of
from outrider.edge.doctor.cloud import CloudReport
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.serve.routes import PATHS_ARE
from outrider.edge.setup.config_file import ConfigFile
from outrider.edge.setup.endpoints import Endpoint, Keys, read_endpoints
from outrider.edge.store.shelf import PulledFor
from outrider.models.client.address import verifier_url
from outrider.models.client.certificate import ClientCertificate
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointWrong
from outrider.models.errors import ConfigError, RequestError
from outrider.models.ingress.sockets import TlsFiles


def test_an_address_in_capitals_is_the_same_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets its own key and no general one, the system's trust and the device's certificate."""
    own = Endpoint(url="HTTPS://A.example", allow_http=True)
    assert own.url == "https://a.example"
    keys = Keys(KEY, endpoints=(own, Endpoint(url="https://b")))
    assert keys.for_url("https://A.Example:443/v1", ["HTTPS://A.EXAMPLE", "https://b"]) is None
    shown: list[ClientCertificate | None] = []
    certificate = ClientCertificate(Path("certificate"))

    def tls(certificate: ClientCertificate | None) -> ssl.SSLContext:
        shown.append(certificate)
        return ssl.create_default_context()

    monkeypatch.setattr("outrider.models.client.http_endpoint.system_tls", tls)
    VerifierClient("HTTPS://A.example", ClientOptions(certificate=certificate))
    assert shown == [certificate]


WRONG = (
    "https://me:s%40cret/x@a",
    "ftp://me:s%40cret@a",
    "https://me:s%40cret@a:b",
    "me:s%40cret@a b",
    "me:s%40cret@a?x",
)
TAKERS: tuple[Callable[[str], object], ...] = (
    verifier_url,
    VerifierClient,
    lambda url: Endpoint(url=url),
    lambda url: clouds_of([url], Keys()),
    lambda url: read_endpoints(ConfigFile(Path("config.toml"), document={"endpoint": f"https://{url}"})),
)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("take", TAKERS)
def test_a_password_is_not_shown_where_its_address_is_wrong(take: Callable[[str], object], wrong: str) -> None:
    """Whoever reads the address."""
    with pytest.raises((ConfigError, ValidationError)) as found:
        take(wrong)
    assert "cret" not in str(found.value) and "***@a" in str(found.value)


def test_a_password_in_an_address_is_sent_and_kept_apart_from_it() -> None:
    """So no message, log or record has it; beside a key it would replace that, so both together are refused."""
    with pytest.raises(
        ConfigError, match=r"the address https://\*\*\*@a has a user name and password, and there is a key"
    ):
        clouds_of(["https://me:s%40cret@a"], Keys(KEY, is_asked=True))
    ((url, options),) = clouds_of(["https://me:s%40cret@a/v1"], Keys())
    assert (url, options.login) == ("https://a", "me:s@cret") and "cret" not in repr(options)
    sent: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization"))
        return httpx.Response(401)

    async def ask(client: VerifierClient) -> None:
        async with client:
            with pytest.raises(
                RequestError, match="https://a does not accept the user name and password of its address"
            ):
                await client.ready()

    transport = httpx.MockTransport(answer)
    asyncio.run(ask(VerifierClient(url, options, transport)))
    asyncio.run(ask(VerifierClient("https://me:s%40cret@a", None, transport)))
    assert sent == ["Basic bWU6c0BjcmV0"] * 2
    record = PulledFor.model_validate({"model": "m", "server": "https://me:s@a", "name": "n", "at_s": 1})
    assert record.server == "https://a"  # of an older version


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("socks5://me:secret@127.0.0.1:9", 'names a SOCKS proxy .*; run: pip install "httpx\\[socks\\]"'),
        ("gopher://me:secret@127.0.0.1:9", "is no address; expected http://host:port"),
        ("http://me:secret@127.0.0.1:nine", "is no address; expected http://host:port"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch, proxy: str, words: str) -> None:
    """Of advice; a verifier on this machine is asked without it."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(ConfigError, match=words) as found:
        VerifierClient("http://cloud.example")
    assert "secret" not in str(found.value)
    report = CloudReport("http://cloud.example")
    (finding,) = [each for each in report.findings() if each.status == "fault"]
    assert finding.name == "proxy" and "secret" not in f"{finding}"
    VerifierClient("http://127.0.0.1:1")


def answered(status: int, body: object) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, json=body))


def broken_by(cause: OSError) -> httpx.MockTransport:
    """Fails as httpx does where a connection fails with `cause`."""

    def fail(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError(str(cause)) from cause

    return httpx.MockTransport(fail)


def tls_error(kind: type[ssl.SSLError], reason: str, words: str = "") -> ssl.SSLError:
    error = kind(1, words)
    error.reason = reason
    if isinstance(error, ssl.SSLCertVerificationError):
        error.verify_message = words
    return error


AGENT = {"error": {"code": "not_found", "message": f"there is no /v1/sessions; {PATHS_ARE}"}}


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (
            broken_by(tls_error(ssl.SSLCertVerificationError, "CERTIFICATE_VERIFY_FAILED", "self-signed certificate")),
            r"its certificate was refused: self-signed certificate; .* SSL_CERT_FILE$",
        ),
        (broken_by(tls_error(ssl.SSLError, "WRONG_VERSION_NUMBER")), r"speaks no TLS; use http://a if that is the ver"),
        (broken_by(socket.gaierror(socket.EAI_NONAME, "Name not known")), r"no host has this name .*correct the addr"),
        (answered(404, AGENT), r"this is `outrider serve`, not a verifier: .*; give the address of `outrider-"),
        (answered(404, "a page"), r"there is no verifier at https://a: HTTP 404 .*; give the address of"),
    ],
)
def test_what_only_its_user_can_mend_ends_at_once(transport: httpx.MockTransport, words: str) -> None:
    """With one piece of advice and without another attempt; the next cloud is asked."""
    client = VerifierClient("https://a", transport=transport)
    works = VerifierClient("https://b", transport=answered(200, {"status": "ready", "model": "m"}))

    async def no_pause(_: float) -> None:
        pytest.fail("it waits for another attempt")

    said: list[str] = []
    with pytest.raises(EndpointWrong, match=words):
        asyncio.run(Endpoints([client], None, no_pause, on_trouble=said.append).call(lambda each: each.ready()))
    assert not said
    both = Endpoints([client, works], on_trouble=said.append)
    assert asyncio.run(both.call(lambda each: each.ready())).model == "m"
    assert len(said) == 1 and said[0].endswith("Trying https://b.")


@needs_openssl
async def test_http_to_a_port_that_speaks_tls_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server closes the connection without a word. A server in a cascade has no truststore, and asks as well."""
    monkeypatch.setitem(sys.modules, "truststore", None)
    with serve_fake(tls=TlsFiles(*make_own(tmp_path, "server"))) as server:
        url = server.url.replace("https:", "http:")
        with pytest.raises(EndpointWrong, match=f"{url}: what answers there speaks TLS; use {server.url}$"):
            await Endpoints([VerifierClient(url)]).call(lambda each: each.ready())
