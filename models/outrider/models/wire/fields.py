"""Defines what requests are made of: a message, types with their bounds, sampling, logit processors, a grammar.

A request's numbers are JSON numbers: no booleans, no strings, and integers without a fraction. A list is refused at its
first wrong element, so that an answer never costs more than its request. Fields of logit processors mean what
`processors.options.ProcessorOptions` says, which is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    Strict,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.models.errors import RequestError
from outrider.models.picks.acceptance import Rule
from outrider.models.picks.sampling import MAX_SEED, SamplingParams

MAX_COUNT = 2**31 - 1
MAX_STOP_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 100
MAX_MODEL_CHARS = 256
MAX_DEADLINE_MS = 86_400_000.0

TokenId = Annotated[int, Strict(), Field(ge=0, le=MAX_COUNT)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Priority = Annotated[int, Strict(), Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
DeadlineMs = Annotated[float, Strict(), AllowInfNan(False), Field(gt=0.0, le=MAX_DEADLINE_MS)]
PRIORITY: Final = "higher is served first; at most the key's, which is also the default"
DEADLINE: Final = "from the request's arrival: work that still waits is refused, a text ends as it is; unset: none"
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
MODEL: Final = "the served model, or one of its adapters; unset: the served model"
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


def require_ids(ids: Collection[int], field: str, vocab_size: int) -> None:
    """Raises RequestError 400 `token_out_of_range`, about this field, where the vocabulary lacks an id."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        found = next(each for each in ids if not 0 <= each < vocab_size)
        raise RequestError(
            "token_out_of_range",
            f"{field} has token id {found}; this model's ids are 0 to {vocab_size - 1}",
            param=field,
        )


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


MIN_REPETITION: Final = 0.01
MAX_REPETITION: Final = 100.0
MAX_PENALTY: Final = 2.0
MAX_BIAS: Final = 100.0
MAX_BIASES: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 32
MAX_ALLOWED_IDS: Final = 8192
MAX_MIN_TOKENS: Final = MAX_COUNT

_ID_PATTERN: Final = "^(0|[1-9][0-9]{0,8})$"


def _biases(value: Any) -> dict[int, float]:
    """Refused at its first fault. pydantic would list one for each entry."""
    if not isinstance(value, dict):
        raise PydanticCustomError("wrong_shape", "expected an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", "expected at most {limit} token ids", {"limit": MAX_BIASES})
    found: dict[int, float] = {}
    for key, addend in value.items():
        token = str(key)
        is_id = token.isascii() and token.isdecimal() and len(token) <= 9 and (token == "0" or token[0] != "0")
        is_number = isinstance(addend, int | float) and not isinstance(addend, bool)
        if not is_id:
            raise PydanticCustomError("wrong_key", 'expected token ids as keys, such as "12"')
        if not is_number or math.isnan(addend) or abs(addend) > MAX_BIAS:
            raise PydanticCustomError("wrong_value", "expected numbers from -100 to 100")
        found[int(token)] = float(addend)
    return found


LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_biases),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": _ID_PATTERN},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        }
    ),
    PlainSerializer(lambda biases: {str(token): addend for token, addend in biases.items()}),
]
BadWords = Annotated[
    list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_BAD_WORD_TOKENS)]],
    Field(fail_fast=True, max_length=MAX_BAD_WORDS),
]
AllowedIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_IDS)]
RepetitionPenalty = Annotated[Number, Field(ge=MIN_REPETITION, le=MAX_REPETITION)]
TextPenalty = Annotated[Number, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
MinTokens = TokenId
TypicalP = Annotated[Number, Field(gt=0.0, le=1.0)]
Fraction = Annotated[Number, Field(ge=0.0, le=1.0)]


class ProcessorFields(BaseModel):
    """Rules on rows of logits, as sessions and /v1/verify have them; the defaults change nothing."""

    repetition_penalty: RepetitionPenalty = Field(default=1.0, description="of ids in prompt or text; 1: off")
    presence_penalty: TextPenalty = Field(default=0.0, description="of ids in the text; 0: off")
    frequency_penalty: TextPenalty = Field(default=0.0, description="for each time that an id is in the text; 0: off")
    logit_bias: LogitBias = Field(default_factory=dict, description="added to logits, by token id")
    bad_words: BadWords = Field(default_factory=list, description="token sequences that the text never has")
    min_tokens: MinTokens = Field(default=0, description="tokens of text before an id may end it")
    allowed_token_ids: AllowedIds | None = Field(default=None, description="the only ids of the text; unset: all")
    typical_p: TypicalP = Field(default=1.0, description="locally typical sampling; 1: off")
    xtc_probability: Fraction = Field(default=0.0, description="chance that XTC excludes top choices; 0: off")
    xtc_threshold: Fraction = Field(default=0.1, description="of XTC: least probability of a top choice")
    generated: MinTokens = Field(
        default=0, description="of a resumed text: how many tokens before the first new one are text, not prompt"
    )


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
