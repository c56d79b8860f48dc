"""Goes on at the next endpoint, or at the same one a little later, where a session is cut.

The output is a pure function of prompt, parameters and seed, so a session that is lost is simply opened again with the
prompt and what was committed. It goes on with the target that began the text, or not at all. This module knows when to
try again, not what is being generated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from outrider.edge.link.fleet import Fleet
from outrider.edge.link.origin import Served, TextOrigin
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import (
    EndpointLost,
    EndpointRefused,
    EndpointUnfit,
    EndpointWrong,
    KeyRefused,
    ModelFailed,
    end_error,
)
from outrider.models.client.messages import ByteCounts
from outrider.models.client.pauses import CLEARING_TOKENS, Jitter, later_s, spread_s
from outrider.models.counted import counted
from outrider.models.errors import CloudError, ConfigError, OutriderError, RequestError
from outrider.models.wire.protocol import Commit, SessionEnd, SessionEvent, SessionOpen, SessionRequest

Answer = TypeVar("Answer")
Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to give up: after at least `max_failures` in a row without a token between them.

    Once an endpoint has answered, failures must also have gone on for `max_outage_s`: a server that restarts refuses
    many connections in a few seconds. After it was given up that does not count before an endpoint answers again. A URL
    that never answered is wrong more often than late, except at a loopback address: a server that was started a moment
    ago refuses connections while it loads, so failures must have gone on for `max_loading_s`, and where connections are
    cut, for `max_cut_s`. After each whole round of endpoints comes a pause, which doubles, also from one outage to the
    next where hardly a token has come between them. Pauses vary, so that devices that lost the same server do not come
    back together. An endpoint that asks for a longer one (Retry-After) is not tried before, and others come first; but
    nobody waits for that beyond `max_asked_s` after the outage began, or beyond the time above.
    """

    max_failures: int = 6
    max_outage_s: float = 20.0
    max_loading_s: float = 15.0
    max_cut_s: float = 0.0
    first_pause_s: float = 0.05
    max_pause_s: float = 2.0
    max_asked_s: float = 300.0


