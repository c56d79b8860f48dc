"""Reads requests: parses bodies into messages, finds the owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Receive

from outrider.models.errors import SamplingError
from outrider.models.http.errors import FieldError, from_validation
from outrider.models.http.security import ANYBODY, OWNER
from outrider.models.sampling import SamplingParams

M = TypeVar("M", bound=BaseModel)


def owner_of(request: Request) -> bytes:
    """The client's identity, as the gate found it."""
    owner: bytes = request.scope.get(OWNER, ANYBODY)
    return owner


def parse(message: type[M], body: bytes) -> M:
    """Parses a request's body. Raises RequestError 400, which names the first wrong field."""
    try:
        return message.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


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
