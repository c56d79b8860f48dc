"""Makes the TLS settings of connections to verifiers: the operating system decides which certificates are trusted.

A company's own authority, or a proxy that inspects traffic, is known to the system and to no Python package. On Linux
the system's is OpenSSL's: `SSL_CERT_FILE` and `SSL_CERT_DIR` name others.
"""

from __future__ import annotations

import importlib
import ssl
from typing import Any, cast

from outrider.models.client.certificate import ClientCertificate
from outrider.models.process.extras import missing_extra


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
