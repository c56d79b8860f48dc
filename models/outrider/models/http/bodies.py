"""Reads requests: parses bodies into messages, finds the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from outrider.models.errors import RequestError, SamplingError
from outrider.models.http.errors import FieldError, from_validation
from outrider.models.http.limits import Turns
from outrider.models.http.security import ANYBODY, OWNER, body_too_large
from outrider.models.process.by_owner import Shares

M = TypeVar("M", bound=BaseModel)
Made = TypeVar("Made")

LARGE_BODY_BYTES: Final = 1 << 16
"""Bodies up to this size are parsed at once."""
MAX_OWN_BODIES: Final = 32
MAX_BODIES: Final = 256
"""So many bodies of the largest size may wait at a time, of one owner and in all."""
MAX_JSON_PARTS: Final = 1 << 16
"""Most objects, lists and keys in a body, and most strings. `{}` is 2 bytes in a body and 64 or more as an object."""
MAX_JSON_KEYS: Final = 1 << 15
"""Most keys in a body. Those that differ take longest to read."""
MAX_JSON_COMMAS: Final = 240_000
"""Most commas outside strings in a body of up to 1 MiB; a longer one may have as many for each MiB. Twice as many fit,
between numbers of one digit, and would hold the event loop for twice as long.
"""


def owner_of(request: Request) -> bytes:
    """The client's identity, as the gate found it."""
    owner: bytes = request.scope.get(OWNER, ANYBODY)
    return owner


def is_no_store(request: Request) -> bool:
    """Whether the client wants nothing kept of this request, and nothing used that was kept: `Cache-Control: no-store`
    (RFC 9111, section 5.2.1.5).
    """
    values = ",".join(request.headers.getlist("cache-control")).lower().split(",")
    return "no-store" in (value.strip() for value in values)


def parse(message: type[M], body: bytes) -> M:
    """Parses a request's body. Raises RequestError 400, which names the first wrong field.

    Takes time and memory in proportion to the body, whatever is in it.
    """
    return validated(message, load(body))


BODY_PACE: Final = "outrider.body_pace"
"""Key of the ASGI scope that holds the request's `BodyPace`, where the server bounds that."""


class BodyPace:
    """How a request's body comes. is_long: it is open for as long as the client likes, and the application bounds its
    parts: in time, and by what it does not read. The server ends that with the request.
    """

    __slots__ = ("is_long",)

    def __init__(self) -> None:
        self.is_long = False


class Bodies:
    """Parses bodies on the event loop: large ones in turn, with as long a break after each half as it took.

    A large body takes tens of milliseconds, in which no stream goes on: half of them to read the JSON, half to validate
    it. Many together would take seconds. Those that wait are bounded: every connection can send one.
    """

    def __init__(self, max_body_bytes: int) -> None:
        """max_body_bytes: of the largest body."""
        self.turns = Turns()
        self.held = Shares[bytes](MAX_OWN_BODIES * max_body_bytes, MAX_BODIES * max_body_bytes)

    @contextmanager
    def hold(self, owner: bytes, body: bytes) -> Iterator[None]:
        """Counts a body that waits inside. Raises RequestError 503 `too_many_bytes` if too much waits already."""
        if not self.held.add(owner, len(body)):
            raise too_many_bytes("waiting")
        try:
            yield
        finally:
            self.held.add(owner, -len(body))

    async def parse(self, owner: bytes, message: type[M], body: bytes, *, is_held: bool = False) -> M:
        """As the function `parse`, when its turn has come. is_held: the body is counted already."""
        if len(body) <= LARGE_BODY_BYTES:
            return parse(message, body)
        with nullcontext() if is_held else self.hold(owner, body):
            await self.turns.take(owner)
        loop = asyncio.get_running_loop()
        began_s = again_s = loop.time()
        try:
            raw = load(body)
            await asyncio.sleep(loop.time() - began_s)
            again_s = loop.time()
            return validated(message, raw)
        finally:
            now_s = loop.time()
            loop.call_at(2 * now_s - again_s, self.turns.release, owner)


def too_many_bytes(state: str) -> RequestError:
    """The error 503 where bodies in this state, "unfinished" or "waiting", hold too much memory."""
    return RequestError(
        "too_many_bytes",
        f"{state} bodies, of this client or in all, hold as many bytes as the server takes; retry later",
        status=503,
    )


def load(body: bytes, name: str = "the body") -> Any:
    """The body's JSON. Raises RequestError 400: `malformed_json`, or `invalid_parameter` if it has too many parts.

    name: what the errors call it.
    """
    _bound_parts(body, name)
    try:
        return from_json(body)
    except ValueError as error:
        raise RequestError("malformed_json", f"{name} is not JSON: {error}") from None


def validated(message: type[M], raw: Any) -> M:
    """The message. Raises RequestError 400, which names the first wrong field."""
    try:
        return message.model_validate(raw)
    except ValidationError as error:
        raise from_validation(faults_of(error)) from None


def faults_of(error: ValidationError) -> list[Any]:
    """The faults that pydantic found, without the input."""
    return list(error.errors(include_url=False, include_input=False))


def _bound_parts(body: bytes, name: str) -> None:
    # Every part has a byte of its own, so most bodies need no count, and most others no exact one.
    if len(body) <= min(MAX_JSON_PARTS, MAX_JSON_KEYS, MAX_JSON_COMMAS):
        return
    parts = f"{MAX_JSON_PARTS} objects, lists and keys, or strings"
    max_commas = max(MAX_JSON_COMMAS, len(body) * MAX_JSON_COMMAS >> 20)
    bounds = (
        (b"[{:", MAX_JSON_PARTS, parts),
        (b":", MAX_JSON_KEYS, f"{MAX_JSON_KEYS} keys"),
        (b",", max_commas, f"{max_commas} commas between elements"),
    )
    if body.count(b'"') <= 2 * MAX_JSON_PARTS and all(_count(body, marks) <= most for marks, most, _ in bounds):
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MAX_JSON_PARTS:
        raise _too_many(name, parts)
    outside = b"".join(bare.split(b'"')[::2])
    for marks, most, what in bounds:
        if _count(outside, marks) > most:
            raise _too_many(name, what)


def _too_many(name: str, what: str) -> RequestError:
    return FieldError("invalid_parameter", f"{name} has more than {what}; send less at a time", param="body")


def _count(text: bytes, marks: bytes) -> int:
    return sum(text.count(mark) for mark in marks)


def sampling_of(make: Callable[[], Made]) -> Made:
    """What `make` returns. A SamplingError becomes RequestError 400 `invalid_parameter`."""
    try:
        return make()
    except SamplingError as error:
        message = str(error)
        raise FieldError("invalid_parameter", message, param=message.partition(" ")[0]) from None


async def read_body(receive: Receive, max_bytes: int | None = None) -> bytes:
    """A request's whole body. Raises ClientDisconnect, and RequestError 413 once it has more than `max_bytes`; the gate
    bounds it too. Starlette's `Request.body` would keep it as long as a stream.
    """
    parts: list[bytes] = []  # joined at the end: a body that arrives in one piece is not copied
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if max_bytes is not None and num_bytes > max_bytes:
            raise body_too_large(max_bytes)
        if not message.get("more_body"):
            return b"".join(parts)
