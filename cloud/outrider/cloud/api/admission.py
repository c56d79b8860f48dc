"""Admits work to the engine: the key that still counts, its tokens per minute, priority and deadline.

Follows each sequence to its end: charges the tokens that it takes, fills the audit entry of its request, and ends it
where its key is removed meanwhile. The engine never learns of keys. Admission delays or refuses; it changes no token.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.cloud.api.audit import AuditEntry
from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest, ServingEngine, Sink
from outrider.models.errors import RequestError
from outrider.models.http.keys import KeyRing, key_is_removed
from outrider.models.http.limits import TokenBudget

NO_KEY_PRIORITY: Final = 0
"""The highest priority of a request without a key."""
SEEK_S: Final = 2.0
"""For a look at the disk."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for beside its text.

    priority: None for the key's. deadline_ms: from the request's arrival. arrived_s: by the monotonic clock.
    entry: of the audit log, where there is one. is_steady: whether its answer is sent at a fixed pace.
    """

    arrived_s: float
    priority: int | None = None
    deadline_ms: float | None = None
    entry: AuditEntry | None = None
    is_steady: bool = False


class Admission:
    """Submits sequences for the routes. `submit` runs on the event loop, `revoke` on any thread."""

    def __init__(
        self,
        engine: ServingEngine,
        keys: KeyRing,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        needs_steady: bool = False,
    ) -> None:
        """tokens_per_minute: of an owner whose key has no limit of its own; None is no limit. needs_steady: whether
        only steady sessions are admitted.
        """
        self._needs_steady = needs_steady
        self._engine = engine
        self._keys = keys
        self._tokens_per_minute = tokens_per_minute
        self._clock = clock
        self.budget = TokenBudget(clock)
        self._lock = threading.Lock()
        self._open: dict[int, _Followed] = {}

    def charge(self, owner: bytes, num_tokens: int, *, may_owe: bool = False) -> None:
        """Takes the tokens of prompts, or gives back where they are negative. may_owe: they need not be there.

        Raises RequestError `tokens_exhausted` where they are not.
        """
        per_minute = self._per_minute(owner)
        if per_minute is not None and may_owe:
            self.budget.take(owner, num_tokens, per_minute)
        elif per_minute is not None:
            self.budget.admit(owner, num_tokens, per_minute)

    def _per_minute(self, owner: bytes) -> int | None:
        key = self._keys.of_owner(owner)
        own = None if key is None else key.tokens_per_minute
        return self._tokens_per_minute if own is None else own

    def submit(self, request: GenerateRequest, sink: Sink, asked: Asked, *, is_charged: bool = False) -> int:
        """As the engine's `submit`, for a request that asks for this. is_charged: its prompt is the caller's to charge.

        Raises RequestError as the engine does; also `unauthorized`, `tokens_exhausted`, `deadline_exceeded`,
        `steady_required`.
        """
        if self._needs_steady and not asked.is_steady:
            raise RequestError(
                "steady_required",
                "this server sends texts at a fixed pace only, so that their sizes and times show nothing; open a "
                "session with steady: true (`outrider run --steady`). OpenAI's and /v1/verify's answers have no pace",
            )
        owner, key = request.asker.owner, self._keys.of_owner(request.asker.owner)
        if not self._keys.may_generate(owner):
            raise key_is_removed()
        highest = NO_KEY_PRIORITY if key is None else key.priority
        priority = highest if asked.priority is None else min(highest, asked.priority)
        asker = replace(request.asker, priority=priority, deadline_ms=self._left_ms(asked))
        request = replace(request, asker=asker)
        per_minute = self._per_minute(owner)
        if key is None and per_minute is None and asked.entry is None:
            return self._engine.submit(request, sink)
        num_prompt = len(request.prompt)
        if not is_charged:
            self.charge(owner, num_prompt)
        if asked.entry is not None:
            asked.entry.num_sequences += 1
            asked.entry.num_prompt += num_prompt
        followed = _Followed(self, sink, owner, num_prompt, per_minute, asked.entry)
        try:
            number = followed.number = self._engine.submit(request, followed)
        except BaseException:
            if not is_charged:
                self.charge(owner, -num_prompt, may_owe=True)
            if asked.entry is not None:
                asked.entry.num_sequences -= 1
                asked.entry.num_prompt -= num_prompt
            raise
        with self._lock:
            if not followed.is_over:
                self._open[number] = followed
        if not self._keys.may_generate(owner):  # removed a moment ago
            self.revoke([owner])
        return number

    async def sought(self, request: GenerateRequest) -> GenerateRequest:
        """The request with what is stored of the prefix that it continues. Waits for a slow disk, for a short time."""
        if request.prefix_hash is None:
            return request
        found: Future[Any] = Future()
        found.set_running_or_notify_cancel()  # so that one who no longer waits does not cancel it
        if not self._engine.seek(request.asker.owner, request.asker.name_of(request.prefix_hash), found.set_result):
            return request
        try:
            return replace(request, stored=await asyncio.wait_for(asyncio.wrap_future(found), SEEK_S))
        except TimeoutError:
            return request  # the engine answers `prefix_not_held`, and the client sends the tokens

    def _left_ms(self, asked: Asked) -> float | None:
        """What is left of the deadline. Raises RequestError 504 where nothing is."""
        if asked.deadline_ms is None:
            return None
        left_ms = asked.deadline_ms - (self._clock() - asked.arrived_s) * 1e3
        if left_ms <= 0.0:
            raise RequestError(
                "deadline_exceeded",
                "the request's deadline_ms passed before its text began; allow more time",
                status=504,
            )
        return left_ms

    def revoke(self, owners: Collection[bytes]) -> None:
        """Ends the sequences of these owners with the error `unauthorized`."""
        with self._lock:
            theirs = [(number, each) for number, each in self._open.items() if each.owner in owners]
        for number, followed in theirs:
            followed.is_revoked = True
            self._engine.cancel(number)

    def forget(self, number: int) -> None:
        """A sequence is over."""
        with self._lock:
            self._open.pop(number, None)


@dataclass(slots=True, eq=False)
class _Followed:
    """A sink around another: of one sequence that is charged, audited, or ended with its key.

    number: None until the engine has taken the sequence.
    """

    _admission: Admission
    _sink: Sink
    owner: bytes
    _num_charged: int
    _per_minute: int | None
    _entry: AuditEntry | None
    number: int | None = None
    is_over: bool = False
    is_revoked: bool = False

    def __call__(self, event: Event) -> None:
        """On the engine's thread."""
        if isinstance(event, CommitEvent):
            if self._per_minute is not None:
                self._admission.budget.take(self.owner, len(event.tokens), self._per_minute)
            if self._entry is not None:
                self._entry.num_generated += len(event.tokens)
                self._entry.num_accepted += event.accepted
        elif isinstance(event, EndEvent):
            event = self._end(event)
        self._sink(event)

    def _end(self, event: EndEvent) -> EndEvent:
        self.is_over = True
        if self.number is not None:
            self._admission.forget(self.number)
        if self.is_revoked and event.reason == "cancelled":
            event = replace(event, reason="error", error=key_is_removed())
        if self._per_minute is not None:
            # A held prefix was not charged: what of it was not cached has been computed again.
            num_held = event.usage.prompt_tokens - self._num_charged
            self._admission.budget.take(self.owner, num_held - event.usage.cached_prompt_tokens, self._per_minute)
        if self._entry is not None:
            self._entry.ends[event.reason if event.error is None else event.error.code] += 1
        return event
