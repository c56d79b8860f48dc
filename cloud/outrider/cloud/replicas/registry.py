"""Knows which replicas there are: an actor of Ray to which replicas report and which fronts ask.

It keeps nothing that is not reported again within a second, so Ray may start it anew at any time, anywhere. With their
reports replicas also share what owners use of their tokens per minute, so that a limit holds for all together: a
replica charges its own requests at once, and those of the others when it reports, once a second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, Final

from outrider.cloud.replicas.members import Report
from outrider.models.http.limits import TokenBudget

_log = logging.getLogger("outrider.replicas")

REPORT_S: Final = 1.0
"""How often a replica reports."""
SILENCE_S: Final = 10.0
"""A replica that does not report for so long is lost, also where its connections still stand."""
_LEARNING_S: Final = 3 * REPORT_S
"""A new registry does not know yet who is missing; nor does one that stood still, such as in a machine's pause."""
_NAMESPACE: Final = "outrider"

State = tuple[str, int]
"""Which registry, and how often it has changed."""

Charges = dict[bytes, tuple[int, int]]
"""Tokens that owners took since the last report, negative where they were given back, and their tokens per minute."""


def add_charges(total: Charges, charges: Charges) -> None:
    """Adds `charges` to `total`."""
    for owner, (num_tokens, per_minute) in charges.items():
        total[owner] = total.get(owner, (0, 0))[0] + num_tokens, per_minute


class SharedBudget(TokenBudget):
    """A budget that notes what it charges, for the other replicas."""

    def __init__(self) -> None:
        super().__init__()
        self._noting = threading.Lock()
        self._charges: Charges = {}

    def admit(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """As TokenBudget's."""
        super().admit(owner, num_tokens, per_minute)
        self._note(owner, num_tokens, per_minute)

    def take(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """As TokenBudget's."""
        super().take(owner, num_tokens, per_minute)
        self._note(owner, num_tokens, per_minute)

    def collect(self) -> Charges:
        """What was charged here since the last call."""
        with self._noting:
            charges, self._charges = self._charges, {}
        return charges

    def apply(self, charges: Charges) -> None:
        """Charges what the other replicas did."""
        for owner, (num_tokens, per_minute) in charges.items():
            super().take(owner, num_tokens, per_minute)

    def _note(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        with self._noting:
            add_charges(self._charges, {owner: (num_tokens, per_minute)})


class Registry:
    """The newest report of each replica. Methods run on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name = secrets.token_hex(4)
        self._born_s = self._ran_s = clock()
        self._num_changes = 0
        self._reports: dict[str, tuple[float, Report]] = {}
        self._owed: dict[str, Charges] = {}  # what a replica has not heard of the others' charges
        self._changed = asyncio.Event()

    async def report(self, report: Report, charges: Charges | None = None) -> Charges:
        """Takes a replica's report, and what it has charged since the last one; returns what the others have."""
        before = self._reports.get(report.tag)
        self._reports[report.tag] = (self._now_s(), report)
        if before is None or before[1].takes_work != report.takes_work:
            self._note()
        for tag in self._reports:
            if charges and tag != report.tag:
                add_charges(self._owed.setdefault(tag, {}), charges)
        return self._owed.pop(report.tag, {})

    async def leave(self, tag: str) -> None:
        """Forgets a replica that ends."""
        self._owed.pop(tag, None)
        if self._reports.pop(tag, None) is not None:
            self._note()

    async def changes(self, seen: State | None) -> tuple[State, list[Report] | None]:
        """All reports once a replica has come, gone, or changed what it takes; else after REPORT_S.

        seen: the state of the last answer. None in place of reports: it is too new to know all replicas.
        """
        if seen == (self._name, self._num_changes):
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):
                    await self._changed.wait()
        now_s = self._now_s()
        for tag in [tag for tag, (heard_s, _) in self._reports.items() if now_s - heard_s > SILENCE_S]:
            _log.warning("replica %s has not reported for %g s: it counts as lost", tag, SILENCE_S)
            del self._reports[tag]
            self._owed.pop(tag, None)
        is_new = seen is not None and seen[0] != self._name and now_s - self._born_s < _LEARNING_S
        reports = None if is_new else [report for _, report in self._reports.values()]
        return (seen or (self._name, -1)) if is_new else (self._name, self._num_changes), reports

    def _now_s(self) -> float:
        """The time. After a standstill it is a new registry: what replicas reported meanwhile waits to be taken."""
        now_s = self._clock()
        if now_s - self._ran_s > SILENCE_S / 2:
            self._name, self._born_s = secrets.token_hex(4), now_s
        self._ran_s = now_s
        return now_s

    def _note(self) -> None:
        self._num_changes += 1
        self._changed.set()
        self._changed = asyncio.Event()


def open_registry(application: str) -> Any:
    """The registry of an application, started if it is not there: a handle of Ray's.

    In an actor of Ray Serve it is the application that Serve has deployed it in, whatever `application` says: a cluster
    may serve several, each by a name that its configuration alone has.
    """
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    with suppress(RayServeException):  # not in an actor of Serve
        application = str(serve.get_replica_context().app_name)
    return (
        ray.remote(Registry)
        .options(
            name=f"registry-{application}",
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
        )
        .remote()
    )


async def follow(registry: Any) -> AsyncIterator[list[Report]]:
    """The reports, each time that they change and every second. Where the registry is away, it is asked again."""
    from ray.exceptions import RayError

    seen: State | None = None
    while True:
        try:
            seen, reports = await registry.changes.remote(seen)
        except RayError as error:
            _log.warning("the registry of replicas does not answer (%s); replicas stay as known", type(error).__name__)
            await asyncio.sleep(REPORT_S)
            continue
        if reports is None:
            await asyncio.sleep(REPORT_S / 4)
        else:
            yield reports
