"""Holds the messages of a conversation, and saves and loads them as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.edge.setup.endpoints import write_private
from outrider.models.errors import ConfigError, RequestError

SYSTEM: Final = "system"
USER: Final = "user"
ASSISTANT: Final = "assistant"
MAX_FILE_BYTES: Final = 16 << 20
MAX_MESSAGES: Final = 2000
"""A server takes 2,048."""
KEPT_SHARE: Final = 0.5
"""Of the context, that turns may fill after the oldest were dropped: each drop costs a prefill of the rest."""
MAX_RESERVED_SHARE: Final = 0.25
"""Of the context, that is left for an answer at most; a longer one ends where the context does."""
TOO_LONG: Final = ("context_length_exceeded", "body_too_large")
"""Codes of refusals that dropping turns may mend."""


class Message(BaseModel):
    """One message. role: as chat templates name it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class SavedChat(BaseModel):
    """The file of a saved conversation. model: which target wrote it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["outrider-chat"] = "outrider-chat"
    version: Literal[1] = 1
    model: str = ""
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]


class Said(Protocol):
    """A message, whatever else it has."""

    @property
    def role(self) -> str:
        """As chat templates name it."""

    @property
    def content(self) -> str:
        """Its text."""


AnyMessage = TypeVar("AnyMessage", bound=Said)


def turns_of(messages: Sequence[AnyMessage]) -> list[list[AnyMessage]]:
    """The messages after the system's, by turns: each begins with a user's message."""
    turns: list[list[AnyMessage]] = []
    for message in messages:
        if message.role == SYSTEM:
            continue
        if message.role == USER or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def without_oldest(messages: Sequence[AnyMessage], length: int | None, goal: int) -> tuple[list[AnyMessage], int]:
    """The messages without the oldest turns, at least one and never the last, so that about `goal` of `length` tokens
    are left; and how many turns went. length: None where it is not known; then half of the text goes.
    """
    turns = turns_of(messages)
    system = [message for message in messages if message.role == SYSTEM]
    sizes = [sum(len(message.content) for message in turn) + 1 for turn in turns]
    total = sum(sizes) + sum(len(message.content) for message in system)
    most = total * goal / length if length is not None else total / 2
    dropped = 0
    while dropped < len(turns) - 1 and (not dropped or total > most):
        total -= sizes[dropped]
        dropped += 1
    return [*system, *(message for turn in turns[dropped:] for message in turn)], dropped


async def render_fitting(
    messages: list[AnyMessage],
    render: Callable[[list[AnyMessage]], Awaitable[list[int]]],
    max_positions: int,
    max_tokens: int,
) -> tuple[list[AnyMessage], list[int], int]:
    """The messages whose ids leave room for an answer of `max_tokens`, their ids, and how many turns were dropped.

    render: gives the ids, or raises RequestError. The last turn stays, whatever its length.
    """
    reserved, num_dropped = min(max_tokens, int(max_positions * MAX_RESERVED_SHARE)), 0
    while len(messages) >= MAX_MESSAGES and len(turns_of(messages)) > 1:  # with the answer it is one more
        messages, dropped = without_oldest(messages, None, 0)
        num_dropped += dropped
    while True:
        is_last, length = len(turns_of(messages)) < 2, None
        try:
            tokens = await render(messages)
        except RequestError as error:
            if error.code not in TOO_LONG or is_last:
                raise
        else:
            length = len(tokens)
            if is_last or length + reserved <= max_positions:
                return messages, tokens, num_dropped
        messages, dropped = without_oldest(messages, length, int(max_positions * KEPT_SHARE))
        num_dropped += dropped


def save_chat(path: Path, messages: Sequence[Message], model: str) -> None:
    """Writes the conversation, for its owner's eyes only; replaces a saved one. ConfigError for any other file, and for
    more messages than one holds.
    """
    if len(messages) > MAX_MESSAGES:
        raise ConfigError(f"{len(messages)} messages are more than {MAX_MESSAGES}; the next turn drops the oldest")
    saved = SavedChat(model=model, messages=list(messages))
    try:
        if path.exists():  # raises, too, where a directory may not be searched
            try:
                load_chat(path)
            except ConfigError:
                raise ConfigError(f"{path} exists and is no saved chat; choose another name") from None
        write_private(path, f"{saved.model_dump_json(indent=2)}\n".encode())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat cannot be saved to {path}: {_why(error)}; choose another place") from None


def load_chat(path: Path) -> SavedChat:
    """Reads a saved conversation. Raises ConfigError for anything else."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {_why(error)}; name a chat that /save wrote") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; name a chat that /save wrote")
    try:
        saved = SavedChat.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path} is no saved chat: {place}: {first['msg']}; name a chat that /save wrote") from None
    if any(message.role == SYSTEM for message in saved.messages[1:]):
        raise ConfigError(
            f"{path} is no saved chat: a system message stands after others; name a chat that /save wrote"
        )
    return saved


def _why(error: OSError | ValueError) -> str:
    """In words. A ValueError is of a name with a NUL, which can be pasted."""
    return str(error.strerror if isinstance(error, OSError) else error)
