"""Tests addresses of clouds, whom a device trusts there, and certificates by which clients are known."""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from pydantic import ValidationError
from tests.agents import Clock, generate, proxy_to, truth, whole
from tests.certificates import make_own, make_signed, needs_openssl, openssl
from tests.commands import KEY
from tests.serving import StepGate, serve_fake

from outrider.edge.cli.command_options import PullOptions
from outrider.edge.cli.draft_source import clouds_of
from outrider.edge.doctor.cloud import CloudReport
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.results import TokenBatch
from outrider.edge.serve.routes import PATHS_ARE
from outrider.edge.setup.config_file import ConfigFile
from outrider.edge.setup.endpoints import Endpoint, Keys, read_endpoints
from outrider.edge.store.shelf import PulledFor
from outrider.models.client.address import verifier_url
from outrider.models.client.certificate import ClientCertificate
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost, EndpointWrong, lost
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import ConfigError, RequestError, RuntimeUnavailable
from outrider.models.ingress.sockets import ClientName, TlsFiles, tls_files
from outrider.models.process.watched_files import WatchedFiles
from outrider.models.wire.protocol import SessionOpen, SessionRequest


def test_an_address_in_capitals_is_the_same_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets its own key and no general one, the system's trust and the device's certificate."""
    own, certificate = Endpoint(url="HTTPS://A.example", allow_http=True), ClientCertificate(Path("certificate"))
    keys = Keys(KEY, endpoints=(own, Endpoint(url="https://b")))
    assert own.url == "https://a.example"
    assert keys.for_url("https://A.Example:443/v1", ["HTTPS://A.EXAMPLE", "https://b"]) is None
    tls = Mock(return_value=ssl.create_default_context())
    monkeypatch.setattr("outrider.models.client.http_endpoint.system_tls", tls)
    VerifierClient("HTTPS://A.example", ClientOptions(certificate=certificate))
    tls.assert_called_once_with(certificate)


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


async def test_a_password_in_an_address_is_sent_and_kept_apart_from_it() -> None:
    """So no message, log or record has it; beside a key it would replace that, so both together are refused."""
    with pytest.raises(
        ConfigError, match=r"the address https://\*\*\*@a has a user name and password, and there is a key"
    ):
        clouds_of(["https://me:s%40cret@a"], Keys(KEY, is_asked=True))
    ((url, options),) = clouds_of(["https://me:s%40cret@a/v1"], Keys())
    assert (url, options.login) == ("https://a", "me:s@cret") and "cret" not in repr(options)
    answer = Mock(side_effect=lambda _: httpx.Response(401))
    for address, given in ((url, options), ("https://me:s%40cret@a", None)):
        async with VerifierClient(address, given, httpx.MockTransport(answer)) as client:
            with pytest.raises(RequestError, match="https://a does not accept the user name and password of its addr"):
                await client.ready()
        assert answer.call_args.args[0].headers["authorization"] == "Basic bWU6c0BjcmV0"
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
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(ConfigError, match=words) as found:
        VerifierClient("http://cloud.example")
    assert "secret" not in str(found.value)
    (finding,) = [each for each in CloudReport("http://cloud.example").findings() if each.status == "fault"]
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
async def test_what_only_its_user_can_mend_ends_at_once(transport: httpx.MockTransport, words: str) -> None:
    """With one piece of advice and without another attempt; the next cloud is asked."""
    client = VerifierClient("https://a", transport=transport)
    works = VerifierClient("https://b", transport=answered(200, {"status": "ready", "model": "m"}))
    clock, said = Clock(), list[str]()
    with pytest.raises(EndpointWrong, match=words):
        await Endpoints([client], None, clock.sleep, on_trouble=said.append).call(lambda each: each.ready())
    assert not said and not clock.pauses
    both = Endpoints([client, works], on_trouble=said.append)
    assert (await both.call(lambda each: each.ready())).model == "m"
    assert len(said) == 1 and said[0].endswith("Trying https://b.")


@needs_openssl
async def test_http_to_a_port_that_speaks_tls_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server closes the connection without a word. A server in a cascade has no truststore, and asks as well."""
    monkeypatch.setitem(sys.modules, "truststore", None)
    with serve_fake(tls=TlsFiles(*make_own(tmp_path, "server"))) as server:
        url = server.url.replace("https:", "http:")
        with pytest.raises(EndpointWrong, match=f"{url}: what answers there speaks TLS; use {server.url}$"):
            await Endpoints([VerifierClient(url)]).call(lambda each: each.ready())


