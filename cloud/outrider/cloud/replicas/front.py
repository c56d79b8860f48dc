"""Stands before the replicas: bounds connections, checks keys, and sends requests on.

A request passes the same layers as at a single server. What a replica alone can know stays with it: sessions, the
engine's queue, the sequences that one owner has open there.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import suppress
from itertools import chain
from types import FrameType
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.cloud.api.app import COSTLY_PATHS, OPEN_PATHS, PATHS, PROBE_PATHS
from outrider.cloud.api.draft_posts import Answer, DraftsEndpoint, Spend, is_draft_path
from outrider.cloud.api.health import ready_response
from outrider.cloud.api.metrics import Families, file_families
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.replicas.forward import FORWARDED, LOST, Forwarder, no_replica, unknown_session
from outrider.cloud.replicas.members import Member, Members, Report
from outrider.models.errors import RequestError
from outrider.models.http.errors import Throttled, method_not_allowed
from outrider.models.http.request_context import HEADER, enter_request
from outrider.models.http.security import Gate
from outrider.models.http.served_requests import ServedRequests
from outrider.models.ingress.bounded_server import BoundedServer
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.ingress.sockets import TlsFiles
from outrider.models.process.tally import RequestTally, text_format

Reports = Callable[[], AsyncIterator[list[Report]]]
"""Gives the newest reports of all replicas, again and again."""

_LIVE: Final = frozenset({"/health/live", "/health", "/healthz", "/livez"})
_READY: Final = frozenset({"/health/ready", "/readyz"})
_FIXED: Final = frozenset(
    {*PROBE_PATHS, *OPEN_PATHS, *COSTLY_PATHS, "/metrics", "/v1/model", "/v1/models", "/v1/drafts", "/v1/tokenizer"}
)
_SCRAPE_S: Final = 1.0
"""How long an answer of /metrics is given again: a scrape asks all replicas, and GETs count against no rate."""
_FAMILY: Final = re.compile(rb"^(?=# HELP )", re.MULTILINE)
_SAMPLE: Final = re.compile(rb"^([A-Za-z_:][\w:]*)(?:\{|(?= ))", re.MULTILINE)
"""A sample's name, and the brace that its labels begin with, if it has any."""


