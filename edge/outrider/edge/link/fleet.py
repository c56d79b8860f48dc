"""Chooses among several clouds: measures their round trips and load, and leaves out those that fail.

The order of the configuration is the user's preference. It gives way where another cloud is clearly faster, by the
figures of `GET /health/ready`, and comes back when the preferred cloud does. A text stays where it is: what is chosen
here is where the next one begins, and where a text goes on after a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from pydantic import BaseModel, Field

from outrider.edge.link.origin import Served
from outrider.models.breaker import Breaker
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost, EndpointUnfit, KeyRefused
from outrider.models.errors import OutriderError, RequestError
from outrider.models.wire.protocol import ReadyAnswer

Sleep = Callable[[float], Awaitable[None]]

FRESH_S: Final = 5.0
"""How long a cloud's figures are believed."""
COMPARE_TIMEOUT_S: Final = 2.0
"""Longest delay of the first text by clouds that do not show their readiness."""
CLEARLY: Final = 1.25
"""A preferred cloud is passed over where its cost is more than this many times the lowest."""

_TEXT_TOKENS: Final = 128
"""Of a text, for comparing clouds."""
_TRIPS: Final = 16
"""Round trips that such a text waits for: its first token, and drafts after misses."""
_STEP_MS: Final = 40.0
"""A target's step, where no cloud has measured one."""
_SCARCE: Final = 0.1
"""Below this free share of the cache, sequences begin to wait for blocks."""


@dataclass(slots=True, eq=False)
class _Member:
    client: VerifierClient
    breaker: Breaker
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    ready: ReadyAnswer | None = None
    looked_at: float | None = None
    look: asyncio.Task[Served | None] | None = None
    mending: asyncio.Task[None] | None = None
    has_served: bool = False
    has_answered: bool = False  # a look, since `finds_one` was asked or a text failed
    is_refusing: bool = False  # this device's key, when it was left out


class CloudState(BaseModel):
    """One cloud, for probes. state: "up", "down" (left out), or "unknown". target: the model's digest.

    url, step_ms: for this machine's user only.
    """

    url: str = Field(exclude=True)
    state: str
    model: str | None = None
    target: str | None = None
    round_trip_ms: float | None = None
    queue_depth: int | None = None
    free_block_share: float | None = None
    step_ms: float | None = Field(default=None, exclude=True)


