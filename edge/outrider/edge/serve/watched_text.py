"""Generates one text for the page and shows how: tokens with their origin, the tree of guesses, times."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from outrider.edge.drafting.ahead import DraftAhead
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.view import SeenGuess
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.sender import Posts
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Source, TokenBatch
from outrider.edge.serve.drafted_texts import LocalTexts
from outrider.edge.serve.lent_drafts import Loan
from outrider.edge.serve.page_events import (
    CommitEvent,
    DroppedEvent,
    EndEvent,
    ErrorEvent,
    PassagesEvent,
    ShownGuess,
    ShownToken,
    StateEvent,
    finite,
    origin_of,
)
from outrider.edge.serve.state import LocalCore
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import RequestError
from outrider.models.http import sse
from outrider.models.http.errors import error_body

MAX_GUESSES: Final = 32
"""Of the tree, shown at a time."""
MAX_SPANS: Final = 256
"""Of each kind, kept until they are taken."""

Span = tuple[float, float, int]
"""When something began and ended, ms since the text's begin, and how many tokens it was about."""


def _spans() -> deque[Span]:
    return deque(maxlen=MAX_SPANS)


@dataclass(slots=True)
class TextWatch:
    """Of one text. `drafted` may be called from another thread, the rest belongs to the event loop."""

    estimates: Estimates = field(default_factory=Estimates)
    clock: Callable[[], float] = time.perf_counter
    drafts: deque[Span] = field(default_factory=_spans)
    posts: deque[Span] = field(default_factory=_spans)
    passes: deque[Span] = field(default_factory=_spans)
    _ahead: DraftAhead | None = None
    _began_s: float = field(init=False)
    _passed_ms: float = 0.0  # the end of the last pass

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def began(self, ahead: DraftAhead) -> None:
        """The text begins."""
        self._ahead = ahead

    def drafted(self, began_s: float, ended_s: float, num_nodes: int) -> None:
        """A call of the drafter has ended."""
        self.drafts.append((self._ms(began_s), self._ms(ended_s), num_nodes))

    def committed(self, batch: TokenBatch) -> None:
        """A commit has arrived.

        When its pass ran is not reported: it is estimated from the step's time, the round trip and the arrival.
        """
        ended_ms = self.now_ms - self.estimates.round_trip_ms / 2
        took_ms = self.estimates.step_ms + self.estimates.extra_ms * batch.num_proposed
        began_ms = max(self._passed_ms, ended_ms - took_ms)
        self._passed_ms = max(began_ms, ended_ms)
        self.passes.append((began_ms, self._passed_ms, len(batch.tokens)))

    def around(self, posts: Posts) -> Posts:
        """The same destination, watched."""
        return _WatchedPosts(posts, self)

    @property
    def now_ms(self) -> float:
        """Since the text's begin."""
        return self._ms(self.clock())

    @property
    def depth(self) -> int:
        """Tokens that the plan drafts ahead."""
        return self._ahead.plan.depth if self._ahead is not None else 0

    @property
    def num_ahead(self) -> int:
        """Guesses in the tree."""
        return self._ahead.num_ahead if self._ahead is not None else 0

    def guesses(self) -> list[SeenGuess]:
        """The likeliest guesses of what follows."""
        return self._ahead.look(MAX_GUESSES) if self._ahead is not None else []

    def _ms(self, at_s: float) -> float:
        return (at_s - self._began_s) * 1e3


class _WatchedPosts:
    def __init__(self, posts: Posts, watch: TextWatch) -> None:
        self._posts = posts
        self._watch = watch

    async def post_drafts(self, session: str, message: DraftMessage) -> None:
        began_ms = self._watch.now_ms
        await self._posts.post_drafts(session, message)
        self._watch.posts.append((began_ms, self._watch.now_ms, len(message.body)))


def take(spans: deque[Span]) -> list[Span]:
    """Empties it; its thread may add meanwhile."""
    taken: list[Span] = []
    while spans:
        taken.append(spans.popleft())
    return taken


STATE_S: Final = 0.1
"""Between two states, at least; the tree changes with each commit."""
TICK_S: Final = 0.2
"""Between two states, where nothing is committed."""


