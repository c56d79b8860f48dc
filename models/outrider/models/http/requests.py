"""Reads requests: parses bodies into messages, finds the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Receive

from outrider.models.errors import RequestError, SamplingError
from outrider.models.http.errors import FieldError, from_validation
from outrider.models.http.security import ANYBODY, OWNER
from outrider.models.http.turns import Turns
from outrider.models.sampling import SamplingParams

M = TypeVar("M", bound=BaseModel)

LARGE_BODY_BYTES: Final = 1 << 16
"""Bodies up to this size are parsed at once."""
MAX_JSON_PARTS: Final = 1 << 16
"""Most objects, lists and keys in a body, and most strings. `{}` is 2 bytes in a body and 64 or more as an object."""


def owner_of(request: Request) -> bytes:
    """The client's identity, as the gate found it."""
    owner: bytes = request.scope.get(OWNER, ANYBODY)
    return owner


def parse(message: type[M], body: bytes) -> M:
    """Parses a request's body. Raises RequestError 400, which names the first wrong field.

    Takes time and memory in proportion to the body, whatever is in it.
    """
    raw = load(body)
    try:
        return message.model_validate(raw)
    except ValidationError as error:
        raise from_validation(faults_of(error)) from None


class Bodies:
    """Parses bodies on the event loop: large ones in turn, with as long a break after each as it took.

    A large body takes tens of milliseconds, in which no stream goes on: many together would take seconds.
    """

    def __init__(self) -> None:
        self.turns = Turns()

    async def parse(self, owner: bytes, message: type[M], body: bytes) -> M:
        """As the function `parse`, when its turn has come."""
        if len(body) <= LARGE_BODY_BYTES:
            return parse(message, body)
        await self.turns.take(owner)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            return parse(message, body)
        finally:
            now_s = loop.time()
            loop.call_at(2 * now_s - began_s, self.turns.release, owner)


def load(body: bytes) -> Any:
    """The body's JSON. Raises RequestError 400: `malformed_json`, or `invalid_parameter` if it has too many parts."""
    _bound_parts(body)
    try:
        return from_json(body)
    except ValueError as error:
        raise RequestError("malformed_json", f"the body is not JSON: {error}") from None


def faults_of(error: ValidationError) -> list[Any]:
    """The faults that pydantic found, without the input."""
    return list(error.errors(include_url=False, include_input=False))


def _bound_parts(body: bytes) -> None:
    # Every part has a byte of its own, so most bodies need no count, and most others no exact one.
    if len(body) <= MAX_JSON_PARTS or _count(body, b'"[{:') <= MAX_JSON_PARTS:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') <= 2 * MAX_JSON_PARTS:
        outside = b"".join(bare.split(b'"')[::2])
        if _count(outside, b"[{:") <= MAX_JSON_PARTS:
            return
    raise FieldError(
        "invalid_parameter",
        f"the body has more than {MAX_JSON_PARTS} objects, lists and keys, or strings; send less at a time",
        param="body",
    )


def _count(text: bytes, marks: bytes) -> int:
    return sum(text.count(mark) for mark in marks)


def sampling_of(make: Callable[[], SamplingParams]) -> SamplingParams:
    """Runs `make`; a SamplingError becomes RequestError 400 `invalid_parameter`."""
    try:
        return make()
    except SamplingError as error:
        message = str(error)
        raise FieldError("invalid_parameter", message, param=message.partition(" ")[0]) from None


async def read_body(receive: Receive) -> bytes:
    """A request's whole body."""
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        parts = [body]
        while message.get("more_body"):
            message = await receive()
            parts.append(message.get("body", b""))
        body = b"".join(parts)
    return body
