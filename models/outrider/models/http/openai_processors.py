"""Defines the logit processors in the OpenAI-compatible messages; null means the default.

`presence_penalty`, `frequency_penalty` and `logit_bias` are OpenAI's; the others are vLLM's and llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import BaseModel, Field

from outrider.models.processors.options import ProcessorOptions
from outrider.models.wire.processor_fields import (
    MAX_BAD_WORDS,
    AllowedIds,
    Fraction,
    LogitBias,
    MinTokens,
    RepetitionPenalty,
    TextPenalty,
    TypicalP,
)

MAX_BAD_STRINGS: Final = MAX_BAD_WORDS // 2
"""Each may become two token sequences."""
MAX_BAD_CHARS: Final = 256

BadStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_CHARS)]],
    Field(fail_fast=True, max_length=MAX_BAD_STRINGS),
]


class RuleParameters(BaseModel):
    """Logit processors of a completion, as `ProcessorFields`, but bad words are texts."""

    repetition_penalty: RepetitionPenalty | None = Field(default=None, description="of ids in prompt or text; 1: off")
    presence_penalty: TextPenalty | None = None
    frequency_penalty: TextPenalty | None = None
    logit_bias: LogitBias | None = Field(default=None, description="added to logits, by token id")
    bad_words: BadStrings | None = Field(default=None, description="words that the text never has")
    min_tokens: MinTokens | None = Field(default=None, description="tokens of text before an id may end it")
    allowed_token_ids: AllowedIds | None = Field(default=None, description="the only ids of the text")
    typical_p: TypicalP | None = None
    xtc_probability: Fraction | None = Field(default=None, description="chance that XTC excludes top choices; 0: off")
    xtc_threshold: Fraction | None = Field(
        default=None, description="of XTC: least probability of a top choice; 0.1 if unset"
    )

    def processors(self, bad_ids: Sequence[Sequence[int]] = ()) -> ProcessorOptions:
        """The processors. bad_ids: `bad_words` as token ids. Raises SamplingError."""
        return ProcessorOptions(
            _or(self.repetition_penalty, 1.0),
            _or(self.presence_penalty, 0.0),
            _or(self.frequency_penalty, 0.0),
            tuple((self.logit_bias or {}).items()),
            tuple(map(tuple, bad_ids)),
            self.min_tokens or 0,
            None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            _or(self.typical_p, 1.0),
            _or(self.xtc_probability, 0.0),
            _or(self.xtc_threshold, 0.1),
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
