"""Streams the events of one session: open, then commits as the engine makes them, then the end.

Commits go out many thousand times a second over all sessions, so they take the shortest way: the mailbox calls
`SessionStream` once per wake-up, which calls the server's `send`, past the layers that the response's start went
through. No task is switched unless the client reads more slowly than its events come. `completions` streams through
`sse.EventStream`, the plain twin.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import Any, Final, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.cloud.api.bridge import Delivery, Mailbox
from outrider.cloud.api.draft_line import DraftLine
from outrider.cloud.api.traces import SequenceWatch
from outrider.cloud.seam import CommitEvent, EndEvent, EngineStats, ProvisionalEvent
from outrider.models.faults import log_fault
from outrider.models.http import sse
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.errors import error_body, internal_error
from outrider.models.http.shapes import finite
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.wire.protocol import SessionEnd, SessionOpen, TextCut, Usage

SERVER_SEND: Final = "outrider.send"
"""Key of the ASGI scope that holds the server's own `send`, below all layers."""
_PIECE: Final = 64 << 10
"""Of what has waited, in one write: a client that reads slowly shows it with each."""
_EVERY_S: Final = 0.5
_MUCH: Final = 0.2
"""Of a time, or of a step for a drafted token's: what a device decides by has changed."""
_LITTLE: Final = 0.02
"""Of a step: a drafted token's time that changed by less changes no decision."""


class StepTimes(NamedTuple):
    """Of a step without drafts, and what a drafted token adds to it; None: not measured yet."""

    step_ms: float | None = None
    draft_token_ms: float | None = None

    def has_changed(self, before: StepTimes) -> bool:
        """Whether a device that knows those `before` may decide otherwise."""
        if self.step_ms is None or self.draft_token_ms is None or before.step_ms is None:
            return self != before
        token_ms = before.draft_token_ms or 0.0
        return (
            abs(self.step_ms - before.step_ms) > _MUCH * before.step_ms
            or abs(self.draft_token_ms - token_ms) > _MUCH * token_ms + _LITTLE * before.step_ms
        )


class NewestTimes:
    """Calls it for the newest times. stats: of the engine, which takes some time to gather."""

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._found = StepTimes()
        self._until_s = float("-inf")

    def __call__(self) -> StepTimes:
        if (now := self._clock()) >= self._until_s:
            stats = self._stats()
            self._found, self._until_s = StepTimes(stats.step_ms, stats.draft_token_ms), now + _EVERY_S
        return self._found