def needs_own_roots(test: Any) -> Any:
    linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep their roots elsewhere")
    return needs_openssl(linux(test))


async def status(url: str, certificate: ClientCertificate | None = None) -> str:
    """Of the server's readiness."""
    async with VerifierClient(url, ClientOptions(certificate=certificate)) as client:
        return (await client.ready()).status


@needs_own_roots
async def test_clients_show_a_certificate_whose_subject_is_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, or with another authority's, there is no connection; sessions belong to the subject."""
    (certificate, key), authority, other = (make_own(tmp_path, name) for name in ("server", "ca", "other-ca"))
    phone, tablet = (make_signed(tmp_path, name, authority) for name in ("phone", "tablet"))
    stranger = make_signed(tmp_path, "stranger", other)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serve_fake(tls=TlsFiles(certificate, key, authority[0]), gate=StepGate()) as server:
        assert await status(server.url, phone) == "ready"
        for unknown in (None, stranger):
            with pytest.raises(EndpointLost, match="--tls-client-cert"):
                await status(server.url, unknown)

        drafts = DraftMessage("application/json", b'{"base": 0, "paths": [[1]]}')
        async with (
            VerifierClient(server.url, ClientOptions(certificate=phone)) as own,
            VerifierClient(server.url, ClientOptions(certificate=tablet)) as foreign,
            own.open_session(SessionRequest(prompt=[1, 2], max_tokens=4)) as stream,
        ):
            opened = await anext(stream)
            assert isinstance(opened, SessionOpen)
            (session,) = server.core.sessions.values()
            assert session.owner.startswith(b"subject:")
            await own.post_drafts(opened.session, drafts)
            with pytest.raises(EndpointLost, match="unknown_session"):
                await foreign.post_drafts(opened.session, drafts)


ACME = (("organizationName", "Acme"),)
CA, OTHER_CA = ((("commonName", name),) for name in ("ca", "other"))


@pytest.mark.parametrize(
    ("certificate", "shown"),
    [
        ({"subject": (ACME, (("commonName", "phone"),)), "issuer": (CA,)}, "CN=phone,O=Acme"),
        ({"subject": ((("commonName", "phone,O=Acme"),),), "issuer": (CA,)}, r"CN=phone\,O\=Acme"),
        ({"subject": ((*ACME, ("commonName", "phone")),), "issuer": (CA,)}, "O=Acme+CN=phone"),
        ({"subject": ((("commonName", r"a\b+c"),),), "issuer": (CA,)}, r"CN=a\\b\+c"),
        ({"subject": ((("commonName", "# \0 "),),), "issuer": (CA,)}, r"CN=\# \00\ "),
        ({"subject": (ACME, (("commonName", "phone"),)), "issuer": (OTHER_CA,)}, "CN=phone,O=Acme"),
        ({"subject": (), "issuer": (CA,), "subjectAltName": (("DNS", "a"), ("DNS", "b"))}, "DNS:a"),
        ({"subject": (), "issuer": (CA,), "subjectAltName": (("DNS", "CN=phone,O=Acme"),)}, "DNS:CN=phone,O=Acme"),
    ],
)
def test_every_subject_of_every_authority_is_an_owner_of_its_own(certificate: dict[str, Any], shown: str) -> None:
    """However the names are chosen; the text in the log is that of RFC 4514. A new certificate keeps the owner."""
    phone = {"subject": (ACME, (("commonName", "phone"),)), "issuer": (CA,)}
    first, name, later = map(ClientName.of, (phone, certificate, {**certificate, "notAfter": "later"}))
    assert first is not None and name is not None and (name.shown, later) == (shown, name)
    assert (first.owner == name.owner) == (certificate == phone)
    assert ClientName.of({"issuer": (CA,)}) is None


