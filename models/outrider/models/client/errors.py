"""Defines how an endpoint can fail a text, and makes the exceptions from what was seen.

CloudError
└── EndpointLost          cannot be reached, is silent or overloaded, or lost the session: try again, here or elsewhere
    ├── ModelFailed       its model failed on this text: try once more, here or elsewhere
    ├── EndpointWrong     its address or its certificate is wrong: one that never answered is tried elsewhere only
    └── EndpointUnfit     cannot go on with this text: try elsewhere only
        ├── ProtocolBroken    its answer is none of this protocol, or beyond its bounds
        ├── TargetMismatch    it serves another target than the one that began the text
        └── EndpointRefused   it refuses the text for a reason of its own
            └── KeyRefused        this device's key
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import httpx

from outrider.models.errors import CloudError, ConfigError, OutriderError, RequestError, TokenizerMismatch
from outrider.models.wire.protocol import ErrorBody

# Answers that another endpoint, or the same one a little later, may not give; so are all from 500 on, whoever made up
# their numbers: proxies and content networks use 520 to 530 where the server behind them is away.
_PASSING_STATUS: Final = frozenset({404, 408, 410, 425, 429})
# Of an error in a stream, by its type; of any other type it is the server's own.
_STATUS: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "rate_limit_error": 429,
}
# Of an answer 404, where the path is unknown, and not a session or a draft.
_NO_PATH: Final = frozenset({"not_found", "unsupported_endpoint", "http_error"})
# What a TLS client reads where plain HTTP is spoken, by version of OpenSSL.
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "HTTP_REQUEST"})
# EAI_AGAIN is not among them: a name server that is away.
_NO_NAME: Final = frozenset(
    number for name in ("EAI_NONAME", "EAI_NODATA") if (number := getattr(socket, name, None)) is not None
)
MAX_RETRY_AFTER_S: Final = 60.0
"""A server that asks for a longer wait is asked again after this."""
MAX_WORDS: Final = 600
"""Characters of a server's text that an error message repeats."""


class EndpointLost(CloudError):
    """This endpoint cannot be reached, is overloaded, or lost the session; another attempt may succeed.

    is_absent: nothing answers at its address. status: of its HTTP answer, if it gave one. retry_after_s: how long that
    answer asks to wait.
    """

    def __init__(self, message: str, *, is_absent: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.is_absent = is_absent
        self.status = status
        self.retry_after_s = 0.0


class EndpointWrong(EndpointLost):
    """There is no verifier at this address, or none that this device trusts, until somebody corrects that."""


class ModelFailed(EndpointLost):
    """The model, or its runtime, failed on this text. It may fail on it each time."""


class EndpointUnfit(EndpointLost):
    """This endpoint cannot go on with the text, however often it is tried."""


class ProtocolBroken(EndpointUnfit):
    """The server's answer is not of this protocol, or beyond its bounds; nothing of it is used."""

    def __init__(self, url: str, what: str, advice: str = "compare the versions at both ends") -> None:
        super().__init__(f"the server at {url} broke the protocol: {what}; {advice}")


class TargetMismatch(EndpointUnfit):
    """The server has another target than the one that began the text, so its tokens would be another text's."""


class EndpointRefused(EndpointUnfit):
    """The server refuses what another may take. refusal: in its words."""

    def __init__(self, refusal: RequestError) -> None:
        super().__init__(str(refusal).rstrip("."), status=refusal.status)
        self.refusal = refusal


class KeyRefused(EndpointRefused):
    """The server refuses this device's key or address."""


def lost(url: str, error: httpx.TransportError | ssl.SSLError, *, is_answering: bool = False) -> EndpointLost:
    """The exception for a connection that failed. is_answering: within an answer, not before its head.

    A record of TLS that was altered on its way is an SSLError: anyio and httpx give it a name of theirs only while the
    connection is opened.
    """
    if (wrong := _wrong(url, error)) is not None:
        return wrong
    # httpx has one type for both: what is no HTTP, and a connection that ends in the middle of an answer.
    if isinstance(error, httpx.RemoteProtocolError) and not re.search("(?i)disconnected|closed", str(error)):
        return ProtocolBroken(url, f"its answer is not HTTP ({short(str(error))})")
    words = f"{url}: {type(error).__name__}: {error}" if str(error) else f"{url}: {type(error).__name__}"
    is_cut = isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError)
    if url.startswith("https:") and is_cut and not is_answering:
        # A refused handshake looks the same: with TLS 1.3 the client believes that it is connected by then. It reads
        # an end of the stream, or a reset where the server closed before it had read the request.
        words += " If it asks for client certificates, show one that it accepts: on a device, --tls-client-cert."
    return EndpointLost(words, is_absent=isinstance(error, httpx.ConnectError | httpx.ConnectTimeout))


