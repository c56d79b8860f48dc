"""Checks a cloud step by step: name, connection, TLS, HTTP, key, protocol, tokenizer, round trip, clock.

Each step needs the one before, so the first fault ends them. A server's answers are read up to a bound.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, Field, ValidationError

from outrider.edge.doctor.findings import Failed, Finding, fault, from_error, ok, warning
from outrider.edge.setup.endpoints import is_plain_http
from outrider.models.client.address import without_password
from outrider.models.client.certificate import ClientCertificate, system_tls
from outrider.models.client.errors import naming_a_wrong_proxy, untrusted
from outrider.models.errors import ConfigError
from outrider.models.hosts import is_loopback
from outrider.models.wire.protocol import PROTOCOL_VERSION, TREES_SINCE, ReadyAnswer

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 16
NUM_ROUND_TRIPS: Final = 9
MAX_CLOCK_DIFFERENCE_S: Final = 60.0
"""Beyond it, a certificate that was just issued counts as not yet valid."""
SLOW_SPREAD: Final = 4.0
"""A longest round trip this many times the median means a link that jumps."""

Result = TypeVar("Result")


class Facts(BaseModel):
    """What is read of GET /v1/model."""

    name: str = Field(max_length=200)
    protocol: int = Field(ge=1, le=10**6)
    tokenizer: str = Field(max_length=128)
    target: str | None = Field(default=None, max_length=128)


@dataclass(slots=True)
class CloudReport:
    """What the checks of a cloud learned; filled by `findings`.

    url, key: the cloud's; is_http_allowed: the key may go there without encryption. label: tells it from other clouds.
    certificate: what the device shows there. login: user:password of the address, which has neither.
    """

    url: str
    key: str | None = None
    label: str = ""
    is_http_allowed: bool = False
    certificate: ClientCertificate | None = None
    login: str | None = field(default=None, repr=False)
    facts: Facts | None = None
    step_ms: float | None = None
    round_trip_ms: float | None = None
    _last_date: tuple[str, float] | None = field(default=None, repr=False)

    def findings(self) -> Iterator[Finding]:
        """One for each step; the first fault ends them."""
        try:
            yield from map(self.named, self._steps())
        except Failed as failed:
            yield self.named(failed.finding)

    def named(self, finding: Finding) -> Finding:
        """The finding with the cloud's name, where there are several."""
        return replace(finding, name=f"{finding.name} of {self.label}") if self.label else finding

    def _steps(self) -> Iterator[Finding]:
        parts = urlsplit(self.url)
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        proxy = None if is_loopback(host) else _proxy(parts.scheme, host)
        if proxy is not None:
            yield ok("proxy", f"requests go through {without_password(proxy)}")
        else:
            yield from self._check_direct(host, parts.port or (443 if is_tls else 80), is_tls=is_tls)
        self._require_private(self.login)
        try:
            with naming_a_wrong_proxy():
                opened = httpx.Client(
                    timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                    trust_env=not is_loopback(host),
                    verify=system_tls(self.certificate) if is_tls else True,
                    auth=httpx.BasicAuth(*self.login.split(":", 1)) if self.login else None,
                )
        except ConfigError as error:
            raise Failed(from_error("proxy", error)) from error
        with opened as client:
            yield from self._check_http(client)
            yield from self._check_key(client)
            yield self._check_ready(client)
            yield self._check_round_trip(client)
            yield self._check_clock()

    def _check_direct(self, host: str, port: int, *, is_tls: bool) -> Iterator[Finding]:
        start = time.perf_counter()
        try:
            found = _limited(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), ANSWER_TIMEOUT_S)
        except (OSError, UnicodeError, TimeoutError) as error:
            raise Failed(
                fault("DNS", f"{host} has no address ({_words(error)})", "correct the name, or your network's DNS")
            ) from error
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        yield ok("DNS", f"{host} is {', '.join(addresses[:4])} ({1e3 * (time.perf_counter() - start):.0f} ms)")
        start = time.perf_counter()
        try:
            connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        except OSError as error:
            raise Failed(
                fault(
                    "TCP",
                    f"nothing accepts connections at {host}:{port} ({_words(error)})",
                    "start `outrider-cloud serve` there, or correct the address",
                )
            ) from error
        with connection:
            yield ok("TCP", f"{host}:{port} accepts ({1e3 * (time.perf_counter() - start):.0f} ms)")
            if is_tls:
                yield self._check_tls(connection, host)

    def _check_tls(self, connection: socket.socket, host: str) -> Finding:
        try:
            with system_tls(self.certificate).wrap_socket(connection, server_hostname=host) as secured:
                until = (secured.getpeercert() or {}).get("notAfter", "an unknown time")
                return ok("TLS", f"{secured.version()}, certificate valid until {until}")
        except ssl.SSLCertVerificationError as error:
            found, advice = untrusted(error)
            raise Failed(fault("TLS", f"the certificate was refused: {found}", advice)) from error
        except (OSError, ValueError) as error:
            raise Failed(
                fault("TLS", f"no TLS there ({_words(error)})", "use http:// if the server has no certificate")
            ) from error

    def _check_http(self, client: httpx.Client) -> Iterator[Finding]:
        try:
            status, headers, body = self._get(client, "/health/live")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            raise Failed(
                fault(
                    "HTTP", f"{self.url} does not answer HTTP ({_words(error)})", "correct the address and its scheme"
                )
            ) from error
        if 300 <= status < 400:
            to = without_password(headers.get("location", "nowhere"))[:200]
            raise Failed(fault("HTTP", f"{self.url} redirects to {to}", "give the verifier's own address"))
        if status != 200 or _json(body).get("status") != "live":
            raise Failed(
                fault(
                    "HTTP",
                    f"{self.url} answers {status}, and not as a verifier",
                    "give the address of `outrider-cloud serve`",
                )
            )
        yield ok("HTTP", f"a verifier answers at {self.url}")

    def _require_private(self, secret: str | None) -> None:
        """Raises Failed where a key, or an address's password, would go to it unencrypted."""
        if secret is not None and is_plain_http(self.url) and not self.is_http_allowed:
            raise Failed(
                fault(
                    "key",
                    "not sent: everyone on the way could read it, since the address begins with http://",
                    "use https, or set allow_http = true in its [[endpoint]]",
                )
            )

    def _check_key(self, client: httpx.Client) -> Iterator[Finding]:
        self._require_private(self.key)
        status, _, body = self._get(client, "/v1/model")
        is_open = status not in (401, 403)
        if self.key is not None and not is_open:
            status, _, body = self._get(client, "/v1/model", self.key)
        if status in (401, 403) and self.key is None:
            raise Failed(fault("key", "the server requires a key, and none is set", "set OUTRIDER_API_KEY or key_file"))
        if status in (401, 403):
            raise Failed(fault("key", "the server does not accept this key", "correct OUTRIDER_API_KEY or key_file"))
        if status != 200:
            raise Failed(fault("model", f"/v1/model answers {status}", "update the server, or try again later"))
        yield ok("key", "the server requires none" if is_open else "accepted")
        try:
            self.facts = Facts.model_validate(_json(body))
        except ValidationError as error:
            raise Failed(fault("model", "/v1/model is not an answer of this protocol", "update the server")) from error
        yield _check_protocol(self.facts)

    def _check_ready(self, client: httpx.Client) -> Finding:
        status, _, body = self._get(client, "/health/ready")
        if status in (401, 403) and self.key is not None:  # a gateway asks for the key everywhere
            status, _, body = self._get(client, "/health/ready", self.key)
        try:
            ready = ReadyAnswer.model_validate(_json(body))
        except ValidationError:
            return warning("server", f"/health/ready answers {status}", "let the gateway pass /health/ready")
        self.step_ms = ready.step_ms
        name = ready.model[:200]
        if ready.status != "ready":
            why = "it is shutting down" if ready.status == "draining" else "its engine cannot work"
            raise Failed(fault("server", f"{name} is not ready: {why}", "see the server's log, or use another cloud"))
        if ready.queue_depth > 0:
            return warning(
                "server",
                f"{name} is ready; {ready.running} run and {ready.queue_depth} wait",
                "expect to wait, or use another cloud",
            )
        return ok("server", f"{name} is ready; {ready.running} sequences run")

    def _check_round_trip(self, client: httpx.Client) -> Finding:
        times = []
        for _ in range(1 + NUM_ROUND_TRIPS):
            start = time.perf_counter()
            self._get(client, "/health/live")
            times.append(1e3 * (time.perf_counter() - start))
        del times[0]  # it may have opened a connection
        self.round_trip_ms = median(times)
        found = f"{self.round_trip_ms:.1f} ms, median of {len(times)} ({min(times):.1f} to {max(times):.1f})"
        if max(times) > SLOW_SPREAD * self.round_trip_ms and max(times) > 20.0:
            return warning(
                "round trip", f"{found}: it jumps", "use a cable or another network, if texts come in bursts"
            )
        return ok("round trip", found)

    def _check_clock(self) -> Finding:
        if self._last_date is None:
            return ok("clock", "not compared: the server sends no Date")
        text, now_s = self._last_date
        try:
            # The header leaves out the fraction of a second.
            difference_s = now_s - parsedate_to_datetime(text).timestamp() - 0.5
        except (ValueError, TypeError, OverflowError):
            return ok("clock", "not compared: the server's Date cannot be read")
        found = f"{abs(difference_s):.0f} s {'ahead of' if difference_s > 0 else 'behind'} the server's"
        if abs(difference_s) > MAX_CLOCK_DIFFERENCE_S:
            return warning("clock", found, "set this machine's clock: TLS certificates depend on it")
        return ok("clock", found if abs(difference_s) >= 1.5 else "the server's, within 1.5 s")

    def _get(self, client: httpx.Client, path: str, key: str | None = None) -> tuple[int, httpx.Headers, bytes]:
        """One answer, cut at a bound of bytes and of time."""
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        until, body = time.monotonic() + ANSWER_TIMEOUT_S, b""
        sent_s = time.time()
        with client.stream("GET", self.url + path, headers=headers) as response:
            got_s = time.time()
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    break
                if time.monotonic() > until:
                    raise TimeoutError(f"no whole answer within {ANSWER_TIMEOUT_S:.0f} s")
            if (date := response.headers.get("date")) is not None:
                self._last_date = date, (sent_s + got_s) / 2
            return response.status_code, response.headers, body[:MAX_ANSWER_BYTES]


