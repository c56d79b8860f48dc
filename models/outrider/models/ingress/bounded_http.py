"""Speaks HTTP/1.1 as uvicorn does, within bounds on what reaches the event loop before a route runs.

uvicorn does not bound the bytes and the time of headers, the time of a body, or the requests that wait behind another
on one connection. Bytes are counted here as they are fed to the parser, in slices, so that one huge chunk is
no way around; deadlines are only remembered here, and checked by `ConnectionTable`.

Leans on uvicorn's HttpToolsProtocol; pyproject.toml names the versions that were tried, tests/test_cloud_ingress.py
what is used of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sized
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from outrider.models.errors import RequestError
from outrider.models.faults import log_fault
from outrider.models.http.bodies import BODY_PACE, BodyPace, too_many_bytes
from outrider.models.http.errors import error_bytes
from outrider.models.http.security import SUBJECT
from outrider.models.ingress.connections import ConnectionLimits, ConnectionTable, Ticket
from outrider.models.ingress.sockets import ClientName

TOO_MANY: Final = "too many connections"
_CODINGS: Final = b"transfer-encoding"
_FRAMING_PER_BYTE: Final = 8
"""A chunked body may have so many bytes around each byte of its own: chunks of one byte have five."""
_MAX_DISCARDED_BYTES: Final = 1 << 20
"""Read and dropped after a refusal, so that a client that is still sending gets to read it."""


# Where a connection is in the message that arrives. Integers: an enum's members cost a request 1 us.
_IDLE: Final = 0
_HEAD: Final = 1
_BODY: Final = 2
_REFUSED: Final = 3


# Answers, never raised: one that was would keep the traceback of its last use.
@lru_cache(maxsize=8)
def refusals(limits: ConnectionLimits) -> dict[str, RequestError]:
    """By cause, as the log names it; a connection that is closed for another gets no answer."""
    late = "did not arrive in time; send the request again"
    large = (
        f"the request line and headers are larger than {limits.max_header_bytes} bytes or more than "
        f"{limits.max_headers} lines; send fewer"
    )
    long = f"the URL is longer than {limits.max_url_bytes} bytes; send a shorter one"
    coding = "the request's Transfer-Encoding is not chunked alone; send the body as it is"
    plain = "this is not an HTTP/1.1 request; compare the URL's scheme and port"
    full = "the server has as many connections as it takes, in all or from this address; retry later"
    return {
        TOO_MANY: RequestError("too_many_connections", full, status=503),
        "malformed requests": RequestError("malformed_http", plain),
        "transfer codings": RequestError("unsupported_transfer_encoding", coding, status=501),
        "large headers": RequestError("headers_too_large", large, status=431),
        "long URLs": RequestError("url_too_long", long, status=414),
        "slow headers": RequestError("request_timeout", f"the request line and headers {late}", status=408),
        "slow bodies": RequestError("request_timeout", f"the body {late}", status=408),
        "large bodies at once": too_many_bytes("unfinished"),
    }


def answer_of(refusal: RequestError) -> bytes:
    """A whole HTTP answer."""
    body = error_bytes(refusal)
    phrase = HTTPStatus(refusal.status).phrase
    retry = "retry-after: 1\r\n" if refusal.status == 503 else ""
    head = (
        f"HTTP/1.1 {refusal.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


class _Overrun(Exception):
    """Raised in a parser's callback: the connection is to be closed, for this cause."""


