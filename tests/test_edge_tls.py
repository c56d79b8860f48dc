"""Tests that a device trusts the servers that its system trusts, and no others."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.serving import serve_fake

from outrider.edge.link.client import CloudClient
from outrider.edge.link.errors import EndpointLost
from outrider.models.errors import RuntimeUnavailable
from outrider.models.ingress.sockets import TlsFiles

OPENSSL = shutil.which("openssl")


async def status(url: str) -> str:
    """Of the server's readiness."""
    async with CloudClient(url) as client:
        return (await client.ready()).status


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep their roots elsewhere")
def test_a_root_of_the_system_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate of a company's own authority, which no package has; without it the server is refused."""
    assert OPENSSL is not None
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    files = ["-keyout", str(key), "-out", str(certificate), "-nodes", "-days", "1"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run([OPENSSL, "req", "-x509", *curve, *files, *name], check=True, capture_output=True)
    with serve_fake(tls=TlsFiles(certificate, key)) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert asyncio.run(status(server.url)) == "ready"
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(EndpointLost, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(status(server.url))


def test_plain_http_needs_no_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """And https without the package names the command that installs it."""
    monkeypatch.setitem(sys.modules, "truststore", None)
    CloudClient("http://127.0.0.1:1")
    with pytest.raises(RuntimeUnavailable, match=r"https needs the package 'truststore'.*outrider\[edge\]"):
        CloudClient("https://127.0.0.1:1")
