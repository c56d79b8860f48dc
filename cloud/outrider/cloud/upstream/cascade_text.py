"""Generates one text in a cascade: a session upstream, whose commits are the text, and a run of the mid-size verifier.

What that run commits is posted upstream as drafts, and goes to the client as provisional where it asks. Where the
session upstream is lost, another one goes on with the prompt and what is confirmed. On the loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import takewhile
from typing import Final

from outrider.cloud.engine.request_checks import deadline_exceeded, internal_error
from outrider.cloud.seam import (
    CommitEvent,
    EndEvent,
    GenerateRequest,
    ProvisionalEvent,
    SequenceEndReason,
    SequenceUsage,
    ServingEngine,
    Sink,
)
from outrider.cloud.upstream.mid import MidRun
from outrider.cloud.upstream.upstream import Upstream, wire_item, wire_request
from outrider.models.client.errors import EndpointLost, EndpointUnfit, ModelFailed, TargetMismatch, end_error
from outrider.models.client.messages import DraftMessage
from outrider.models.client.pauses import CLEARING_TOKENS, later_s, spread_s
from outrider.models.errors import OutriderError, RequestError, TokenizerMismatch
from outrider.models.faults import log_fault
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.wire.protocol import (
    MAX_PATH_TOKENS,
    Commit,
    DraftRequest,
    SessionEnd,
    SessionOpen,
)
from outrider.models.wire.verify import VerifyRequest

_log = logging.getLogger("outrider.cloud")

MAX_POSTS: Final = 8
"""Draft messages of a text in flight; what comes meanwhile is in the next one."""


class CascadedText:
    """One text. `begin` it on any thread, then `start` it on the loop; `sink` gets its events there.

    confirmed: its tokens so far; append-only: other threads read it. mid: takes the device's drafts.
    """

    def __init__(
        self,
        request: GenerateRequest,
        sink: Sink,
        mid: ServingEngine,
        upstream: Upstream,
        post: Callable[[Callable[[], None]], None],
        on_end: Callable[[], None],
    ) -> None:
        self.request = request
        self.confirmed: list[int] = []
        self._sink = sink
        self._upstream = upstream
        self._on_end = on_end
        self._usage = SequenceUsage(prompt_tokens=len(request.prompt))
        self.mid = MidRun(mid, request, self.confirmed, self._on_ahead, post)
        self._session: str | None = None
        self._session_start = 0
        self._posted_end = 0  # tokens of the text, up to which all was posted
        self._posts: set[asyncio.Task[float]] = set()
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False

    def begin(self) -> None:
        """Submits the mid-size verifier's sequence. Raises RequestError as its engine does."""
        if not self.request.once:
            self.mid.begin()

    def start(self) -> None:
        """Opens the session upstream."""
        if not self._has_ended:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def end(self, reason: SequenceEndReason, error: RequestError | None = None) -> None:
        """Ends the text; may be called twice."""
        if self._has_ended:
            return
        self._has_ended = True
        self.mid.close(reason)
        for task in (self._task, *self._posts):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self._sink(EndEvent(reason, self._usage, error))
        self._on_end()

    # -- upstream ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        deadline_ms = self.request.asker.deadline_ms
        try:
            async with asyncio.timeout(None if deadline_ms is None else deadline_ms / 1e3):
                await (self._verify() if self.request.once else self._generate())
        except TimeoutError:
            if self.confirmed:
                self.end("deadline")
            else:
                self.end("error", deadline_exceeded())
        except Exception as error:
            log_fault(error)  # not with its words, which may quote the request
            self.end("error", internal_error())

    async def _generate(self) -> None:
        retry, counts, loop = self._upstream.retry, self._upstream.counts, asyncio.get_running_loop()
        num_failures, num_faults, failing_since, pause_s = 0, 0, 0.0, retry.first_pause_s
        while not self._has_ended:
            num_known = len(self.confirmed)
            if (reason := self._over()) is not None:
                return self.end(reason)
            try:
                await self._run_session()
                continue
            except (RequestError, TokenizerMismatch, EndpointUnfit) as refused:
                return self._give_up(refused)
            except EndpointLost as lost:
                counts.losses += 1
                now = loop.time()
                if not num_failures or len(self.confirmed) > num_known:
                    num_failures, num_faults, failing_since = 0, 0, now
                    _log.warning("%s", lost, extra={"event": "upstream_lost"})
                if len(self.confirmed) - num_known >= CLEARING_TOKENS:
                    pause_s = retry.first_pause_s
                num_failures += 1
                num_faults += isinstance(lost, ModelFailed)
                if num_faults > 1:
                    return self.end("error", _failed())
                if num_failures >= retry.max_failures and now - failing_since >= retry.max_outage_s:
                    return self.end("error", _lost())
                asked_s = min(later_s(lost.retry_after_s, random.random), retry.max_outage_s)
                wait_s = max(spread_s(pause_s, random.random), asked_s)
            finally:
                self._session = None
            await asyncio.sleep(wait_s)
            pause_s = min(2.0 * pause_s, retry.max_pause_s)

    async def _run_session(self) -> None:
        """One session upstream, to its end. Raises EndpointLost where it is cut, and else as the client does."""
        client, facts = self._upstream.client, self._upstream.facts
        asked = wire_request(self.request, self.confirmed, self._upstream)
        start = len(self.confirmed)
        async with client.streams.open_session(asked, facts.target) as stream, aclosing(stream):
            async for event in stream:
                if self._has_ended:
                    return
                if isinstance(event, SessionOpen):
                    if event.target != facts.target:
                        raise EndpointLost("the upstream verifier has another target now; start this server again")
                    self._session, self._session_start, self._posted_end = event.session, start, start
                    self._post_ahead()
                elif isinstance(event, Commit):
                    self._on_commit(event)
                elif isinstance(event, SessionEnd):
                    if start == 0:
                        self._usage.cached_prompt_tokens = min(
                            max(0, event.usage.cached_prompt_tokens), len(self.request.prompt)
                        )
                    self._usage.waited_s += max(0.0, event.usage.waited_ms) / 1e3
                    if event.reason in ("stop", "length", "context", "deadline"):
                        return self.end(event.reason)
                    if event.error is not None and event.reason == "error":
                        raise end_error(client.streams.url, event.error)
                    raise EndpointLost(f"the upstream verifier ended a session: {event.reason}")
        raise EndpointLost("the upstream verifier cut a stream")

    def _on_commit(self, commit: Commit) -> None:
        base, counts, tokens = len(self.confirmed), self._upstream.counts, commit.tokens
        agreed = takewhile(lambda pair: pair[0] == pair[1], zip(self.mid.ahead, tokens, strict=False))
        counts.confirmed += sum(1 for _ in agreed)
        self.confirmed.extend(tokens)
        self._usage.count_pass(len(tokens), max(0, commit.proposed), commit.accepted)
        counts.passes += 1
        asked = commit.logprobs if self.request.pick.num_logprobs is not None else None  # else nobody has checked them
        logprobs = tuple(
            TokenLogprobs(token, each.logprob, tuple(each.top))
            for token, each in zip(tokens, asked or (), strict=False)
        )
        self._sink(CommitEvent(base, tuple(tokens), commit.accepted, commit.proposed, logprobs=logprobs))
        if self._over() is not None:
            return  # upstream's end follows
        void = self.mid.compare()
        if void:
            counts.void += void
            counts.returns += 1
            self._posted_end = len(self.confirmed)
        self._post_ahead()

    def _over(self) -> SequenceEndReason | None:
        """Why nothing is left to generate; None where something is."""
        text, request = self.confirmed, self.request
        if text and text[-1] in request.stop_ids:
            return "stop"
        if len(text) >= request.max_tokens:
            return "length"
        return "context" if len(request.prompt) + len(text) >= self._upstream.facts.max_positions else None

    async def _verify(self) -> None:
        """A /v1/verify item: one pass of the target's, which the mid-size verifier has no part in."""
        salt, facts = self._upstream.cache_salt(self.request.asker.client), self._upstream.facts
        item = wire_item(self.request, facts)
        try:
            answer = await self._upstream.client.streams.verify(VerifyRequest(items=[item], cache_salt=salt))
            result = answer.results[0]
            if result.error is not None:
                raise RequestError(result.error.code, result.error.message)
        except (RequestError, TokenizerMismatch, EndpointLost) as error:
            return self._give_up(error)
        self._upstream.counts.passes += 1
        accepted, proposed = min(result.accepted, len(result.tokens)), len(item.draft)
        self._usage.count_pass(len(result.tokens), proposed, accepted)
        if result.tokens:
            self._sink(CommitEvent(0, tuple(result.tokens), accepted, proposed))
        self.end(result.finish_reason or "once")

    def _give_up(self, error: OutriderError) -> None:
        """Ends the text because upstream refuses it, or is lost."""
        if isinstance(error, EndpointLost):
            self._upstream.counts.losses += 1
            _log.warning("%s", error, extra={"event": "upstream_lost"})
        else:
            _log.warning("the upstream verifier refused a text: %s", _code(error), extra={"event": "upstream"})
        is_lost = isinstance(error, EndpointLost) and not isinstance(error, EndpointUnfit)
        self.end("error", _lost() if is_lost else _refused(error))

    # -- the mid-size verifier -----------------------------------------------------------------------------------------

    def _on_ahead(self, position: int, tokens: Sequence[int]) -> None:
        if self._has_ended:
            return
        self._upstream.counts.provisional += len(tokens)
        if self.request.provisional:
            self._sink(ProvisionalEvent(position, tuple(tokens)))
        self._post_ahead()

    def _post_ahead(self) -> None:
        """Posts the provisional tokens, unless all of them were posted, or too many messages are in flight."""
        if self._session is None or len(self._posts) >= MAX_POSTS or self._has_ended:
            return
        known = len(self.confirmed)
        vocab_size = self._upstream.facts.vocab_size
        path = list(takewhile(lambda token: token < vocab_size, self.mid.ahead[:MAX_PATH_TOKENS]))
        if not path or known + len(path) <= self._posted_end:
            return
        self._posted_end = known + len(path)
        request = DraftRequest(base=known - self._session_start, paths=[path])
        message = DraftMessage("application/json", request.model_dump_json().encode())
        task = asyncio.get_running_loop().create_task(self._upstream.client.posts.post_drafts(self._session, message))
        self._posts.add(task)
        task.add_done_callback(self._posted)

    def _posted(self, task: asyncio.Task[float]) -> None:
        self._posts.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return self._post_ahead()
        self._posted_end = len(self.confirmed)  # the next commit has it posted again: at once would be a loop
        if not isinstance(error, OutriderError):
            log_fault(error)


def _lost() -> RequestError:
    return RequestError(
        "upstream_lost",
        "the target's verifier does not answer, so nothing more can be confirmed; try again later",
        status=503,
        retry_after_s=5,
    )


def _failed() -> RequestError:
    return RequestError("model_fault", "the target's model failed on this text, twice", status=500)


def _refused(refused: OutriderError) -> RequestError:
    return RequestError(
        "upstream_refused",
        f"the target's verifier refused the request: {_code(refused)}; ask who runs this server",
        status=502,
    )


def _code(refused: OutriderError) -> str:
    """Not its words, which may quote the text."""
    if isinstance(refused, RequestError):
        return refused.code
    if isinstance(refused, TokenizerMismatch):
        return "tokenizer_mismatch"
    return "target_mismatch" if isinstance(refused, TargetMismatch) else "protocol_broken"
