"""Makes the TLS settings of connections to verifiers, and holds the certificate that the device shows where asked.

The operating system decides which certificates are trusted: a company's own authority, or a proxy that inspects
traffic, is known to the system and to no Python package. On Linux the system's is OpenSSL's: `SSL_CERT_FILE` and
`SSL_CERT_DIR` name others. Loads no TLS before it is needed: every command imports this.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.models.errors import ConfigError
from outrider.models.process.extras import missing_extra

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """The PEM file of the certificate chain that the device shows, with its private key."""

    certificate: Path

    def load_into(self, context: ssl.SSLContext) -> None:
        """Has connections show it. Raises ConfigError where the file cannot be used."""
        try:
            # An empty password: without one OpenSSL would ask at the terminal for that of an encrypted key.
            context.load_cert_chain(self.certificate, password="")
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"cannot show a client certificate with {self.certificate} ({error.strerror or error}); expected a "
                "certificate chain and its private key without a password, both PEM"
            ) from None

    def check(self) -> None:
        """Raises ConfigError where the file cannot be used."""
        import ssl

        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


def system_tls(certificate: ClientCertificate | None = None) -> ssl.SSLContext:
    """Settings that verify a server by the system's roots, and show it the device's certificate where there is one.

    Raises RuntimeUnavailable without the edge's packages, ConfigError as `ClientCertificate.load_into`.
    """
    import ssl

    try:
        truststore: Any = importlib.import_module("truststore")
    except ModuleNotFoundError as error:
        raise missing_extra(error, "https", "edge") from error
    context: ssl.SSLContext = truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate is not None:
        certificate.load_into(context)
    return context
