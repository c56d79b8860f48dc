"""Keeps what a front knows of its replicas, and chooses one for a request. Knows neither Ray nor HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from outrider.models.process.by_owner import Bounds, OwnerStore
from outrider.models.wire.protocol import ReadyAnswer

_log = logging.getLogger("outrider.replicas")

TAG_CHARS: Final = 6
"""Of a replica's name, with which the ids of its sessions begin."""
MAX_HELD: Final = 1 << 16
"""Names of kept prefixes that a front remembers, of all owners."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself.

    tag: its name, TAG_CHARS long. url: where it listens. secret: what the front shows it. ready: its state and load.
    number: of its reports so far. pid: its process, on its node. adapters: identities of its adapters, beside that of
    its target.
    """

    tag: str
    url: str
    secret: str = field(repr=False)
    ready: ReadyAnswer
    number: int = 0
    pid: int = 0
    adapters: frozenset[str] = frozenset()

    def serves(self, target: str | None) -> bool:
        """Whether it goes on with texts of this target."""
        return target == self.ready.target or target in self.adapters

    @property
    def takes_work(self) -> bool:
        """Whether new work is welcome."""
        return self.ready.status == "ready"

    @property
    def load(self) -> int:
        """Sequences that run, and those that wait."""
        return self.ready.running + self.ready.queue_depth


@dataclass(slots=True, eq=False)
class Member:
    """A replica, as its front knows it. is_suspect: it could not be reached since its last report."""

    report: Report
    is_suspect: bool = False
    _exchanges: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def load(self) -> int:
        """Requests that it has: those of this front now, or all by its last report."""
        return max(len(self._exchanges), self.report.load)

    @contextmanager
    def serving(self, exchange: asyncio.Timeout) -> Iterator[None]:
        """Counts an exchange with it, which expires where the replica is lost."""
        self._exchanges.add(exchange)
        try:
            yield
        finally:
            self._exchanges.discard(exchange)

    def lose(self) -> None:
        """Ends all exchanges with it."""
        for exchange in self._exchanges:
            expire(exchange)


def expire(exchange: asyncio.Timeout) -> None:
    """Ends an exchange now, unless it is ending already."""
    if not exchange.expired():
        exchange.reschedule(asyncio.get_running_loop().time())


class Members:
    """The replicas that a front knows. Belongs to one event loop."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._held = OwnerStore[bytes, str, str](Bounds(max_all=MAX_HELD))  # the tags of replicas

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def update(self, reports: Iterable[Report]) -> None:
        """Takes the newest reports of all replicas. Those that have none are gone: their exchanges end."""
        newest = {report.tag: report for report in reports}
        for tag in [tag for tag in self._members if tag not in newest]:
            _log.info("replica %s has gone", tag)
            self._members.pop(tag).lose()
        for tag, report in newest.items():
            member = self._members.get(tag)
            if member is None:
                _log.info("replica %s has come; its log is in worker-*-%d.err", tag, report.pid)
                self._members[tag] = Member(report)
            elif member.report.number != report.number:
                member.report, member.is_suspect = report, False

    def of_session(self, session_id: str) -> Member | None:
        """The replica that has a session, by the session's id."""
        return self._members.get(session_id[:TAG_CHARS])

    def hold(self, owner: bytes, name: str, member: Member) -> None:
        """Remembers which replica keeps a prefix of the owner."""
        self._held.put(owner, name, member.report.tag)

    def choose(
        self, owner: bytes, *, target: str | None = None, held: str | None = None, tried: Collection[Member] = ()
    ) -> Member | None:
        """The replica for a new request; None where none is left.

        held: name of a kept prefix, which one replica has. target: a text that goes on; a replica of that target is
        taken where there is one. Otherwise the one with the least to do; of several, the same one for an owner, whose
        prompts it may have cached.
        """
        able = [each for each in self._members.values() if each.report.takes_work and each not in tried]
        able = [each for each in able if not each.is_suspect] or able
        if held is not None and (tag := self._held.get(owner, held)) is not None:
            keeper = next((each for each in able if each.report.tag == tag), None)
            if keeper is not None:
                return keeper
        able = [each for each in able if each.report.serves(target)] or able
        return min(able, key=lambda each: (each.load, _distance(owner, each.report.tag)), default=None)

    def ready(self, *, is_draining: bool) -> ReadyAnswer | None:
        """All replicas as one server; None where there is none."""
        reports = [each.report for each in self._members.values()]
        able = [each for each in reports if each.takes_work]
        shown = able or reports
        if not shown:
            return None
        # While another target is rolled out there are two: a device asks before it opens its next text.
        first = min(shown, key=lambda each: (each.load, each.tag))
        has_failed = any(each.ready.status == "failed" for each in reports)
        return first.ready.model_copy(
            update={
                "status": "draining" if is_draining or not (able or has_failed) else "ready" if able else "failed",
                "queue_depth": sum(each.ready.queue_depth for each in shown),
                "running": sum(each.ready.running for each in shown),
                "free_block_share": max(each.ready.free_block_share for each in shown),
            }
        )


def _distance(owner: bytes, tag: str) -> bytes:
    return hashlib.blake2b(owner, digest_size=8, key=tag.encode()).digest()
