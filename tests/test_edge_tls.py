"""Tests that a device trusts the servers that its system trusts, and no others, and a server devices by their
certificates."""

from __future__ import annotations
from tests.certificates import make_own, make_signed, needs_openssl, openssl

import asyncio
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serving import StepGate, serve_fake

from outrider.edge.cli.command_options import PullOptions
from outrider.edge.cli.draft_source import clouds_of
from outrider.models.client.certificate import ClientCertificate
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost, lost
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.ingress.sockets import ClientName, TlsFiles, tls_files
from outrider.models.process.watched_files import WatchedFiles
from outrider.models.wire.protocol import SessionOpen, SessionRequest

def needs_own_roots(test: Any) -> Any:
    linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep their roots elsewhere")
    return needs_openssl(linux(test))


async def status(url: str, certificate: ClientCertificate | None = None) -> str:
    """Of the server's readiness."""
    async with VerifierClient(url, ClientOptions(certificate=certificate)) as client:
        return (await client.ready()).status


@needs_own_roots
async def test_a_root_of_the_system_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate of a company's own authority, which no package has; without it the server is refused."""
    certificate, key = make_own(tmp_path, "server")
    with serve_fake(tls=TlsFiles(certificate, key)) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert await status(server.url) == "ready"
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(EndpointLost, match="its certificate was refused: self-signed"):
            await status(server.url)


@needs_own_roots
async def test_clients_show_a_certificate_whose_subject_is_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or with another authority's, there is no connection; sessions belong to the subject."""
    certificate, key = make_own(tmp_path, "server")
    authority, other = make_own(tmp_path, "ca"), make_own(tmp_path, "other-ca")
    phone, tablet = (make_signed(tmp_path, name, authority) for name in ("phone", "tablet"))
    stranger = make_signed(tmp_path, "stranger", other)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    gate = StepGate()
    with serve_fake(tls=TlsFiles(certificate, key, authority[0]), gate=gate) as server:
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
    name = ClientName.of(certificate)
    assert name is not None and name.shown == shown
    assert ClientName.of({**certificate, "notAfter": "later"}) == name
    phone = {"subject": (ACME, (("commonName", "phone"),)), "issuer": (CA,)}
    first = ClientName.of(phone)
    assert first is not None and (first.owner == name.owner) == (certificate == phone)
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
        served[0].write_bytes(new[0].read_bytes())  # its key is not there yet
        files.check(counts, is_forced=True)
        files.check(counts)  # they keep still
        assert counts == {("certificates", "failed"): 1}
        monkeypatch.setenv("SSL_CERT_FILE", str(old[0]))
        assert await status(server.url) == "ready"
        put(*new)
        files.check(counts, is_forced=True)
        files.check(counts)  # they keep still
        monkeypatch.setenv("SSL_CERT_FILE", str(new[0]))
        assert await status(server.url) == "ready"
        assert counts["certificates", "ok"] == 1
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
    both.write_bytes(certificate.read_bytes() + locked.read_bytes())
    both.chmod(0o600)
    with pytest.raises(ConfigError, match="without a password"):
        PullOptions(tls_client_cert=both).keys()
    with pytest.raises(ConfigError, match="without a password"):
        TlsFiles(certificate, locked)
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    if os.name == "posix":
        both.chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            PullOptions(tls_client_cert=both).keys()
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
    assert "--tls-client-cert" in str(lost("https://verifier", error))
    assert "--tls-client-cert" not in str(lost("https://verifier", error, is_answering=True))
    assert "--tls-client-cert" not in str(lost("http://verifier", error))
