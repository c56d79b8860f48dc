"""Defines the page's request and the events that answer it."""

from __future__ import annotations

import math
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from outrider.edge.drafting.calibration import LOOKUP_RANK
from outrider.models.http.openai import Messages
from outrider.models.picks.sampling import MAX_SEED, SamplingParams
from outrider.models.wire.fields import Integer, Number, StrictMessage
from outrider.models.wire.protocol import ErrorBody

MAX_TOKENS: Final = 4096
MAX_ROUND_TRIP_MS: Final = 500.0
"""Longest artificial round trip: a text with it takes that much longer to use its place."""

Origin = Literal["draft", "alternative", "lookup", "target", "unverified"]
"""Who produced a token first. draft: the draft's first guess, accepted. alternative: another of its guesses, accepted
or picked by the target itself; what was drafted after it stays. lookup: a copy of an earlier passage, made here or by
the server, accepted. target: the target. unverified: the draft alone, while no cloud answered."""

Span = tuple[float, float, int]
"""When something began and ended, ms since the text's begin, and how many tokens or bytes it was about."""


class PageRequest(StrictMessage):
    """POST /v1/outrider/generate. Of prompt and messages exactly one. round_trip_ms: added to that of the link."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    prompt: str | None = Field(default=None, min_length=1)
    messages: Messages | None = None
    max_tokens: Integer = Field(default=128, ge=1, le=MAX_TOKENS)
    temperature: Number = Field(default=0.8, ge=0.0, le=100.0)
    seed: Integer = Field(ge=0, le=MAX_SEED)
    is_drafted: StrictBool = True
    round_trip_ms: Number = Field(default=0.0, ge=0.0, le=MAX_ROUND_TRIP_MS)

    @model_validator(mode="after")
    def _one_of_both(self) -> PageRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self

    def params(self) -> SamplingParams:
        """The sampler's parameters."""
        return SamplingParams(self.temperature, seed=self.seed)


class PageInfo(BaseModel):
    """GET /v1/outrider/info: what the page shows before the first text. is_up: whether a cloud answers.

    model: the draft's name where none does.
    """

    model: str
    is_up: bool = True
    has_chat_template: bool
    max_positions: int
    draft: str
    max_tokens: int = MAX_TOKENS
    max_round_trip_ms: float = MAX_ROUND_TRIP_MS


class ShownToken(BaseModel):
    """text: what the token adds; may be empty. rank: of the device's guess; none: it had not guessed the token."""

    id: int
    text: str
    origin: Origin
    rank: int | None = None


class CommitEvent(BaseModel):
    """A pass of the target, or what the draft wrote alone."""

    type: Literal["commit"] = "commit"
    at_ms: float
    tokens: list[ShownToken]
    accepted: int


class ShownGuess(BaseModel):
    """A node of the tree. parent: its place in the list; -1: it follows the cursor."""

    id: int
    text: str
    parent: int
    reach: float
    rank: int
    is_sent: bool


class StateEvent(BaseModel):
    """What the device does. drafts, posts, passes: since the last state; begin and end in ms, and tokens or bytes."""

    type: Literal["state"] = "state"
    at_ms: float
    tree: list[ShownGuess]
    drafts: list[Span]
    posts: list[Span]
    passes: list[Span]
    round_trip_ms: float | None = None
    step_ms: float | None = None
    draft_ms: float | None = None


class EndEvent(BaseModel):
    """The finished text. text: what was held back. id: for POST /v1/outrider/verify, where tokens are unverified.

    eased_by: why half was drafted. failed_drafts: drafts that have failed and are left out for now.
    """

    type: Literal["end"] = "end"
    at_ms: float
    text: str
    finish_reason: str
    num_tokens: int
    num_prompt: int
    passes: int
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    draft_error: str | None = None
    id: str | None = None
    num_unverified: int = 0
    eased_by: str | None = None
    failed_drafts: list[str] = []


class DroppedEvent(BaseModel):
    """The first event where the context was full: the oldest turns, which are the first messages, were left out."""

    type: Literal["dropped"] = "dropped"
    num_turns: int
    num_messages: int
    max_positions: int


class ShownPassage(BaseModel):
    """A passage of a document in the prompt. Lines count from 1."""

    document: str
    first_line: int
    last_line: int


class PassagesEvent(BaseModel):
    """What stands before the prompt, where the server has documents."""

    type: Literal["passages"] = "passages"
    passages: list[ShownPassage]


class ErrorEvent(BaseModel):
    """The text ends here."""

    type: Literal["error"] = "error"
    error: ErrorBody


def origin_of(index: int, num_accepted: int, rank: int | None) -> Origin:
    """Of the token at `index` of a commit. rank: of the device's guess, if it had one."""
    if rank is not None and 0 < rank < LOOKUP_RANK:
        return "alternative"
    if index >= num_accepted:
        return "target"
    return "draft" if rank == 0 else "lookup"


def finite(value: float) -> float | None:
    """None for what JSON lacks; one decimal is enough for a screen."""
    return round(value, 1) if math.isfinite(value) else None
