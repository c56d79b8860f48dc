"""Defines the wire's fields of logit processors, with their limits: penalties, bias, forbidden and allowed ids.

Their meaning is that of `processors.options.ProcessorOptions`, which `processors.options_fields` makes of them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from outrider.models.wire.fields import MAX_COUNT, Number, TokenId

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