class WatchedText(LocalTexts):
    """One text. is_drafted: false lets the cloud write alone. delay_s: added to each round trip of this text.

    dropped: what was left out of its conversation. passages: of the server's documents, in its prompt.
    """

    def __init__(self, core: LocalCore, owner: bytes, num_choices: int) -> None:
        super().__init__(core, owner, num_choices)
        self.is_drafted = True
        self.delay_s = 0.0
        self.dropped: DroppedEvent | None = None
        self.passages: PassagesEvent | None = None
        self.watch = TextWatch()
        self._ticks: asyncio.Task[None] | None = None

    def _lend(self, request: GenerationRequest) -> AbstractContextManager[Loan]:
        return self._lend_own(request) if self.is_drafted else nullcontext(Loan(None, self.watch.estimates))

    @contextmanager
    def _lend_own(self, request: GenerationRequest) -> Iterator[Loan]:
        with self.core.drafts.lend(self.owner, request.prompt) as loan:
            if self.delay_s:  # other texts must not learn these times
                loan.estimates = loan.estimates.for_other_link()
            self.watch.estimates = loan.estimates
            yield loan

    def _endpoints(self) -> Endpoints:
        # The page shows what is drafted here and compares modes: no cloud may draft from the text of another try.
        return self.core.upstream.endpoints(self.delay_s, no_store=True)

    def _watch(self, agent: StreamAgent) -> None:
        if not self.is_drafted:
            agent.estimates = self.watch.estimates
        wrap = agent.wrap_posts
        agent.wrap_posts = lambda client: self.watch.around(wrap(client))
        agent.on_begin, agent.on_call = self.watch.began, self.watch.drafted

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The event stream. Ends with the text, or when the client has left."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        self._ticks = loop.create_task(self._tick())
        try:
            if self.dropped is not None:
                yield sse.encode(self.dropped)
            if self.passages is not None:
                yield sse.encode(self.passages)
            while not self.choices[0].is_over:
                arrived = await self.reader.take()
                if not arrived and self.reader.is_closed:
                    return
                parts: list[bytes] = []
                for _, event in arrived:
                    if isinstance(event, RequestError):
                        yield b"".join([*parts, sse.encode(ErrorEvent(error=error_body(event)))])
                        return
                    parts.append(sse.encode(self._commit(event) if isinstance(event, TokenBatch) else self._end(event)))
                if loop.time() >= due_s or self.choices[0].is_over:
                    due_s = loop.time() + STATE_S
                    parts.insert(-1 if self.choices[0].is_over else len(parts), sse.encode(self._state()))
                if parts:
                    yield b"".join(parts)
        finally:
            self._end_ticks()

    def close(self) -> None:
        """As `LocalTexts.close`."""
        self._end_ticks()
        LocalTexts.close(self)

    def _end_ticks(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None  # a cancelled one has the traceback of where it was, and that has this

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.reader.poke()

    def _commit(self, batch: TokenBatch) -> CommitEvent:
        self.watch.committed(batch)
        push = self.choices[0].assembler.push
        ranks = [*batch.ranks, *[None] * (len(batch.tokens) - len(batch.ranks))]
        tokens = [
            ShownToken(
                id=token,
                text=push([token]),
                origin="unverified" if batch.is_unverified else origin_of(index, batch.num_accepted, rank),
                rank=rank,
            )
            for index, (token, rank) in enumerate(zip(batch.tokens, ranks, strict=True))
        ]
        return CommitEvent(
            at_ms=self._now_ms(),
            tokens=tokens,
            accepted=batch.num_accepted,
            proposed=batch.num_proposed,
            tested=batch.num_tested,
        )

    def _state(self) -> StateEvent:
        watch, estimates, decode = self.watch, self.watch.estimates, self.core.tokenizer.decode
        tree = [
            ShownGuess(
                id=guess.token,
                text=decode([guess.token], skip_special_tokens=False),
                parent=guess.parent,
                chance=round(guess.chance, 3),
                reach=round(guess.reach, 3),
                rank=guess.rank,
                is_sent=guess.is_sent,
            )
            for guess in watch.guesses()
        ]
        return StateEvent(
            at_ms=self._now_ms(),
            tree=tree,
            num_ahead=watch.num_ahead,
            depth=watch.depth,
            drafts=_short(take(watch.drafts)),
            posts=_short(take(watch.posts)),
            passes=_short(take(watch.passes)),
            round_trip_ms=finite(estimates.round_trip_ms) or None,
            step_ms=finite(estimates.step_ms),
            draft_ms=finite(estimates.draft_ms) if self.is_drafted else None,
        )

    def _end(self, result: GenerationResult) -> EndEvent:
        choice = self.choices[0]
        choice.is_over = True
        num_unverified = result.sources.count(Source.UNVERIFIED)
        shows_details = self.core.settings.shows_details
        return EndEvent(
            at_ms=self._now_ms(),
            text=choice.assembler.finish(),
            finish_reason=result.finish_reason,
            num_tokens=len(result.tokens),
            num_prompt=len(choice.request.prompt),
            cached_prompt_tokens=result.cached_prompt_tokens,
            passes=result.num_passes,
            accepted=result.num_accepted,
            tested=result.num_tested,
            ttft_ms=finite(result.ttft_ms),
            tokens_per_s=finite(result.tokens_per_s),
            draft_error=result.draft_error if shows_details else None,
            id=self.answer_id if num_unverified else None,
            num_unverified=num_unverified,
            eased_by=self.core.power.reason if self.is_drafted else None,
            failed_drafts=self.core.drafts.failed if shows_details else [],
        )

    def _now_ms(self) -> float:
        return round(self.watch.now_ms, 1)


def _short(spans: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    return [(round(began, 1), round(ended, 1), count) for began, ended, count in spans]
