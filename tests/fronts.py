"""Runs a front over replicas in the test process: fake servers in threads, which a list of reports names.

with replicas(2) as group, serve_front(group) as front:
    httpx.get(front.url + "/health/ready")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import FakeServer, StepGate, in_thread, serve_fake
from tests.waiting import TIMEOUT_S, wait_until

from outrider.cloud.api.audit import AuditLog
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.cloud.recent.store import RecentStore
from outrider.cloud.replicas.front import Front, FrontServer
from outrider.cloud.replicas.members import Members, Report
from outrider.cloud.replicas.trust import ForwardedOwners
from outrider.models.http.security import KeyRing
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.wire.protocol import ReadyAnswer


def report_of(
    tag: str, url: str = "u", secret: str = "s", *, target: str | None = "t", number: int = 0, pid: int = 0, **load: Any
) -> Report:
    """What a replica that takes work reports. load: fields of ReadyAnswer."""
    return Report(tag, url, secret, ReadyAnswer(status="ready", model="fake", target=target, **load), number, pid)


def changed(report: Report, **load: Any) -> Report:
    """The report with another state or load."""
    return replace(report, ready=report.ready.model_copy(update=load))


@dataclass(frozen=True)
class FakeReplica:
    """A replica: a fake server that takes a front's owners."""

    server: FakeServer
    report: Report

    def drain(self) -> None:
        """As Ray Serve ends it: what runs is ended with `shutdown`."""
        self.server.server.begin_drain(0.0)


@contextmanager
def replicas(
    count: int,
    *,
    seeds: Sequence[int] = (),
    gate: StepGate | None = None,
    settings: ServerSettings | None = None,
    config: EngineConfig | None = None,
    recent: RecentStore | None = None,
) -> Iterator[list[FakeReplica]]:
    """So many replicas; seeds: the languages of their targets, else one. gate: of all their steps.

    settings, config, recent: of all, but for what each has of its own.
    """
    with ExitStack() as stack:
        group = []
        for index in range(count):
            tag, secret = f"{index + 1:06x}", f"secret-of-replica-{index}"
            owners = ForwardedOwners(secret)
            own = replace(settings or ServerSettings(), keys=owners, session_prefix=tag, keep_alive_s=0.2)
            runtime = FakeBatchRuntime(vocab_size=300, seed=seeds[index] if seeds else 0, on_step=gate)
            server = stack.enter_context(serve_fake(own, config=config, recent=recent, runtime=runtime, gate=gate))
            owners.on_removed = server.core.admission.revoke
            target = server.core.model.target
            group.append(FakeReplica(server, report_of(tag, server.url, secret, target=target)))
        yield group


@dataclass(frozen=True)
class RunningFront:
    """A front that listens."""

    url: str
    front: Front
    server: FrontServer
    publish: Callable[[Sequence[Report]], None] = field(repr=False)

    wait_until = staticmethod(wait_until)


@contextmanager
def serve_front(
    group: Sequence[FakeReplica],
    settings: ServerSettings | None = None,
    limits: ConnectionLimits | None = None,
    drain: Callable[[], None] = lambda: None,
) -> Iterator[RunningFront]:
    """A front over these replicas, as their registry would name them. drain: see FrontServer."""
    inbox: list[Any] = []

    async def reports() -> AsyncIterator[list[Report]]:
        queue: asyncio.Queue[list[Report]] = asyncio.Queue()
        inbox.extend((asyncio.get_running_loop(), queue))
        yield [each.report for each in group]
        while True:
            yield await queue.get()

    numbers = iter(range(1, 10**6))

    def publish(newest: Sequence[Report]) -> None:
        loop, queue = inbox
        number = next(numbers)
        loop.call_soon_threadsafe(queue.put_nowait, [replace(each, number=number) for each in newest])

    front = Front(Members(), settings or ServerSettings())
    server = FrontServer(front, reports, drain=drain, limits=limits or ConnectionLimits())
    with in_thread(server, server.begin_drain) as url:
        yield RunningFront(url, front, server, publish)


@contextmanager
def served(
    keys: KeyRing | None = None,
    count: int = 1,
    *,
    gate: StepGate | None = None,
    audit: AuditLog | None = None,
    settings: ServerSettings | None = None,
    **given: Any,
) -> Iterator[tuple[httpx.Client, list[FakeReplica], RunningFront]]:
    """So many replicas behind a front with these keys, and a client of it. given: more of what `replicas` takes."""
    settings = replace(settings or ServerSettings(), audit=audit)
    with (
        replicas(count, gate=gate, settings=settings, **given) as group,
        serve_front(group, ServerSettings(keys or KeyRing(), audit=audit)) as front,
        httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as client,
    ):
        try:
            yield client, group, front
        finally:
            if gate is not None:
                gate.open()
