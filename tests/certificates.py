"""Makes certificates with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.models.client.certificate import ClientCertificate

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]


def openssl(*arguments: str | Path) -> None:
    """Runs the command."""
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *map(str, arguments)], check=True, capture_output=True)


def make_own(place: Path, name: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    certificate, key = place / f"{name}.pem", place / f"{name}.key"
    named = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl("req", "-x509", *CURVE, "-keyout", key, "-out", certificate, *named)
    return certificate, key


def make_signed(place: Path, name: str, authority: tuple[Path, Path]) -> ClientCertificate:
    """A client's certificate, signed by the authority, and its key, in one file."""
    certificate, key, request = (place / f"{name}.{end}" for end in ("pem", "key", "csr"))
    openssl("req", *CURVE, "-keyout", key, "-out", request, "-subj", f"/O=Acme/CN={name}")
    signer: list[str | Path] = ["-CA", authority[0], "-CAkey", authority[1], "-CAcreateserial", "-days", "1"]
    openssl("x509", "-req", "-in", request, *signer, "-out", certificate)
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    return ClientCertificate(certificate)