class Endpoints:
    """At least one endpoint; the first that works is kept until it fails.

    clock counts seconds, as `sleep` does. jitter: varies pauses. on_trouble: called with a sentence before the first
    new attempt of an outage, and again when every one of several endpoints has failed. fleet: what all texts know of
    these endpoints; gets this text's failures and successes, and says which are down.
    """

    def __init__(
        self,
        clients: Sequence[VerifierClient],
        retry: RetryPolicy | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        on_trouble: Callable[[str], None] = lambda words: None,
        fleet: Fleet | None = None,
        jitter: Jitter = random.random,
    ) -> None:
        if not clients:
            raise ConfigError("no cloud endpoint is given; expected at least one URL")
        self._clients = tuple(clients)
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._clock = clock
        self._on_trouble = on_trouble
        self._fleet = fleet
        self._jitter = jitter
        self._current = 0
        self._not_before: dict[str, float] = {}  # by URL: when it may be tried again
        self._has_answered = fleet is not None and fleet.has_served
        self._is_patient = False
        self._num_doublings = self._num_tokens = 0  # of the pause; tokens since the last failure
        self._failures: list[str] = []
        self._outage_began_at = 0.0

    @property
    def wire(self) -> ByteCounts:
        """Bytes to and from all endpoints so far."""
        return sum((client.wire for client in self._clients), ByteCounts())

    def choose_again(self) -> None:
        """Begins the next text where the fleet would: the preferred endpoint may be back."""
        if self._fleet is not None:
            self._clients, self._current = tuple(self._fleet.ranked()), 0

    async def session_events(
        self,
        next_request: Callable[[str], SessionRequest | None],
        text: TextOrigin | None = None,
        can_ask_again: Callable[[str, RequestError], bool] = lambda url, error: False,
    ) -> AsyncGenerator[tuple[SessionEvent, VerifierClient], None]:
        """Events of a session and, where it is cut, of those that go on with it, until the SessionEnd; each with the
        client that drafts go to.

        next_request: what to open now at the endpoint with this URL, given everything committed so far; None when
        nothing is left to generate. text: given where it is known which target must serve it. can_ask_again: whether
        `next_request` gives another request after this refusal by the endpoint with this URL.
        Raises CloudError when no endpoint is left (TargetMismatch, ProtocolBroken where that is the only reason),
        RequestError and TokenizerMismatch as the client does.
        """
        self._failures.clear()
        text = text or TextOrigin()
        while True:
            client, served = self._choose(text), None
            if (request := next_request(client.url)) is None:
                return
            try:
                await _require_fit(client, text)
                async with client.open_session(request, text.target) as stream, aclosing(stream):
                    async for event in stream:
                        self._has_answered = self._is_patient = True
                        if isinstance(event, SessionOpen):
                            served = Served(client.url, event.model, event.target)
                            text.require_same(served)
                        elif isinstance(event, Commit) and not event.provisional:
                            assert served is not None, "the client checks that `open` comes first"
                            text.took_tokens(served)
                            self._failures.clear()
                            self._report_success(client, len(event.tokens))
                        elif isinstance(event, SessionEnd) and event.reason in ("shutdown", "cancelled", "error"):
                            raise _end_error(client, event)
                        yield event, client
                        if isinstance(event, SessionEnd):
                            return
                raise EndpointLost(f"{client.url}: the stream ended early")
            except EndpointLost as e:
                await self._move_on(e, text)
            except RequestError as e:
                if not can_ask_again(client.url, e):
                    await self._move_on(_of_endpoint(e), text)

    async def call(self, ask: Callable[[VerifierClient], Awaitable[Answer]], text: TextOrigin | None = None) -> Answer:
        """Asks one endpoint after the other until one answers; raises CloudError when none is left.

        text: keeps the calls of one text at one target; `ask` reports to it what it takes.
        """
        self._failures.clear()
        text = text or TextOrigin()
        while True:
            client = self._choose(text)
            try:
                await _require_fit(client, text)
                answer = await ask(client)
            except EndpointLost as e:
                await self._move_on(e, text)
            except RequestError as e:
                await self._move_on(_of_endpoint(e), text)
            else:
                self._has_answered = self._is_patient = True
                self._report_success(client, 1)
                return answer

    def _choose(self, text: TextOrigin) -> VerifierClient:
        """The current endpoint, or the next that is fit for the text. Raises CloudError where none is."""
        if all(client.url in text.unfit for client in self._clients):
            raise _none_fit(list(text.unfit.values()))
        while self._clients[self._current].url in text.unfit:
            self._current = (self._current + 1) % len(self._clients)
        return self._clients[self._current]

    async def _move_on(self, error: EndpointLost, text: TextOrigin) -> None:
        retry, now = self._retry, self._clock()
        if not self._failures:
            self._outage_began_at = now
        self._failures.append(str(error))
        self._num_tokens = 0
        failed = self._clients[self._current].url
        if self._fleet is not None:
            self._fleet.failed(failed, error)
        # One that has worked may do so again: a name that is gone while this device changes networks, a portal's
        # certificate.
        is_final = (
            isinstance(error, EndpointUnfit)
            or (isinstance(error, EndpointWrong) and not self._has_answered)
            or (isinstance(error, ModelFailed) and text.fails_again(failed))
        )
        if is_final:
            text.unfit[failed] = error
        if error.retry_after_s:
            latest = self._outage_began_at + max(retry.max_asked_s, self._max_outage_s(error))
            self._not_before[failed] = min(now + later_s(error.retry_after_s, self._jitter), latest)
        num_fit = sum(client.url not in text.unfit for client in self._clients)
        if num_fit == 0:
            raise _none_fit(list(text.unfit.values()))
        num_failures, outage_s = len(self._failures), now - self._outage_began_at
        if num_failures >= retry.max_failures and outage_s >= self._max_outage_s(error):
            self._is_patient = False
            self._num_doublings = 0
            left = f"{self._question(text)} Gave up" if error.is_absent else "no cloud endpoint is left"
            causes = dict.fromkeys([*self._failures, *map(str, text.unfit.values())])
            raise CloudError(
                f"{left} after {counted(num_failures, 'attempt')} in {outage_s:.1f} s: {'; '.join(causes)}"
            ) from error
        self._current = self._next(text)
        following = self._choose(text).url
        pause_s = self._not_before.get(following, now) - now
        if num_failures % num_fit == 0:
            own_s = min(retry.max_pause_s, retry.first_pause_s * 2**self._num_doublings)
            pause_s = max(pause_s, spread_s(own_s, self._jitter))
            self._num_doublings = min(self._num_doublings + 1, 32)  # a float holds no more than 1023
        if is_final:
            self._on_trouble(f"{error}. Trying {following}.")
        elif num_failures == 1 and num_fit > 1:
            what = f"No verifier answers at {failed}." if error.is_absent else f"{error}."
            self._on_trouble(f"{what} Trying {following}.")
        elif num_failures == num_fit:
            again = f"Trying again{f' in {pause_s:.0f} s' if pause_s >= 1.0 else ''}."
            self._on_trouble(f"{self._question(text) if error.is_absent else f'{error}.'} {again}")
        if pause_s > 0.0:
            await self._sleep(pause_s)

    def _next(self, text: TextOrigin) -> int:
        """The endpoint after the current one, of those that may be tried soonest; one that is down only where all that
        are fit are.
        """
        num, now = len(self._clients), self._clock()
        after = [(self._current + steps) % num for steps in range(1, num + 1)]
        fit = [index for index in after if self._clients[index].url not in text.unfit]
        if self._fleet is not None:
            fleet = self._fleet
            fit = [index for index in fit if not fleet.is_down(self._clients[index].url)] or fit
        return min(fit or after, key=lambda index: max(now, self._not_before.get(self._clients[index].url, now)))

    def _report_success(self, client: VerifierClient, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._num_tokens >= CLEARING_TOKENS:
            self._num_doublings = 0
        if self._fleet is not None:
            self._fleet.served(client.url)

    def _max_outage_s(self, error: EndpointLost) -> float:
        """Failures that ended with `error` are not given up before they have gone on for this long."""
        if self._is_patient:
            return self._retry.max_outage_s
        is_loading = error.is_absent and any(client.is_local for client in self._clients)
        if is_loading:
            return self._retry.max_loading_s
        return self._retry.max_cut_s if error.status is None and not error.is_absent else 0.0

    def _question(self, text: TextOrigin) -> str:
        """What to ask where nothing answers."""
        urls = [client.url for client in self._clients if client.url not in text.unfit]
        return (
            f"No verifier answers at {' or '.join(urls)}. Is `outrider-cloud serve` running "
            f"{'there' if len(urls) == 1 else 'at one of them'}?"
        )


async def _require_fit(client: VerifierClient, text: TextOrigin) -> None:
    """Raises TargetMismatch where a text that has begun would go to another target: before that target works for it."""
    if not text.needs_probe(client.url):
        return
    try:
        model, target = await client.served()
    except EndpointLost as e:
        if e.status != 404:
            raise
        return  # it shows no readiness here; what it answers shows its target
    except RequestError:
        return  # a gateway may refuse what is not below /v1
    text.require_same(Served(client.url, model, target))


def _of_endpoint(refusal: RequestError) -> EndpointRefused:
    """The refusal as a failure of its endpoint, where another may take the text, or the key; raises any other."""
    if refusal.code == "upstream_refused" or refusal.param == "steady":  # the latter of a cascade
        return EndpointRefused(refusal)
    if refusal.status not in (401, 403) or refusal.code == "tolerance_not_allowed":
        raise refusal
    return KeyRefused(refusal)


def _none_fit(errors: list[EndpointLost]) -> OutriderError:
    if isinstance(errors[-1], EndpointRefused) and all(isinstance(each, EndpointRefused) for each in errors):
        return errors[-1].refusal
    if len(errors) == 1:
        return errors[0]
    return CloudError(f"no cloud endpoint can go on with this text: {'; '.join(map(str, errors))}")


def _end_error(client: VerifierClient, end: SessionEnd) -> Exception:
    if end.error is not None and end.reason == "error":
        return end_error(client.url, end.error)
    return EndpointLost(f"{client.url}: the session was ended by the server ({end.reason})")