class Front:
    """ASGI application: the layers, and the routes that the front answers itself. is_draining: takes no new work."""

    def __init__(self, members: Members, settings: ServerSettings) -> None:
        self.members = members
        self.tally = RequestTally()
        self.forwarder = Forwarder(members, settings.max_body_bytes, settings.keys)
        self.is_draining = False
        self._settings = settings
        self.num_dropped = Counter[str]()
        self._scrape: asyncio.Task[bytes] | None = None
        self._scraped_s = 0.0
        self._whole = ServedRequests(Gate(self._answer, settings, PATHS), self.tally, route_of, self._over)
        self._drafts = DraftsEndpoint(
            settings,
            PATHS,
            self.tally,
            find=self._member,
            deliver=self._deliver,
            deliver_long=self._deliver_long,
            num_dropped=self.num_dropped,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await (self._drafts if is_draft_path(scope) else self._whole)(scope, receive, send)

    def _over(self, scope: Scope, status: int | None, took_s: float) -> None:
        """Audits what reached no replica: refused requests, and those whose replica is lost."""
        audit = self._settings.audit
        if audit is not None and scope["path"] not in PROBE_PATHS and not scope.get(FORWARDED, False):
            audit.over(scope, route_of(scope), status, took_s, is_work=scope.get(LOST, False))

    def _member(self, session_id: str, owner: bytes) -> Member:
        """The replica that has the session, which knows its owner."""
        member = self.members.of_session(session_id)
        if member is None:
            raise unknown_session()
        return member

    async def _deliver(self, scope: Scope, member: Member, body: bytes, is_tree: bool) -> Answer:
        request = enter_request(scope)  # the replica takes over its id
        start, content = await self.forwarder.draft(scope, member, body)
        if start["status"] >= 400:
            start["headers"].append((HEADER, request.request_id.encode()))
        return start, content

    async def _deliver_long(self, scope: Scope, member: Member, receive: Receive, spend: Spend) -> Answer:
        if not spend(0):
            await asyncio.sleep(self._settings.draft_limits.delay_s)
            raise Throttled("rate_limited", "more drafts than the budget; send single messages", retry_after_s=1)
        request = enter_request(scope)
        start, content = await self.forwarder.long_drafts(scope, member, receive)
        if start["status"] >= 400:
            start["headers"].append((HEADER, request.request_id.encode()))
        return start, content

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        is_own = path in _LIVE or path in _READY or path == "/metrics"
        if not is_own:
            if self.is_draining and method == "POST" and path in COSTLY_PATHS:
                raise RequestError("shutting_down", "the server is shutting down; use another", status=503)
            return await self.forwarder(scope, receive, send)
        if method not in (("GET",) if path == "/metrics" else ("GET", "HEAD")):
            raise method_not_allowed(method)
        if path in _LIVE:
            answer = Response(b'{"status":"live"}', media_type="application/json")
        elif path in _READY:
            answer = self._ready()
        else:
            answer = Response(await self._metrics(), headers={"content-type": "text/plain; version=0.0.4"})
        await answer(scope, receive, send)

    def _ready(self) -> Response:
        ready = self.members.ready(is_draining=self.is_draining)
        if ready is None:
            raise no_replica()
        return ready_response(ready)

    async def _metrics(self) -> bytes:
        """The metrics of the front and of all replicas, once a second for all who ask."""
        now_s = asyncio.get_running_loop().time()
        if self._scrape is None or (self._scrape.done() and now_s - self._scraped_s > _SCRAPE_S):
            self._scrape = asyncio.create_task(self._scraped())
        return await asyncio.shield(self._scrape)  # one who leaves does not end it for the others

    async def _scraped(self) -> bytes:
        """Asks all replicas; the label `replica` has a replica's tag."""
        try:
            found = await asyncio.gather(*(self._families_of(each) for each in self.members))
            known = [each for each in found if each is not None]
            of_files = file_families(self.tally, self._settings.reloads, self._settings.audit)
            own = labelled(_exposed(of_files), "front")
            return merged([*known, own]) + _exposed(self._of_replicas(len(known)))
        finally:
            self._scraped_s = asyncio.get_running_loop().time()

    async def _families_of(self, member: Member) -> list[Family] | None:
        try:
            return labelled(await self.forwarder.fetch(member, "/metrics"), member.report.tag)
        except OSError:
            return None  # lost, or about to be: the front's own metrics have the number

    def _of_replicas(self, num_scraped: int) -> list[Metric]:
        reports = [member.report for member in self.members]
        able = sum(report.takes_work for report in reports)
        dropped = "Draft messages dropped because a budget was used up."
        answered = "HTTP requests that the front has answered or sent on."
        requests: dict[tuple[str, ...], int] = {
            (route, method, str(status)): n for (route, method, status), n in self.tally.requests.items()
        }
        return [
            GaugeMetricFamily("outrider_front_replicas", "Replicas that the front knows.", value=len(reports)),
            GaugeMetricFamily("outrider_front_replicas_ready", "Replicas that take new work.", value=able),
            GaugeMetricFamily("outrider_front_replicas_scraped", "Replicas in this scrape.", value=num_scraped),
            self.tally.counter("front_drafts_dropped", dropped, (), {(): self.num_dropped.total()}),
            self.tally.counter("front_requests", answered, ("route", "method", "status"), requests),
        ]


def labelled(text: bytes, tag: str) -> list[Family]:
    """A replica's metrics with the label `replica`. They are not parsed, which would take the loop from the streams."""
    first, only = (b'{replica="%b"%b' % (tag.encode(), end) for end in (b",", b"}"))
    families = []
    for family in _FAMILY.split(text)[1:]:
        help_line, type_line, samples = family.split(b"\n", 2)
        samples = _SAMPLE.sub(lambda found: found[1] + (first if found[0].endswith(b"{") else only), samples)
        families.append(Family(help_line.split(b" ", 3)[2], b"%b\n%b\n" % (help_line, type_line), samples))
    return families


def merged(found: Iterable[list[Family]]) -> bytes:
    """The families of all replicas, the comments of each once."""
    comments: dict[bytes, bytes] = {}
    samples: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for family in chain.from_iterable(found):
        comments.setdefault(family.name, family.comments)
        samples[family.name].append(family.samples)
    return b"".join(comments[name] + b"".join(samples[name]) for name in comments)


class Family(NamedTuple):
    """A metric as text: its lines HELP and TYPE, and its samples."""

    name: bytes
    comments: bytes
    samples: bytes


def _exposed(metrics: Iterable[Metric]) -> bytes:
    """Prometheus' text format."""
    encoder, _ = text_format("")
    return encoder(Families(lambda: metrics))


class FrontServer(BoundedServer):
    """Serves a front, and follows the reports of its replicas.

    drain: ends the replicas within so many seconds; blocking. Called at the first signal; then the server closes.
    """

    def __init__(
        self,
        front: Front,
        reports: Reports,
        *,
        drain: Callable[[], None],
        limits: ConnectionLimits,
        tls: TlsFiles | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._front = front
        self._reports = reports
        self._drain = drain
        self._following: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._first = asyncio.Event()
        super().__init__(front, limits, tls=tls, on_ready=on_ready)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens for business once the first replica is there. Returns without that where a signal comes before."""
        self._loop = asyncio.get_running_loop()
        self._following = self._loop.create_task(self._follow())
        if not self.should_exit:
            await self._first.wait()
        if self.should_exit:  # uvicorn ends then, and does not call `shutdown`
            await self._close()
        else:
            await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the connections of clients, then those to replicas."""
        await super().shutdown(sockets)
        await self._close()

    async def _close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        for task in self._ending:
            task.cancel()
        await self._front.forwarder.aclose()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once. Called by the interpreter, between two steps."""
        if self._front.is_draining:
            self.force_exit = True
            self._exit()
            return
        self.begin_drain()

    def revoke(self, owners: Collection[bytes]) -> None:
        """Ends the work of owners whose key was removed, at all replicas. From any thread; does not wait for it."""
        if owners and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_revoke, frozenset(owners))

    def _begin_revoke(self, owners: frozenset[bytes]) -> None:
        task = asyncio.get_running_loop().create_task(self._front.forwarder.end_removed(owners))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def begin_drain(self) -> None:
        """Refuses new work, ends the replicas, and closes. From any thread."""
        self._front.is_draining = True
        threading.Thread(target=self._end, name="outrider-drain", daemon=True).start()

    def _end(self) -> None:
        try:
            self._drain()
        finally:
            self._exit()

    def _exit(self) -> None:
        """Lets the server end, also one that waits for its first replica. From any thread."""
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._first.set)

    async def _follow(self) -> None:
        async for reports in self._reports():
            self._front.members.update(reports)
            if any(report.takes_work for report in reports):
                self._first.set()


def route_of(scope: Scope) -> str:
    """A request's path where it is one of a few: others have names of clients' choosing in them."""
    path: str = scope["path"]
    return path if path in _FIXED else "other"