class SessionText:
    """The text of one session, as its commits make it. Knows no engine: the caller ends the sequence.

    generated: the last tokens of `prompt` that belong to the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        stop_ids: frozenset[int],
        prompt: Sequence[int],
        generated: int,
    ) -> None:
        begin = len(prompt) - generated
        self._assembler = TextStyle(tuple(stop_strings), stop_ids).assembler(tokenizer, prompt[:begin])
        self._assembler.follow(prompt[begin:])

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._assembler.is_stopped

    @property
    def cut(self) -> TextCut | None:
        """Where a stop string ends the text; None where none does."""
        text = self._assembler
        return None if text.stop is None else TextCut(stop=text.stop, tokens=text.num_tokens, chars=text.num_chars)

    def take(self, event: CommitEvent) -> CommitEvent | None:
        """The commit up to the token that completes a stop string; None after that token."""
        text = self._assembler
        if text.is_stopped:
            return None
        before = text.num_tokens
        text.push(event.tokens)
        if not text.is_stopped:
            return event
        left = text.num_tokens - before
        accepted = min(event.accepted, left)
        return replace(event, tokens=event.tokens[:left], logprobs=event.logprobs[:left], accepted=accepted)

    def finish(self) -> None:
        """Looks at what was held back: half a character may complete a stop string. Call it after the last commit."""
        self._assembler.finish()


class SessionStream(Response):
    """The response of one session.

    on_close: called once, however the stream ends. After `keep_alive_s` without a write a comment is sent. step_times:
    gives the newest, which a commit has where they are no longer those of `opened`. line: the session's long request.
    text: finds stop strings, where the session has some; on_stop: ends the sequence at the first one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        opened: SessionOpen,
        mailbox: Mailbox,
        watch: SequenceWatch,
        on_close: Callable[[], None],
        *,
        keep_alive_s: float,
        step_times: Callable[[], StepTimes],
        line: DraftLine,
        text: SessionText | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._opened = opened
        self._step_times = step_times
        self._sent_times = StepTimes(opened.step_ms, opened.draft_token_ms)
        self._text = text
        self._on_stop = on_stop
        self._line = line
        self._mailbox = mailbox
        self._watch = watch
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._backlog = bytearray()  # to send once the client has read more
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None  # a write that waits for the client
        self.status_code = 200
        self.background = None
        self.raw_headers = list(sse.HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._send: Send = scope.get(SERVER_SEND, send)
        try:
            # Events are taken meanwhile: it may wait behind an answer that the client does not read.
            self._sending = self._loop.create_task(self._send_rest(partial(self._open, send)))
            self._line.write = self._write_beside
            self._mailbox.listen(self._on_events)
            await sse.until_gone(receive)
        finally:
            self._mailbox.close()
            if self._timer is not None:
                self._timer.cancel()
            if self._sending is not None:
                self._sending.cancel()
            self._on_close()

    async def _open(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send({"type": "http.response.body", "body": self._opening(), "more_body": True})
        self._written_s = self._loop.time()
        self._begin()

    def _opening(self) -> bytes:
        return sse.encode(self._opened)

    def _begin(self) -> None:
        """The opening is sent."""
        self._arm(self._keep_alive_s)

    def _on_events(self, items: list[Delivery]) -> None:
        chunk = bytearray()
        for _, event in items:
            if isinstance(event, EndEvent):
                self._watch.ended(event)
                chunk += sse.encode(_end(event, self._text))
                self._has_ended = True
                break
            if isinstance(event, ProvisionalEvent):
                chunk += encode_provisional(event)
                continue
            self._watch.committed(event)
            chunk += self._commit(event) if self._text is None else self._cut(event, self._text)
        if not chunk:
            return  # committed between the stop string and the cancellation
        self._write(bytes(chunk))

    def _commit(self, event: CommitEvent) -> bytes:
        taken = self._line.news()
        if not (newest := self._step_times()).has_changed(self._sent_times):
            return encode_commit(event, taken=taken)
        self._sent_times = newest
        return encode_commit(event, newest, taken)

    def _cut(self, event: CommitEvent, text: SessionText) -> bytes:
        left = text.take(event)
        if text.is_stopped:  # also where the text that a session goes on with has the stop string
            self._on_stop()
        return b"" if left is None else self._commit(left)

    def _write(self, chunk: bytes) -> None:
        """Sends now, or after what waits for the client."""
        if self._sending is not None:
            self._hold(chunk)
        else:
            self._start(chunk)

    def _hold(self, chunk: bytes) -> None:
        self._backlog += chunk
        if len(self._backlog) > sse.MOST_WAITING:
            self._leave()  # its device goes on in another session

    def _start(self, chunk: bytes) -> None:
        """Begins a write; ends it in a task where it waits for the client."""
        self._written_s = self._loop.time()
        sending = self._body(chunk)
        try:
            wait = sending.send(None)
        except StopIteration:
            return
        except Exception as error:  # the connection is in an unknown state: the server closes it
            self._give_up(error)
        else:
            self._sending = self._loop.create_task(self._send_rest(partial(_rest, sending, wait)))

    def _write_beside(self, event: bytes) -> None:
        """An event that is not the engine's."""
        if not self._has_ended:
            self._write(event)

    def _body(self, chunk: bytes) -> Coroutine[Any, Any, None]:
        message = {"type": "http.response.body", "body": chunk, "more_body": not self._is_last()}
        return self._send(message)  # type: ignore[return-value]  # every server's is a coroutine function

    def _is_last(self) -> bool:
        """Whether nothing follows what is being written."""
        return self._has_ended and not self._backlog

    async def _send_rest(self, begun: Callable[[], Awaitable[None]]) -> None:
        """Finishes a write that has begun, then sends what has come meanwhile."""
        try:
            await begun()
            while chunk := self._waiting():
                await self._body(chunk)
        except Exception as error:
            self._give_up(error)
        else:
            self._sending = None

    def _waiting(self) -> bytes:
        """What is to be sent at once after a write that waited."""
        chunk = bytes(self._backlog[:_PIECE])
        del self._backlog[:_PIECE]
        return chunk

    def _give_up(self, error: Exception) -> None:
        log_fault(error)
        self._leave()

    def _leave(self) -> None:
        assert self._task is not None
        self._task.cancel()  # `__call__`; the server then closes the connection

    def _arm(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        left_s = self._written_s + self._keep_alive_s - self._loop.time()
        if left_s <= 0.0:
            if self._sending is None and not self._has_ended:
                self._write(sse.KEEP_ALIVE)
            left_s = self._keep_alive_s
        self._arm(left_s)


@coroutine
def _rest(begun: Coroutine[Any, Any, None], wait: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was run up to its first wait, for a task to await.

    Python 3.12 has `asyncio.eager_task_factory` for this.
    """
    with closing(begun):
        yield wait
        yield from begun


def _end(event: EndEvent, text: SessionText | None = None) -> SessionEnd:
    assert event.reason != "once"  # no session asks for it
    usage = session_usage(event)
    if text is not None:
        text.finish()
        if (cut := text.cut) is not None:
            usage = usage.model_copy(update={"completion_tokens": cut.tokens})
            return SessionEnd(reason="stop", usage=usage, cut=cut)
    error = error_body(event.error or internal_error()) if event.reason == "error" else None
    return SessionEnd(reason=event.reason, usage=usage, error=error, prefix_hash=event.prefix_hash)


def session_usage(event: EndEvent) -> Usage:
    """The wire form of what a sequence took."""
    usage = event.usage
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        target_passes=usage.target_passes,
        accepted_prediction_tokens=usage.accepted_tokens,
        rejected_prediction_tokens=usage.rejected_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        waited_ms=round(usage.waited_s * 1000.0, 3),
        looked_up_tokens=usage.looked_up_tokens,
    )


def encode_commit(event: CommitEvent, times: StepTimes | None = None, taken: str = "") -> bytes:
    """`protocol.Commit` as an event. Written by hand: this runs once per sequence and step.

    Most events are commits. So they carry no `type` (an event without one is a commit), no `accepted` or `proposed`
    when nothing was proposed, no `looked_up` when it is 0, no `logprobs` unless they were asked for, and no times
    (`times`) unless they have changed. taken: the fields that acknowledge drafts (`DraftLine.news`).
    """
    tokens = ",".join(map(str, event.tokens))
    rest = _logprobs(event) + taken if event.logprobs else taken
    if times is not None:
        rest += "".join(f',"{name}":{value:.4g}' for name, value in times._asdict().items() if value is not None)
    if event.proposed:
        looked_up = f',"looked_up":{event.looked_up}' if event.looked_up else ""
        return (
            f'data: {{"base":{event.base},"tokens":[{tokens}],'
            f'"accepted":{event.accepted},"proposed":{event.proposed}{looked_up}{rest}}}\n\n'
        ).encode()
    return f'data: {{"base":{event.base},"tokens":[{tokens}]{rest}}}\n\n'.encode()


def encode_provisional(event: ProvisionalEvent) -> bytes:
    """`protocol.Commit` with the mark of unconfirmed tokens."""
    tokens = ",".join(map(str, event.tokens))
    return f'data: {{"base":{event.base},"tokens":[{tokens}],"provisional":true}}\n\n'.encode()


def _logprobs(event: CommitEvent) -> str:
    found = [
        {"logprob": finite(each.logprob), "top": [[token, finite(logprob)] for token, logprob in each.top]}
        for each in event.logprobs
    ]
    return f',"logprobs":{json.dumps(found, separators=(",", ":"))}'