def _check_protocol(facts: Facts) -> Finding:
    found = f"{facts.protocol}, this agent speaks {PROTOCOL_VERSION}"
    if facts.protocol < TREES_SINCE:
        return warning("protocol", f"{found}: drafts go as single paths", "update the server")
    if facts.protocol > PROTOCOL_VERSION:
        return warning("protocol", found, "update outrider on this device")
    return ok("protocol", found)


def check_tokenizer(target: Facts, name: str, fingerprint: str) -> Finding:
    """The draft's tokenizer against the target's. name, fingerprint: the draft's."""
    if target.tokenizer == fingerprint:
        return ok("tokenizer", f"{name} and {target.name} share one ({fingerprint[:12]})")
    return warning(
        "tokenizer",
        f"{name} has tokenizer {fingerprint[:12]}, {target.name} has {target.tokenizer[:12]}: its tokens are mapped",
        "the verifier has to share its tokenizer, or name it with --tokenizer DIR; a draft with the target's tokenizer "
        "is accepted more often",
    )


def _proxy(scheme: str, host: str) -> str | None:
    """The proxy that the environment names for an address, as httpx takes it."""
    proxies = urllib.request.getproxies()
    found = proxies.get(scheme) or proxies.get("all")
    return None if not found or urllib.request.proxy_bypass(host) else found


def _limited(work: Callable[[], Result], limit_s: float) -> Result:
    """Runs what has no time limit of its own, such as a name look-up. Raises TimeoutError; the thread ends later."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # an executor would wait for its thread at the end
    try:
        return answer.result(limit_s)
    except TimeoutError:
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _words(error: BaseException) -> str:
    """An error for people; a system's error without its number."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)[:300]
