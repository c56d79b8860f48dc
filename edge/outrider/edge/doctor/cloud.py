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
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.edge.doctor.findings import Finding, fault, ok, warning
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

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str = Field(max_length=200)
    protocol: int = Field(ge=1, le=10**6)
    tokenizer: str = Field(max_length=128)
    target: str | None = Field(default=None, max_length=128)


@dataclass(frozen=True, slots=True)
class Cloud:
    """An address, its key, whether the key may go there without encryption, and what the device shows there.

    login: user:password of the address, which has neither.
    """

    url: str
    key: str | None = None
    label: str = ""
    is_http_allowed: bool = False
    certificate: ClientCertificate | None = None
    login: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class CloudReport:
    """What the checks learned. Filled by `findings`."""

    cloud: Cloud
    facts: Facts | None = None
    step_ms: float | None = None
    round_trip_ms: float | None = None
    is_working: bool = False
    _last_date: tuple[str, float] | None = field(default=None, repr=False)

    def findings(self) -> Iterator[Finding]:
        """One for each step."""
        parts = urlsplit(self.cloud.url)
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        proxy = None if is_loopback(host) else _proxy(parts.scheme, host)
        if proxy is not None:
            yield ok(self.step_name("proxy"), f"requests go through {without_password(proxy)}")
        else:
            direct = list(self._check_direct(host, port, is_tls=parts.scheme == "https"))
            yield from direct
            if any(each.status == "fault" for each in direct):
                return
        try:
            with naming_a_wrong_proxy():
                opened = httpx.Client(
                    timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                    trust_env=not is_loopback(host),
                    verify=system_tls(self.cloud.certificate) if parts.scheme == "https" else True,
                    auth=httpx.BasicAuth(*self.cloud.login.split(":", 1)) if self.cloud.login else None,
                )
        except ConfigError as error:
            found, _, advice = str(error).rpartition("; ")
            yield fault(self.step_name("proxy"), found, advice)
            return
        with opened as client:
            yield from self._check_http(client)

    def step_name(self, step: str) -> str:
        """A check's name; with the cloud's where there are several."""
        return f"{step} of {self.cloud.label}" if self.cloud.label else step

    def _check_direct(self, host: str, port: int, *, is_tls: bool) -> Iterator[Finding]:
        try:
            start = time.perf_counter()
            found = _limited(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), ANSWER_TIMEOUT_S)
        except (OSError, UnicodeError, TimeoutError) as error:
            yield fault(
                self.step_name("DNS"),
                f"{host} has no address ({_words(error)})",
                "correct the name, or your network's DNS",
            )
            return
        took_ms = 1e3 * (time.perf_counter() - start)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        yield ok(self.step_name("DNS"), f"{host} is {', '.join(addresses[:4])} ({took_ms:.0f} ms)")
        try:
            start = time.perf_counter()
            connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
        except OSError as error:
            yield fault(
                self.step_name("TCP"),
                f"nothing accepts connections at {host}:{port} ({_words(error)})",
                "start `outrider-cloud serve` there, or correct the address",
            )
            return
        with connection:
            yield ok(self.step_name("TCP"), f"{host}:{port} accepts ({1e3 * (time.perf_counter() - start):.0f} ms)")
            if is_tls:
                yield self._check_tls(connection, host)

    def _check_tls(self, connection: socket.socket, host: str) -> Finding:
        name = self.step_name("TLS")
        try:
            with system_tls(self.cloud.certificate).wrap_socket(connection, server_hostname=host) as secured:
                certificate = secured.getpeercert() or {}
                until = certificate.get("notAfter", "an unknown time")
                return ok(name, f"{secured.version()}, certificate valid until {until}")
        except ssl.SSLCertVerificationError as error:
            found, advice = untrusted(error)
            return fault(name, f"the certificate was refused: {found}", advice)
        except (OSError, ValueError) as error:
            return fault(name, f"no TLS there ({_words(error)})", "use http:// if the server has no certificate")

    def _check_http(self, client: httpx.Client) -> Iterator[Finding]:
        name, shown = self.step_name("HTTP"), self.cloud.url
        try:
            status, headers, body = self._get(client, "/health/live")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            yield fault(name, f"{shown} does not answer HTTP ({_words(error)})", "correct the address and its scheme")
            return
        if 300 <= status < 400:
            to = without_password(headers.get("location", "nowhere"))[:200]
            yield fault(name, f"{shown} redirects to {to}", "give the verifier's own address")
            return
        if status != 200 or _json(body).get("status") != "live":
            yield fault(
                name, f"{shown} answers {status}, and not as a verifier", "give the address of `outrider-cloud serve`"
            )
            return
        yield ok(name, f"a verifier answers at {shown}")
        for check in (self._check_key, self._check_ready):
            findings = list(check(client))
            yield from findings
            if any(each.status == "fault" for each in findings):
                return
        self.is_working = True
        yield from self._check_round_trip(client)
        yield self._check_clock()

    def _check_key(self, client: httpx.Client) -> Iterator[Finding]:
        name, key = self.step_name("key"), self.cloud.key
        if key is not None and is_plain_http(self.cloud.url) and not self.cloud.is_http_allowed:
            yield fault(
                name,
                "not sent: everyone on the way could read it, since the address begins with http://",
                "use https, or set allow_http = true in its [[endpoint]]",
            )
            return
        open_status, _, body = self._get(client, "/v1/model")
        is_open = open_status not in (401, 403)
        status = open_status
        if key is not None and not is_open:
            status, _, body = self._get(client, "/v1/model", key)
        if status in (401, 403):
            if key is None:
                yield fault(name, "the server requires a key, and none is set", "set OUTRIDER_API_KEY or key_file")
            else:
                yield fault(name, "the server does not accept this key", "correct OUTRIDER_API_KEY or key_file")
            return
        if status != 200:
            yield fault(self.step_name("model"), f"/v1/model answers {status}", "update the server, or try again later")
            return
        yield ok(name, "the server requires none" if is_open else "accepted")
        try:
            self.facts = Facts.model_validate(_json(body))
        except ValidationError:
            yield fault(self.step_name("model"), "/v1/model is not an answer of this protocol", "update the server")
            return
        yield from self._check_protocol(self.facts)

    def _check_protocol(self, facts: Facts) -> Iterator[Finding]:
        name, found = self.step_name("protocol"), f"{facts.protocol}, this agent speaks {PROTOCOL_VERSION}"
        if facts.protocol < TREES_SINCE:
            yield warning(name, f"{found}: drafts go as single paths", "update the server")
        elif facts.protocol > PROTOCOL_VERSION:
            yield warning(name, found, "update outrider on this device")
        else:
            yield ok(name, found)

    def _check_ready(self, client: httpx.Client) -> Iterator[Finding]:
        name = self.step_name("server")
        status, _, body = self._get(client, "/health/ready")
        if status in (401, 403) and self.cloud.key is not None:  # a gateway asks for the key everywhere
            status, _, body = self._get(client, "/health/ready", self.cloud.key)
        try:
            ready = ReadyAnswer.model_validate(_json(body))
        except ValidationError:
            yield warning(name, f"/health/ready answers {status}", "let the gateway pass /health/ready")
            return
        self.step_ms = ready.step_ms
        if ready.status != "ready":
            why = "it is shutting down" if ready.status == "draining" else "its engine cannot work"
            yield fault(name, f"{ready.model[:200]} is not ready: {why}", "see the server's log, or use another cloud")
        elif ready.queue_depth > 0:
            found = f"{ready.model[:200]} is ready; {ready.running} run and {ready.queue_depth} wait"
            yield warning(name, found, "expect to wait, or use another cloud")
        else:
            yield ok(name, f"{ready.model[:200]} is ready; {ready.running} sequences run")

    def _check_round_trip(self, client: httpx.Client) -> Iterator[Finding]:
        times = []
        for _ in range(1 + NUM_ROUND_TRIPS):  # the first may open a connection
            start = time.perf_counter()
            self._get(client, "/health/live")
            times.append(1e3 * (time.perf_counter() - start))
        times = times[1:]
        self.round_trip_ms = median(times)
        name = self.step_name("round trip")
        found = f"{self.round_trip_ms:.1f} ms, median of {len(times)} ({min(times):.1f} to {max(times):.1f})"
        if max(times) > SLOW_SPREAD * self.round_trip_ms and max(times) > 20.0:
            yield warning(name, f"{found}: it jumps", "use a cable or another network, if texts come in bursts")
        else:
            yield ok(name, found)

    def _check_clock(self) -> Finding:
        name = self.step_name("clock")
        if self._last_date is None:
            return ok(name, "not compared: the server sends no Date")
        text, now_s = self._last_date
        try:
            # The header leaves out the fraction of a second.
            difference_s = now_s - parsedate_to_datetime(text).timestamp() - 0.5
        except (ValueError, TypeError, OverflowError):
            return ok(name, "not compared: the server's Date cannot be read")
        found = f"{abs(difference_s):.0f} s {'ahead of' if difference_s > 0 else 'behind'} the server's"
        if abs(difference_s) > MAX_CLOCK_DIFFERENCE_S:
            return warning(name, found, "set this machine's clock: TLS certificates depend on it")
        return ok(name, found if abs(difference_s) >= 1.5 else "the server's, within 1.5 s")

    def _get(self, client: httpx.Client, path: str, key: str | None = None) -> tuple[int, httpx.Headers, bytes]:
        """One answer, cut at a bound of bytes and of time."""
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        until, body = time.monotonic() + ANSWER_TIMEOUT_S, b""
        sent_s = time.time()
        with client.stream("GET", self.cloud.url + path, headers=headers) as response:
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


def check_tokenizer(report: CloudReport, name: str, fingerprint: str) -> Finding:
    """The draft's tokenizer against the target's. name, fingerprint: the draft's."""
    assert report.facts is not None
    step, target = report.step_name("tokenizer"), report.facts
    if target.tokenizer == fingerprint:
        return ok(step, f"{name} and {target.name} share one ({fingerprint[:12]})")
    return fault(
        step,
        f"{name} has tokenizer {fingerprint[:12]}, {target.name} has {target.tokenizer[:12]}",
        "take a draft made for this target: `outrider pull`",
    )


def _proxy(scheme: str, host: str) -> str | None:
    """The proxy that the environment names for an address, as httpx takes it."""
    proxies = urllib.request.getproxies()
    found = proxies.get(scheme) or proxies.get("all")
    return None if not found or urllib.request.proxy_bypass(host) else found


def _limited(work: Callable[[], Result], limit_s: float) -> Result:
    """Runs what has no time limit of its own, such as a name look-up. Raises TimeoutError; the thread ends later."""
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {limit_s:.0f} s")
    return done[0]


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
