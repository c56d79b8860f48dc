"""Records how one text is drafted and verified: calls of the draft, messages, passes of the target, the tree.

Bounded: of what nobody takes, the newest stays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from outrider.edge.drafting.ahead import DraftAhead
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.view import SeenGuess
from outrider.edge.link.sender import Posts
from outrider.edge.results import TokenBatch
from outrider.models.client.messages import DraftMessage

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