class Fleet:
    """The clouds, the preferred one first. Belongs to one event loop; `aclose` ends its looks, not the clients.

    clients: all clouds, in the order of preference. on_change: called with a sentence when a cloud is left out and when
    it is back.
    """

    def __init__(
        self,
        clients: Sequence[VerifierClient],
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        first_pause_s: float = 1.0,
        on_change: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._members = {client.url: _Member(client, Breaker(first_pause_s, clock=clock)) for client in clients}
        self.clients = list(clients)
        self._clock = clock
        self._sleep = sleep
        self._on_change = on_change

    def ranked(self) -> list[VerifierClient]:
        """All clouds, in the order in which the next text tries them. Starts looks at those whose figures are old.

        First the preferred one of those that cost about the least, then the others by cost, then those that are known
        to serve another target than the first that is up, then those that are down.
        """
        if len(self.clients) == 1:
            return list(self.clients)
        now = self._clock()
        for member in self._members.values():
            is_old = member.looked_at is None or now - member.looked_at >= FRESH_S
            if is_old and member.look is None and not member.breaker.is_open:
                self._look(member)
        costs = self._costs()
        up = [client for client in self.clients if client.url in costs]
        down = [client for client in self.clients if client.url not in costs]
        # Speed chooses among replicas. Which model answers is the user's choice, by the order.
        replicas = [client for client in up if self._may_replace(up[0].url, client.url)]
        others = [client for client in up if client not in replicas]
        if replicas:
            least = min(costs[client.url] for client in replicas)
            first = next(client for client in replicas if costs[client.url] <= CLEARLY * least)
            replicas.sort(key=lambda client: (client is not first, costs[client.url]))
        return replicas + others + down

    def _may_replace(self, url: str, other: str) -> bool:
        """Whether the other is not known to serve another target."""
        mine, its = self._members[url].ready, self._members[other].ready
        return mine is None or its is None or mine.target == its.target

    def is_down(self, url: str) -> bool:
        """Whether this cloud is left out now."""
        return self._members[url].breaker.is_open

    @property
    def has_served(self) -> bool:
        """Whether any cloud has served tokens."""
        return any(member.has_served for member in self._members.values())

    def refuses(self, url: str) -> bool:
        """Whether a cloud is left out because it refuses this device's key, which its readiness does not ask for."""
        return self._members[url].is_refusing and self.is_down(url)

    def failed(self, url: str, error: EndpointLost) -> None:
        """Records that a cloud failed a text, or a question. One that is unfit for one text may suit others; one that
        refuses this device's key suits none.
        """
        member = self._members[url]
        member.has_answered = False
        is_refusing = isinstance(error, KeyRefused)
        if (isinstance(error, EndpointUnfit) and not is_refusing) or len(self.clients) == 1:
            return
        was_down = member.breaker.is_open
        if was_down and member.mending is not None:
            return  # texts that still try it change nothing
        member.breaker.failed()
        member.is_refusing = is_refusing
        if not was_down:
            self._on_change(f"{error}. {url} is left out until it answers.")
        member.mending = asyncio.get_running_loop().create_task(self._mend(member))
        member.mending.add_done_callback(_forget)

    def served(self, url: str) -> None:
        """Records that a cloud has served tokens."""
        member = self._members[url]
        if member.mending is not None:
            member.mending.cancel()
            member.mending = None
        member.has_served = True
        member.breaker.succeeded()

    def answered(self, url: str, ready: ReadyAnswer, took_ms: float) -> None:
        """Records what a cloud said of its readiness to somebody else's question."""
        member = self._members[url]
        member.ready, member.looked_at = ready, self._clock()
        member.round_trips.append(took_ms)

    async def look(self, timeout_s: float) -> list[Served]:
        """Looks at all clouds at the same time; what they serve, of those that answer in time."""
        looks = [member.look or self._look(member) for member in self._members.values()]
        done, _ = await asyncio.wait(looks, timeout=timeout_s)
        return [served for look in looks if look in done and (served := look.result()) is not None]

    async def finds_one(self, timeout_s: float) -> bool:
        """Whether any cloud answers now, or has since the last call: a look may take longer than `timeout_s`. A gateway
        that hides the readiness counts: texts show whether it works.
        """
        await self.look(timeout_s)
        found = [url for url, member in self._members.items() if member.has_answered]
        for url in found:
            self._members[url].has_answered = False
        return not all(self.refuses(url) for url in found)

    async def mixed_targets(self) -> str | None:
        """A warning where clouds serve different targets now; waits only a moment. None where none is known to."""
        looked = await self.look(COMPARE_TIMEOUT_S) if len(self.clients) > 1 else []
        known = [each for each in looked if each.target is not None]
        other = next((each for each in known if each.target != known[0].target), None)
        if other is None:
            return None
        return (
            f"{known[0]} and {other} are different targets: a text that one begins cannot go on at the other. Give "
            "--cloud replicas of one target only."
        )

    def states(self) -> list[CloudState]:
        """Each cloud as it is known, in the order of preference."""
        return [_state(member) for member in self._members.values()]

    async def aclose(self) -> None:
        """Ends looks and trials."""
        tasks = [task for member in self._members.values() for task in (member.look, member.mending) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self, member: _Member) -> asyncio.Task[Served | None]:
        member.look = asyncio.get_running_loop().create_task(self._ask(member))
        member.look.add_done_callback(partial(_looked, member))
        return member.look

    async def _ask(self, member: _Member) -> Served | None:
        """Asks a cloud for its readiness, twice at first: the first answer's time has the connection's in it."""
        try:
            took_ms = await self._take_ready(member, 1 if member.round_trips else 2)
        except EndpointLost as error:
            self.failed(member.client.url, error)
            return None
        member.has_answered = True
        if took_ms is None or member.ready is None:
            return None
        member.round_trips.append(took_ms)
        return Served(member.client.url, member.ready.model, member.ready.target)

    async def _take_ready(self, member: _Member, num_times: int = 1) -> float | None:
        """Takes a cloud's readiness: ms of the last answer. None for a gateway: whether it works, texts will show.

        Raises EndpointLost.
        """
        took_ms = None
        try:
            for _ in range(num_times):
                asked_at = self._clock()
                member.ready = await member.client.ready()
                took_ms = (self._clock() - asked_at) * 1e3
        except EndpointLost as error:
            if error.status != 404:
                raise
            return None
        except OutriderError:  # a gateway may refuse what is not below /v1
            return None
        finally:
            member.looked_at = self._clock()
        return took_ms

    async def _mend(self, member: _Member) -> None:
        """Tries a cloud that is left out after each pause, until it answers: never with a user's text."""
        while True:
            await self._sleep(member.breaker.pause_s)
            if not member.breaker.allows():
                continue
            try:
                await self._take_ready(member)
                if member.is_refusing:
                    await member.client.model_facts()  # readiness asks for no key
            except (EndpointLost, RequestError):
                member.breaker.failed()
                continue
            member.mending = None
            member.breaker.passed()
            self._on_change(f"{member.client.url} is back.")
            return

    def _costs(self) -> dict[str, float]:
        """What a text costs at each cloud that is up, ms. One whose figures are unknown counts as the cheapest."""
        up = [member for member in self._members.values() if not member.breaker.is_open]
        steps = [member.ready.step_ms for member in up if member.ready is not None and member.ready.step_ms]
        typical = sorted(steps)[len(steps) // 2] if steps else _STEP_MS
        known = {
            member.client.url: text_ms(min(member.round_trips), member.ready, typical)
            for member in up
            if member.round_trips and member.ready is not None
        }
        least = min(known.values(), default=0.0)
        return {member.client.url: known.get(member.client.url, least) for member in up}


@asynccontextmanager
async def open_fleet(clouds: Sequence[tuple[str, ClientOptions]]) -> AsyncIterator[Fleet]:
    """The clouds at these addresses, each with its own key; closes the clients and the fleet."""
    async with AsyncExitStack() as stack:
        fleet = Fleet([await stack.enter_async_context(VerifierClient(url, each)) for url, each in clouds])
        stack.push_async_callback(fleet.aclose)
        yield fleet


def text_ms(round_trip_ms: float, ready: ReadyAnswer, typical_step_ms: float = _STEP_MS) -> float:
    """Expected time of a text of 128 tokens at a cloud, ms: its steps, round trips, queue and memory.

    Each text before it in the queue ends after 128 steps, `ready.running` of them at the same time. Without free blocks
    texts wait for one another, so the time grows to twice as much.
    """
    step_ms = ready.step_ms or typical_step_ms
    texts_before = ready.queue_depth / max(1, ready.running)
    whole_ms = _TEXT_TOKENS * step_ms * (1.0 + texts_before) + _TRIPS * round_trip_ms
    missing = max(0.0, _SCARCE - ready.free_block_share) / _SCARCE
    return whole_ms * (1.0 + min(1.0, missing))


def _state(member: _Member) -> CloudState:
    ready = member.ready
    is_known = ready is not None or member.has_served or member.breaker.is_open
    return CloudState(
        **(ready.model_dump(include=set(CloudState.model_fields)) if ready is not None else {}),
        url=member.client.url,
        state="down" if member.breaker.is_open else "up" if is_known else "unknown",
        round_trip_ms=round(min(member.round_trips), 1) if member.round_trips else None,
    )


def _looked(member: _Member, look: asyncio.Task[Served | None]) -> None:
    if member.look is look:
        member.look = None
    _forget(look)


def _forget(task: asyncio.Task[object]) -> None:
    """Takes a finished task's exception, which else is reported as never retrieved; a bug still is."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "a look at a cloud failed", "exception": error})
