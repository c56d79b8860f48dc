"""Makes the TLS settings of connections to verifiers: the operating system decides which certificates are trusted.

A company's own authority, or a proxy that inspects traffic, is known to the system and to no Python package. On Linux
the system's is OpenSSL's: `SSL_CERT_FILE` and `SSL_CERT_DIR` name others.
"""

from __future__ import annotations

import importlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from outrider.models.errors import ConfigError
from outrider.models.extras import missing_extra


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """PEM files of the certificate chain that the device shows, and of its private key; None: in the same file."""

    certificate: Path
    key: Path | None = None

    def load_into(self, context: ssl.SSLContext) -> None:
        """Has connections show it. Raises ConfigError where the files cannot be used."""
        try:
            # An empty password: without one OpenSSL would ask at the terminal for that of an encrypted key.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:  # ssl.SSLError is one
            where = f"{self.certificate} and {self.key}" if self.key is not None else str(self.certificate)
            raise ConfigError(
                f"cannot show a client certificate with {where} ({error.strerror or error}); expected a certificate "
                "chain and its private key without a password, both PEM"
            ) from None


def system_tls(certificate: ClientCertificate | None = None) -> ssl.SSLContext:
    """Settings that verify a server by the system's roots, and show it the device's certificate where there is one.

    Raises RuntimeUnavailable without the edge's packages, ConfigError as `ClientCertificate.load_into`.
    """
    try:
        truststore: Any = importlib.import_module("truststore")
    except ModuleNotFoundError as error:
        raise missing_extra(error, "https", "edge") from error
    context = cast(ssl.SSLContext, truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    if certificate is not None:
        certificate.load_into(context)
    return context