def _wrong(url: str, error: httpx.TransportError | ssl.SSLError) -> EndpointWrong | None:
    """The exception for a connection that fails until somebody corrects the address or the certificate."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            found, advice = untrusted(cause)
            return EndpointWrong(f"{url}: its certificate was refused: {found}; {advice}")
        if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
            plain = f"http{url.removeprefix('https')}"
            return EndpointWrong(f"{url}: what answers there speaks no TLS; use {plain} if that is the verifier")
        if isinstance(cause, socket.gaierror) and cause.errno in _NO_NAME:
            return EndpointWrong(f"{url}: no host has this name ({cause.strerror}); correct the address")
        cause = cause.__cause__ or cause.__context__
    return None


def untrusted(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    """Why a server's certificate was refused, and what to do."""
    found = getattr(error, "verify_message", None) or str(error)
    if "expired" in found or "not yet valid" in found:  # else its owner has to renew it
        return found, "set this machine's clock"
    if "mismatch" in found:
        return found, "use an address that the certificate names"
    return found, "have this system trust its issuer, or name the issuer's certificate in SSL_CERT_FILE"


def retry_after_s(header: str | None) -> float:
    """The seconds of a Retry-After header, at most `MAX_RETRY_AFTER_S`; 0 where it has none. A date counts as none."""
    if header is None or not re.fullmatch(r"[0-9]{1,9}", header.strip()):
        return 0.0
    return min(MAX_RETRY_AFTER_S, float(header))


def silent(url: str, silence_s: float) -> EndpointLost:
    """The exception for a server that is connected and sends nothing."""
    return EndpointLost(f"{url}: the server sent nothing for {silence_s:.3g} s")


def refusal_error(url: str, error: ErrorBody, status: int) -> OutriderError:
    """The exception for an error that the server reported: whether trying again makes sense is in its type."""
    code, message = short(error.code), short(error.message)
    if code == "tokenizer_mismatch":
        return TokenizerMismatch(message)
    if code == "deadline_exceeded":
        return RequestError(code, message, status=504, origin=url)
    if code == "model_not_found" or (code == "invalid_parameter" and error.param == "model"):  # an older server's
        return EndpointUnfit(f"{url} does not serve the model that was asked for: {message}")
    if status == 404 and code in _NO_PATH:
        advice = "give the address of `outrider-cloud serve`"
        return EndpointWrong(f"there is no verifier at {url}: {message}; {advice}", status=status)
    if code == "upstream_refused":
        return RequestError(code, message, status=502, origin=url)
    if code == "model_fault":
        return ModelFailed(f"{url}: {code}: {message}", status=status)
    if status >= 500 or status in _PASSING_STATUS:
        return EndpointLost(f"{url}: {code}: {message}", status=status)
    return RequestError(code, message, status=status, origin=url, param="steady" if error.param == "steady" else None)


def end_error(url: str, error: ErrorBody) -> OutriderError:
    """The exception for an error that ended a stream: as for an answer, whose status is in its type here."""
    return refusal_error(url, error, _STATUS.get(error.type, 500))


@contextmanager
def naming_a_wrong_proxy() -> Iterator[None]:
    """Raises ConfigError where httpx cannot use the proxy that the environment names."""
    try:
        yield
    except ImportError:
        raise ConfigError(
            "the environment names a SOCKS proxy (ALL_PROXY, HTTPS_PROXY or HTTP_PROXY), which needs another package; "
            'run: pip install "httpx[socks]"'
        ) from None
    except (ValueError, httpx.InvalidURL):  # their words may repeat a password
        raise ConfigError(
            "the environment's proxy (ALL_PROXY, HTTPS_PROXY or HTTP_PROXY) is no address; expected http://host:port"
        ) from None


def short(text: str) -> str:
    """The first `MAX_WORDS` characters."""
    return text if len(text) <= MAX_WORDS else text[:MAX_WORDS] + "..."
