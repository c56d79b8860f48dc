"""Defines what requests are made of: the base of each message, types with their bounds, sampling, a grammar.

A request's numbers are JSON numbers: no booleans, no strings, and integers without a fraction. A list is refused at its
first wrong element, so that an answer never costs more than its request.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, JsonValue, Strict, model_validator

from outrider.models.picks.acceptance import Rule
from outrider.models.picks.sampling import MAX_SEED, SamplingParams

MAX_COUNT = 2**31 - 1
MAX_STOP_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 100
MAX_DEADLINE_MS = 86_400_000.0

TokenId = Annotated[int, Strict(), Field(ge=0, le=MAX_COUNT)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Priority = Annotated[int, Strict(), Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
DeadlineMs = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0.0, le=MAX_DEADLINE_MS)]
PRIORITY: Final = "higher is served first; at most the key's, which is also the default"
DEADLINE: Final = "from the request's arrival: work that still waits is refused, a text ends as it is; unset: none"
StopIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
"""An integer is a number; true, "1", NaN and Infinity are not."""
NO_NEAR_GREEDY: Final[dict[str, JsonValue]] = {
    "not": {"type": "number", "exclusiveMinimum": 0.0, "exclusiveMaximum": 0.0001}
}
"""Of a temperature's schema: `SamplingParams` refuses what lies between greedy and the smallest temperature."""


class StrictMessage(BaseModel):
    """A message without keys but its own; of unknown ones the first is named."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_key(cls, raw: Any) -> Any:
        # pydantic lists every unknown key: 32,000 take 50 ms.
        if isinstance(raw, dict) and len(raw) > len(cls.model_fields):
            known = {name: raw[name] for name in cls.model_fields if name in raw}
            unknown = next(key for key in raw if key not in known)
            return known | {unknown: raw[unknown]}
        return raw


class SamplingFields(StrictMessage):
    """Sampling parameters, with the ranges of `SamplingParams`; NaN and infinities are refused."""

    temperature: Number = Field(default=0.0, ge=0.0, le=100.0, json_schema_extra=NO_NEAR_GREEDY)
    top_k: Integer = Field(default=0, ge=-1, le=MAX_COUNT, description="0 or -1: off")
    top_p: Number = Field(default=1.0, gt=0.0, le=1.0)
    min_p: Number = Field(default=0.0, ge=0.0, le=1.0)
    seed: Integer = Field(default=0, ge=0, le=MAX_SEED)

    def sampling(self) -> SamplingParams:
        """The sampler's parameters; raises SamplingError."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


MAX_GRAMMAR_CHARS: Final = 64 * 1024


class GrammarField(StrictMessage):
    """The texts that a request allows: `GrammarSpec` has what each kind's text is, and the bounds of each."""

    kind: Literal["json_schema", "json_object", "regex", "grammar", "choice"]
    text: str = Field(default="", max_length=MAX_GRAMMAR_CHARS, examples=['{"type":"object"}'])
    after: str = Field(
        default="", max_length=128, description="the token that the grammar begins after; unset: at once"
    )
    opener: str = Field(
        default="",
        max_length=128,
        description="with `after`: a text that does not begin with this token has none of it",
    )


class Answer(BaseModel):
    """What a server says: unknown keys are ignored, so that a newer server can talk to an older agent."""

    model_config = ConfigDict(extra="ignore", frozen=True)


SALT: Final = "requests with another salt share nothing that is kept of this one: no prompt, text or prefix"
STEP: Final = "measured decode step of the target, nothing drafted"
DRAFT_TOKEN: Final = "measured extra time of a drafted token in a step"
TARGET = "identity of the target: a text is finished by the one that began it"


# Inline: one field needs no component of its own in the OpenAPI document.
def rule_schema(*rules: Rule) -> dict[str, JsonValue]:
    """The JSON schema of a field that takes these rules."""
    return {"title": "Rule", "type": "string", "enum": [rule.value for rule in rules]}
