"""Defines the messages of POST /v1/verify: prefixes with drafts, and what the target makes of them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AllowInfNan, Field, Strict, StrictBool, WithJsonSchema

from outrider.models.picks.acceptance import DEFAULT_DELTA, MAX_DELTA, Rule
from outrider.models.picks.rejection import MAX_IDS, WHOLE
from outrider.models.wire.fields import (
    DEADLINE,
    DRAFT_TOKEN,
    MAX_COUNT,
    MODEL,
    PRIORITY,
    SALT,
    STEP,
    TARGET,
    Answer,
    DeadlineMs,
    GrammarField,
    Integer,
    ModelName,
    Priority,
    ProcessorFields,
    SamplingFields,
    StopIds,
    StrictMessage,
    TokenId,
    TokenIds,
    rule_schema,
)
from outrider.models.wire.protocol import MAX_PATH_TOKENS, MAX_VERIFY_ITEMS, ErrorBody

RuleField = Annotated[Rule, WithJsonSchema(rule_schema(*Rule))]
Delta = Annotated[float, Strict(), AllowInfNan(False), Field(ge=-MAX_DELTA, le=MAX_DELTA)]
DELTA: Final = f"tolerance: accept while log p >= log q - delta, in nats; unset: {DEFAULT_DELTA}"
# Ids and their weights in turn: 12, 40000, 5, 25536.
_Distribution = Annotated[list[TokenId], Field(fail_fast=True, min_length=2, max_length=2 * MAX_IDS)]
Distributions = Annotated[list[_Distribution], Field(fail_fast=True, max_length=MAX_PATH_TOKENS)]
DISTRIBUTIONS: Final = (
    f"rejection: what each drafted token was drawn from: ids, each followed by its weight; weights sum to {WHOLE}"
)
_LogQ = Annotated[float, Strict(), AllowInfNan(False), Field(le=0.0)]
LogQs = Annotated[list[_LogQ], Field(fail_fast=True, max_length=MAX_PATH_TOKENS)]
LOG_QS: Final = "tolerance: the draft's log-probability of each drafted token"
LOSSY: Final = "true where the text may differ from the target's, also in distribution: the rule is tolerance"


class VerifyItem(SamplingFields, ProcessorFields):
    """A stateless verification: a prefix and a draft. The prefix is given by its tokens, or by a hash that the server
    holds.

    With both, `prefix` holds the tokens that follow the hashed prefix.
    """

    prefix: TokenIds = Field(default_factory=list, examples=[[12, 5, 80]])
    prefix_hash: str | None = Field(default=None, max_length=64)
    draft: TokenIds = Field(default_factory=list, max_length=MAX_PATH_TOKENS)
    rule: RuleField = Rule.COUPLED
    draft_q: Distributions | None = Field(default=None, description=DISTRIBUTIONS)
    draft_log_q: LogQs | None = Field(default=None, description=LOG_QS)
    delta: Delta | None = Field(default=None, description=DELTA)
    max_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT, description="commit at most this many")
    stop_ids: StopIds | None = None
    ignore_eos: StrictBool = False
    grammar: GrammarField | None = Field(default=None, description="the texts that are allowed; unset: all")


class VerifyRequest(StrictMessage):
    """POST /v1/verify. Items of one call, and of concurrent calls, share engine steps."""

    items: Annotated[list[VerifyItem], Field(fail_fast=True, min_length=1, max_length=MAX_VERIFY_ITEMS)]
    tokenizer: str | None = None
    priority: Priority | None = Field(default=None, description=PRIORITY)
    deadline_ms: DeadlineMs | None = Field(default=None, description=DEADLINE)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=64, description=SALT)
    model: ModelName | None = Field(default=None, description=MODEL)


class VerifyResult(Answer):
    """The answer to one item: `tokens` are the accepted drafted tokens and the one that follows them; or `error`.

    prefix_hash names prefix + tokens, which the server holds for a while: send it next time in place of the tokens.
    """

    accepted: int = 0
    tokens: list[int] = Field(default_factory=list)
    finish_reason: Literal["stop", "length", "context"] | None = None
    prefix_hash: str | None = None
    error: ErrorBody | None = None
    tested: int | None = Field(default=None, description="drafted tokens judged; where the rule is one of the below")
    rule: str | None = Field(default=None, description="rejection or tolerance, where it is one of these")
    lossy: bool | None = Field(default=None, description=LOSSY)


class VerifyAnswer(Answer):
    """Results in the order of the items. `error` is set when every item failed with one HTTP status, the answer's."""

    results: list[VerifyResult]
    error: ErrorBody | None = None
    model: str | None = None
    target: str | None = Field(default=None, description=TARGET)
    step_ms: float | None = Field(default=None, description=STEP)
    draft_token_ms: float | None = Field(default=None, description=DRAFT_TOKEN)
