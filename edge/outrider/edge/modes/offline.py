"""Goes on without a cloud: the draft model writes alone, its tokens are marked, and a cloud checks them later.

Only with `--offline-ok`. The target's noise is shared, so the draft's own pick is its best guess of the target's. Once
a cloud answers, the target generates from the last verified token: local tokens that equal its own are confirmed, the
first one that differs and all after it are replaced. The verified text is that of a run that never lost the cloud.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from outrider.edge.drafting.calibration import LOOKUP_RANK, QUOTE_RANK
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.link.origin import TextOrigin
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, OnTokens, Source, TokenBatch, ends_of
from outrider.models.client.errors import EndpointUnfit
from outrider.models.errors import CloudError
from outrider.models.runtimes.base import num_shared

Found = TypeVar("Found")

FIRST_LOOK_S: Final = 1.0
MOST_LOOK_S: Final = 10.0
"""Pauses between looks for a cloud, while text is written locally."""


@dataclass(slots=True)
class OfflineText:
    """A text that the cloud and, without it, the draft wrote.

    verified: the target's tokens. local: the draft's, which follow them, not verified. num_local: tokens that the draft
    wrote alone; num_confirmed, num_replaced: those of them that the target confirmed, and replaced. reason: why the
    text ended. error: what the last cloud failed with. result: of the last part that a cloud wrote.
    """

    verified: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    num_local: int = 0
    num_confirmed: int = 0
    num_replaced: int = 0
    reason: str = "length"
    error: str | None = None
    result: GenerationResult | None = None

    @property
    def tokens(self) -> list[int]:
        """The whole text."""
        return [*self.verified, *self.local]

    def as_json(self) -> dict[str, object]:
        """What the draft wrote alone, as plain data."""
        return {
            "verified": not self.local,
            "num_unverified": len(self.local),
            "num_local": self.num_local,
            "num_confirmed": self.num_confirmed,
            "num_replaced": self.num_replaced,
            "error": self.error,
        }


@dataclass(slots=True)
class OfflineWriter:
    """Generates one text, locally where no cloud answers.

    agent, drafter: as in stream mode. stop_ids: end a local text; the target's own where they are known.
    find_cloud: whether a cloud answers now; None: the text is not verified here. on_confirmed: called with the
    number of local tokens that the target has confirmed just now. on_replaced: called with the verified tokens before
    tokens come that replace local ones. max_positions: longest local text, prompt included. text: as far as it is
    written.
    """

    agent: StreamAgent
    drafter: Drafter
    stop_ids: frozenset[int]
    find_cloud: Callable[[], Awaitable[bool]] | None = None
    on_confirmed: Callable[[int], None] = lambda num: None
    on_replaced: Callable[[Sequence[int]], None] = lambda tokens: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    max_positions: int | None = None
    text: OfflineText = field(default_factory=OfflineText)

    async def generate(
        self, request: GenerationRequest, on_tokens: OnTokens, origin: TextOrigin | None = None, *, is_up: bool = True
    ) -> OfflineText:
        """Generates one text. is_up: False begins locally. Raises as `StreamAgent.generate`, but not for clouds that
        are away; CloudError where the draft cannot write either.
        """
        text, origin = self.text, origin or TextOrigin()
        started = time.perf_counter()
        num_failed = 0  # parts in a row that clouds failed to write: one may answer, and refuse every text
        was_whole = False
        while True:
            if is_up:
                num_verified = len(text.verified)
                if await self._verify(text, request, on_tokens, origin):
                    return text
                num_failed = 1 if len(text.verified) > num_verified else num_failed + 1
            is_over, is_up = await self._write(text, request, on_tokens, started, num_failed)
            if is_over:  # one attempt more, if a cloud answers
                is_up = not was_whole and (is_up or (self.find_cloud is not None and await self.find_cloud()))
                was_whole = True
                if not is_up:
                    return text

    async def _verify(
        self, text: OfflineText, request: GenerationRequest, on_tokens: OnTokens, origin: TextOrigin
    ) -> bool:
        """Lets the target write from the last verified token; false where no cloud is left."""

        def take(batch: TokenBatch) -> None:
            tokens = batch.tokens
            same = num_shared(tokens, text.local)
            if same:
                text.num_confirmed += same
                text.verified += tokens[:same]
                del text.local[:same]
                self.on_confirmed(same)
            if same == len(tokens):
                return  # shown already
            self._replace(text)
            text.verified += tokens[same:]
            on_tokens(_without_first(batch, same))

        try:
            text.result = await self.agent.generate(request.after(text.verified), take, origin)
        except EndpointUnfit:
            raise
        except CloudError as error:
            text.error = str(error)
            origin.forget_addresses()
            return False
        self._replace(text)  # the target's text ends before them
        text.reason = text.result.finish_reason
        return True

    def _replace(self, text: OfflineText) -> None:
        if text.local:
            text.num_replaced += len(text.local)
            text.local.clear()
            self.on_replaced(text.verified)

    async def _write(
        self, text: OfflineText, request: GenerationRequest, on_tokens: OnTokens, started: float, num_failed: int
    ) -> tuple[bool, bool]:
        """Writes locally until the text is over or a cloud is back: whether it is over, whether one is back."""
        scheduler = self.agent.scheduler
        scheduler.enter()  # its thread stays, and only it touches the draft
        watch = asyncio.create_task(self._watch(num_failed)) if self.find_cloud is not None else None
        try:
            await self._in_thread(partial(self._begin, text, request))
            while await self._in_thread(self._read_on):  # a piece at a time: other texts draft between them
                pass
            while (reason := self._over(text, request)) is None:
                if watch is not None and watch.done():
                    return False, True
                token = await self._in_thread(self._next)
                if token is None:
                    if not text.local and not text.verified:
                        raise CloudError(f"{text.error or 'no cloud answers'}; the draft cannot write alone either")
                    text.reason = "context"
                    return True, False
                await self._in_thread(partial(self.drafter.extend, [token]))
                text.local.append(token)
                text.num_local += 1
                on_tokens(TokenBatch((token,), 0, time.perf_counter() - started, is_unverified=True))
            text.reason = reason
            return True, watch is not None and watch.done()
        finally:
            scheduler.leave()
            if watch is not None:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch

    async def _in_thread(self, call: Callable[[], Found]) -> Found:
        """What `call` returns in the drafting thread."""
        done = Future[Found]()

        def errand() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        self.agent.scheduler.do(errand)
        return await asyncio.wrap_future(done)

    def _begin(self, text: OfflineText, request: GenerationRequest) -> None:
        known = replace(request, end_ids=self.stop_ids, num_generated=request.num_generated + len(text.tokens))
        self.drafter.begin([*request.prompt, *text.tokens], request.params, known.plan)

    def _read_on(self) -> bool:
        """Reads a piece of the text; whether there is more."""
        if self.drafter.is_behind:
            self.drafter.read_on()
        return self.drafter.is_behind

    def _next(self) -> int | None:
        """The draft's own pick; None where no model is left, or its context is full."""
        (guesses,) = self.drafter.guess([[]], 1)
        if not guesses or guesses[0].rank in (LOOKUP_RANK, QUOTE_RANK):
            return None
        return guesses[0].token

    def _over(self, text: OfflineText, request: GenerationRequest) -> str | None:
        tokens = text.tokens
        if text.local and tokens[-1] in ends_of(request.stop_ids, self.stop_ids, request.ignore_eos):
            return "stop"
        if len(tokens) >= request.max_tokens:
            return "length"
        if tokens and request.left_ms <= 0.0:
            return "deadline"
        is_full = self.max_positions is not None and len(request.prompt) + len(tokens) >= self.max_positions
        return "context" if is_full else None

    async def _watch(self, num_failed: int) -> None:
        """Returns once a cloud answers. Looks at once after the first failure, and later after each one more."""
        assert self.find_cloud is not None
        pause_s = min(MOST_LOOK_S, FIRST_LOOK_S * 2.0 ** max(0, min(num_failed, 8) - 2))
        if num_failed > 1:
            await self.sleep(pause_s)
        while not await self.find_cloud():
            await self.sleep(pause_s)
            pause_s = min(MOST_LOOK_S, 2.0 * pause_s)


def _without_first(batch: TokenBatch, num: int) -> TokenBatch:
    """The batch without its first tokens, which are shown already, and without what is said of each of these."""
    return replace(
        batch,
        tokens=batch.tokens[num:],
        num_accepted=max(0, batch.num_accepted - num),
        ranks=batch.ranks[num:],
        alternatives=frozenset(index - num for index in batch.alternatives if index >= num),
        logprobs=batch.logprobs[num:],
    )


def whole_result(text: OfflineText) -> GenerationResult:
    """The text as a result; its numbers are those of the last part that a cloud wrote."""
    last = text.result or GenerationResult(Mode.STREAM, (), (), (), "", 0, 0, 0, 0)
    tokens = tuple(text.tokens)
    sources = [Source.TARGET] * (len(text.verified) - len(last.sources))
    sources += [*last.sources, *[Source.UNVERIFIED] * len(text.local)]
    arrival_s = last.arrival_s
    if text.result is not None:
        first = arrival_s[0] if arrival_s else 0.0
        arrival_s = (*[first] * (len(tokens) - len(arrival_s)), *arrival_s)
    return replace(last, tokens=tokens, sources=tuple(sources), arrival_s=arrival_s, finish_reason=text.reason)
