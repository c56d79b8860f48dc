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

    def check(self) -> None:
        """Raises ConfigError where the files cannot be used."""
        import ssl

        self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