@needs_own_roots
async def test_new_certificates_are_served_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New connections get the new certificate and the new authority; files that do not fit change nothing."""
    old, new, authority = (make_own(tmp_path, name) for name in ("old", "new", "ca"))
    served = (tmp_path / "served.pem", tmp_path / "served.key")

    def put(certificate: Path, key: Path) -> None:
        for source, target in ((certificate, served[0]), (key, served[1])):
            target.write_bytes(source.read_bytes())

    put(*old)
    with serve_fake(tls=TlsFiles(*served)) as server:
        assert server.server.tls is not None
        files, counts = WatchedFiles("certificates", served, server.server.tls.reload), Counter[tuple[str, str]]()
        monkeypatch.setenv("SSL_CERT_FILE", str(new[0]))
        with pytest.raises(EndpointLost):
            await status(server.url)
        # At first its key is not there yet.
        for key, trusted, expected in ((old[1], old[0], "failed"), (new[1], new[0], "ok")):
            put(new[0], key)
            files.check(counts, is_forced=True)
            files.check(counts)  # they keep still
            assert counts["certificates", expected] == 1
            monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
            assert await status(server.url) == "ready"
        assert counts.total() == 2
    assert TlsFiles(*served, authority[0]).paths == (*served, authority[0])
    with pytest.raises(ConfigError, match="certificates of authorities"):
        TlsFiles(*served, served[1])


@needs_openssl
def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """A key that others can read, a key with a password, a CA without HTTPS."""
    certificate, key = make_own(tmp_path, "own")
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", locked)
    locked.chmod(0o600)
    both = key.with_name("both.pem")
    readable = [(key, 0o644, "chmod 600")] if os.name == "posix" else []
    for own, mode, words in ((locked, 0o600, "without a password"), *readable):
        both.write_bytes(certificate.read_bytes() + own.read_bytes())
        both.chmod(mode)
        with pytest.raises(ConfigError, match=words):
            PullOptions(tls_client_cert=both).keys()
    with pytest.raises(ConfigError, match="without a password"):
        TlsFiles(certificate, locked)
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    both.chmod(0o600)
    (cloud,) = clouds_of(["https://cloud.example"], PullOptions(tls_client_cert=both).keys())
    assert cloud[1].certificate == ClientCertificate(both)
    with pytest.raises(ConfigError, match="--tls-client-ca needs HTTPS"):
        tls_files(None, None, certificate)


def test_plain_http_needs_no_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """And https without the package names the command that installs it."""
    monkeypatch.setitem(sys.modules, "truststore", None)
    VerifierClient("http://127.0.0.1:1")
    with pytest.raises(RuntimeUnavailable, match=r"https needs the package 'truststore'.*outrider\[edge\]"):
        VerifierClient("https://127.0.0.1:1")


@pytest.mark.parametrize(
    "error", [httpx.ReadError(""), httpx.WriteError(""), httpx.RemoteProtocolError("disconnected")]
)
def test_a_connection_cut_before_an_answer_may_be_a_refused_certificate(error: httpx.TransportError) -> None:
    """The server's alert is lost where its reset arrives first; within an answer the certificate was accepted."""
    urls, answering = ("https://verifier", "http://verifier"), lost("https://verifier", error, is_answering=True)
    words = [str(each) for each in (*(lost(url, error) for url in urls), answering)]
    assert ["--tls-client-cert" in each for each in words] == [True, False, False]


@needs_openssl
async def test_a_bit_that_flips_inside_tls_costs_a_connection(tmp_path: Path) -> None:
    """The record is refused in the middle of an answer, and the text goes on over a new connection."""
    gate, troubles, request, files = StepGate(), list[str](), whole((5, 17, 99, 3)), make_own(tmp_path, "server")
    trusting = ClientOptions(tls=ssl.create_default_context(cafile=str(files[0])))
    with serve_fake(gate=gate, tls=TlsFiles(*files)) as server, proxy_to(server.url) as proxy:
        once = iter([lambda: proxy.flip(1)])

        def flip(batch: TokenBatch) -> None:
            next(once, lambda: None)()
            gate.open()

        gate.allow(1)  # what is read next is read after the flip
        url = proxy.url.replace("http:", "https:")
        result = await generate([url], request, options=trusting, on_trouble=troubles.append, on_tokens=flip)
    assert result.tokens == truth(request) and result.num_sessions == 2
    assert len(troubles) == 1 and "SSL" in troubles[0]
