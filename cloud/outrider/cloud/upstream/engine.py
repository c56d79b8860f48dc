"""Serves a cascade as one engine: texts are the target's, which another verifier runs, drafted by the engine here.

The API sees a `ServingEngine`, so every route works, and streams what is confirmed. Texts live on a loop of their own
thread: an upstream that is slow or dead delays nobody else.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from outrider.cloud.engine.request_checks import check_base, check_draft, check_request, open_one
from outrider.cloud.seam import EngineStats, GenerateRequest, SequenceEndReason, ServingEngine, Sink
from outrider.cloud.upstream.cascade_text import CascadedText
from outrider.cloud.upstream.upstream import CascadeCounts, Upstream, UpstreamClient, UpstreamRetry
from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import BuildElsewhere
from outrider.models.runtimes.base import ModelLimits
from outrider.models.wire.protocol import ModelFacts
from outrider.models.wire.tree_draft import TreeDraft

MAX_TEXTS: Final = 2048
"""Open at a time; the slots of keys and the mid-size verifier's own queue are shorter."""
_JOIN_S: Final = 10.0


class CascadeEngine(ServingEngine):
    """An engine whose texts another verifier confirms. Any thread may call any method; sinks run on its own thread.

    mid: drafts for the target; started and stopped with this one. client: used and closed on that thread. facts: of
    the upstream verifier.
    """

    def __init__(
        self,
        mid: ServingEngine,
        client: UpstreamClient,
        facts: ModelFacts,
        retry: UpstreamRetry | None = None,
    ) -> None:
        self._mid = mid
        self.counts = CascadeCounts()
        self._upstream = Upstream(client, facts, secrets.token_bytes(32), retry or UpstreamRetry(), self.counts)
        self._limits = ModelLimits(facts.vocab_size, facts.max_positions)
        self._ids = itertools.count(1)
        self._texts: dict[int, CascadedText] = {}
        self._gate = threading.Lock()
        self._is_draining = self._has_stopped = False
        self._is_idle = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="outrider-cascade", daemon=True)

    @property
    def limits(self) -> ModelLimits:
        """The target's."""
        return self._limits

    @property
    def grammar_builder(self) -> BuildElsewhere | None:
        """The mid-size verifier's, which makes masks for drafts."""
        return self._mid.grammar_builder

    def calibrate(self) -> None:
        """As the mid-size verifier's."""
        self._mid.calibrate()

    def start(self) -> None:
        """Starts the mid-size verifier and the loop. Call it once."""
        self._mid.start()
        self._thread.start()

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """As `ServingEngine.submit`. Prefixes are not parked: `prefix_not_held` is raised for each."""
        if request.prefix_hash is not None:
            raise RequestError(
                "prefix_not_held", "this prefix is not held here; send its tokens in place of the hash", status=409
            )
        rule = request.pick.terms.rule
        if rule.needs_evidence:
            raise RequestError("unsupported_rule", f"a cascade does not verify by the rule {rule.value}; use coupled")
        check_request(request, 0, self._limits)
        with self._gate:
            if self._is_draining:
                raise RequestError("shutting_down", "the server is shutting down; use another server", status=503)
            if len(self._texts) >= MAX_TEXTS:
                raise RequestError(
                    "overloaded", f"{len(self._texts)} texts are open; try again later", status=503, retry_after_s=1
                )
            number = next(self._ids)
            text = CascadedText(request, sink, self._mid, self._upstream, self._post, lambda: self._ended(number))
            text.begin()
            self._texts[number] = text
        self._post(text.start)
        return number

    def draft(self, sequence_id: int, base: int, paths: Sequence[Sequence[int]]) -> None:
        """As `ServingEngine.draft`; `base` counts confirmed tokens."""
        text = open_one(self._texts, sequence_id)
        check_draft(base, paths, len(text.confirmed), self._limits)
        self._post(lambda: text.mid.draft(base, paths))

    def draft_tree(self, sequence_id: int, message: TreeDraft) -> None:
        """As `ServingEngine.draft_tree`; its base counts confirmed tokens."""
        text = open_one(self._texts, sequence_id)
        check_base(message.base, len(text.confirmed))
        self._post(lambda: text.mid.draft_tree(message))

    def cancel(self, sequence_id: int, reason: SequenceEndReason = "cancelled") -> None:
        """Ends a text early; does nothing if it is over."""
        if (text := self._texts.get(sequence_id)) is not None:
            self._post(partial(text.end, reason))

    def stats(self) -> EngineStats:
        """The mid-size verifier's."""
        return self._mid.stats()

    def on_death(self, act: Callable[[str], None]) -> None:
        """As the mid-size verifier's."""
        self._mid.on_death(act)

    def stop(self, *, drain_s: float = 0.0) -> None:
        """As `ServingEngine.stop`; may be called twice."""
        with self._gate:
            self._is_draining = True
        deadline = time.monotonic() + drain_s
        while self._texts and time.monotonic() < deadline:
            self._is_idle.wait(timeout=max(0.0, deadline - time.monotonic()))
            self._is_idle.clear()
        with self._gate:
            is_first, self._has_stopped = not self._has_stopped, True
        if self._thread.is_alive():
            if is_first:  # a second time would stop the loop in its last work
                self._post(self._end_all)
            self._thread.join(_JOIN_S)
        self._mid.stop()

    # -- the loop's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._close())
            self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._upstream.client.aclose()
        await self._loop.shutdown_asyncgens()

    def _end_all(self) -> None:
        for text in list(self._texts.values()):
            text.end("shutdown")
        self._loop.stop()

    def _ended(self, number: int) -> None:
        self._texts.pop(number, None)
        if not self._texts:
            self._is_idle.set()

    # -- any thread ----------------------------------------------------------------------------------------------------

    def _post(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: every text has ended
            self._loop.call_soon_threadsafe(act)
