"""Holds the certificate that the device shows to servers that ask for one. Loads no TLS: every command imports this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.models.errors import ConfigError

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