class _Flow(FlowControl):
    """Keeps reading paused while requests wait behind another: uvicorn resumes it whenever the running one asks for
    its body, so that more and more could wait.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Reads on, unless requests wait."""
        if not self._pipeline:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. See `ConnectionLimits` for its bounds."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        table: ConnectionTable,
        ticket: Ticket,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._table = table
        self._ticket = ticket
        self._subject: ClientName | None = None  # of the client's certificate
        self._limits = table.limits
        self._phase = _IDLE
        self._slice_bytes = 0
        # Bytes fed to the parser since the phase began. May include the end of the message before.
        self._fed_bytes = 0
        self._body_bytes = 0
        self._num_trailers = 0
        self._has_coding = False  # a transfer coding besides `chunked`
        self._is_holding = False
        self._pace = BodyPace()
        # Those before `cycle` that may lack their answer. uvicorn knows `cycle` only.
        self._earlier: deque[RequestResponseCycle] = deque()
        # The clock of the phase: its start, None while nothing is awaited, and the body's bytes at that time.
        self._since_s: float | None = None
        self._since_bytes = 0
        self._unread_since_s: float | None = None
        self._closing_since_s: float | None = None

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the clock: a client that sends nothing is closed too."""
        super().connection_made(cast(asyncio.Transport, transport))  # uvloop's is not registered as one
        self.flow = _Flow(self.transport, self.pipeline)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and (certificate := tls.getpeercert()):
            self._subject = ClientName.of(certificate)
        self._since_s = self.loop.time()
        self._table.checks.add(self.check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives the connection's place back, and ends the request that runs, also while others wait behind it."""
        self._table.checks.discard(self.check)
        self._ticket.release()
        super().connection_lost(exc)
        for cycle in self._earlier:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        # Each request refers to this connection, and one that waits never runs now. Left in circles, the requests of a
        # client that connects again and again pile up until the garbage collector frees them, which takes 0.2 s.
        self._earlier.clear()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]  # as before the first request

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, slice by slice, and checks the bounds after each."""
        size = self._limits.max_header_bytes
        if len(data) <= size:
            self._feed(data)
        else:
            for start in range(0, len(data), size):
                self._feed(data[start : start + size])
                if self.transport.is_closing():
                    return
        if self._since_s is None and self._phase != _IDLE:
            self._since_s = self.loop.time()
            self._since_bytes = self._body_bytes

    def pause_writing(self) -> None:
        """The client does not read: it has a while for that."""
        super().pause_writing()
        self._unread_since_s = self.loop.time()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._unread_since_s = None

    # The parser's side

    def on_message_begin(self) -> None:
        """A request's first byte."""
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise _Overrun("too many pipelined requests")
        # Not at any byte: empty lines between requests would keep a connection for ever.
        self._unset_keepalive_if_required()
        super().on_message_begin()
        if self._subject is not None:
            self.scope[SUBJECT] = self._subject  # type: ignore[typeddict-unknown-key]  # a key of our own
        # One for each request: an earlier one that runs late must not speak for this body.
        self._pace = self.scope[BODY_PACE] = BodyPace()  # type: ignore[typeddict-unknown-key]
        self._phase = _HEAD
        self._fed_bytes = self._slice_bytes
        self._body_bytes = self._num_trailers = 0
        self._has_coding = False
        self._since_s = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is dropped: a key or a type that comes after the body was not checked."""
        if self._phase == _BODY:
            self._num_trailers += 1
            return
        super().on_header(name, value)
        if len(name) == len(_CODINGS) and name.lower() == _CODINGS and value.strip().lower() != b"chunked":
            self._has_coding = True

    def on_headers_complete(self) -> None:
        """The end of the headers: the request begins to run or to wait."""
        if self._has_coding:
            raise _Overrun("transfer codings")
        if len(self.headers) > self._limits.max_headers or (
            self._fed_bytes > self._limits.max_header_bytes and self._head_bytes() > self._limits.max_header_bytes
        ):
            raise _Overrun("large headers")
        if len(self.url) > self._limits.max_url_bytes:
            raise _Overrun("long URLs")
        if self.timeout_keep_alive_task is not None:  # armed by an answer that ended since the first byte
            self._unset_keepalive_if_required()
        before = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            while self._earlier and self._earlier[0].response_complete:
                self._earlier.popleft()
            self._earlier.append(before)
        self._phase = _BODY
        self._fed_bytes = self._slice_bytes
        self._since_s = None

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes and self.cycle.response_complete:
            raise _Overrun("bodies left unread")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request's last byte."""
        super().on_message_complete()
        self._phase = _IDLE
        self._fed_bytes = 0
        self._since_s = None
        if self._is_holding:
            self._hold(0)

    # The deadlines

    def check(self, now: float, late_s: float) -> None:
        """See `connections.Check`."""
        limits = self._limits
        if self.transport.is_closing():
            # Closing waits for the client to read what is left.
            self._closing_since_s = now if self._closing_since_s is None else self._closing_since_s + late_s
            if now - self._closing_since_s > limits.write_s:
                self.transport.abort()
            return
        if self._unread_since_s is not None:
            self._unread_since_s += late_s
            if now - self._unread_since_s > limits.write_s:
                self._table.note("answers that are not read")
                self.transport.abort()
                return
        if self._since_s is None:
            return
        self._since_s += late_s
        is_long = self._pace.is_long and self._phase == _BODY and not self.cycle.response_complete
        if self.flow.read_paused or is_long:  # the client waits for us, or the application for the client
            self._since_s, self._since_bytes = now, self._body_bytes
            return
        waited_s = now - self._since_s
        if self._phase == _BODY:
            missing = (waited_s - limits.body_grace_s) * limits.min_body_rate - (self._body_bytes - self._since_bytes)
            if missing > 0:
                self._refuse("slow bodies")
        elif self._phase == _REFUSED:
            if waited_s > limits.linger_s:
                self.transport.abort()
        elif waited_s > limits.header_s:
            if self._fed_bytes:
                self._refuse("slow headers")
            else:
                self._table.note("silence")
                self.transport.close()

    # What is behind both

    def _feed(self, data: bytes) -> None:
        self._slice_bytes = len(data)
        self._fed_bytes += len(data)
        if self._phase == _REFUSED:
            if self._fed_bytes > _MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as error:
                # Nothing is upgraded to: the request is answered as it stands, and what follows it is the next one.
                data = data[error.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse_unparsed(error)
                return
        if self._phase == _IDLE and self._fed_bytes <= self._limits.max_header_bytes:
            return
        if self._phase == _BODY:
            framing = self._fed_bytes - self._body_bytes
            if (
                framing > 2 * self._limits.max_header_bytes + _FRAMING_PER_BYTE * self._body_bytes
                or len(self.headers) + self._num_trailers > self._limits.max_headers  # trailers come after the body
            ):
                self._refuse("large headers")
            elif not self._hold(self._held_bytes()):
                self._refuse("large bodies at once")
        elif self._fed_bytes > self._limits.max_header_bytes or len(self.headers) > self._limits.max_headers:
            self._refuse("large headers")

    def _refuse_unparsed(self, error: httptools.HttpParserError) -> None:
        # Not in `_feed`: a variable there would be part of a circle with its own traceback.
        overrun = error.__context__
        if not isinstance(overrun, _Overrun | httptools.HttpParserError | UnicodeError | None):
            log_fault(overrun)  # ours, or uvicorn's
        self._refuse(str(overrun) if isinstance(overrun, _Overrun) else "malformed requests")

    def _hold(self, num_bytes: int) -> bool:
        self._is_holding = num_bytes > 0
        return self._ticket.hold(num_bytes)

    def _held_bytes(self) -> int:
        """Of the body; of a long one what the application has not read."""
        if self.cycle.response_complete:
            return 0
        return len(self.cycle.body) if self._pace.is_long else self._body_bytes

    def _head_bytes(self) -> int:
        # "name: value\r\n", and "METHOD url HTTP/1.1\r\n" without its method
        return len(self.url) + 12 + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse(self, cause: str) -> None:
        """Answers if no other answer is under way and there is one for this cause, and closes the connection."""
        if self.transport.is_closing() or self._phase == _REFUSED:
            return
        self._table.note(cause)
        self._unset_keepalive_if_required()
        cycle = self.cycle
        refusal = refusals(self._limits).get(cause)
        is_answered = self._phase == _BODY and cycle.response_complete
        if refusal is None or self.pipeline or is_answered:
            self.transport.close()
            return
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self._phase != _BODY:
                self.transport.close()  # a refusal now would be taken for another request's answer
                return
            cycle.disconnected = True  # only the refusal answers this request
            cycle.message_event.set()
        self.transport.write(answer_of(refusal))
        # Closing with unread bytes would reset the connection, and the client might never see the refusal.
        self._phase = _REFUSED
        self._fed_bytes = 0
        self._since_s = self.loop.time()
        self._hold(0)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
