"""Defines the wire: every message between agent and verifier, as pydantic models.

Both sides import it, so it stays light: no server, no engine, no model library. Unknown keys are refused in requests
and ignored in answers, so that a newer server can talk to an older agent. Everything is JSON; only token ids cross,
and, in /v1/verify, probabilities where the acceptance rule is rejection or tolerance. docs/protocol.md shows each
message by example, with its bytes.

A request's numbers are JSON numbers: no booleans, no strings, and integers without a fraction. A list is refused at its
first wrong element, so that an answer never costs more than its request.

Positions: a session's `prompt` holds every token before the first one to generate, also those that an earlier session
committed when one is resumed. `base` counts tokens committed *in this session*.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    AllowInfNan,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    Strict,
    StrictBool,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json

from outrider.models.bundle.manifest import Count, Sha256, Share
from outrider.models.errors import RequestError
from outrider.models.picks.acceptance import DEFAULT_DELTA, MAX_DELTA, Rule
from outrider.models.picks.rejection import MAX_IDS, WHOLE
from outrider.models.picks.sampling import MAX_SEED, SamplingParams
from outrider.models.wire.processor_fields import ProcessorFields
from outrider.models.wire.strict_message import StrictMessage

PROTOCOL_VERSION = 2
TREES_SINCE = 2
"""The version since which drafts may be trees (`tree_draft`); the path form stays."""
TARGET_HEADER = "Outrider-Target"
"""Header of a request that goes on with a text: the target that began it, for who chooses among replicas."""
MAX_PATHS = 8
MAX_PATH_TOKENS = 64
MAX_VERIFY_ITEMS = 256
MAX_STOP_IDS = 1024
MAX_COUNT = 2**31 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_PREDICTION_TOKENS = 1 << 14
"""As many as the target's drafts take of an earlier text."""
MAX_PRIORITY = 100
MAX_BODY_BYTES = 1 << 20
"""Of a request, as servers take it unless they are told otherwise: parsing more would delay every stream."""
MAX_DEADLINE_MS = 86_400_000.0
DRAFT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Pattern of an offered draft's name: one plain part of a path."""

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


# Inline: one field needs no component of its own in the OpenAPI document.
def _rule_schema(*rules: Rule) -> dict[str, JsonValue]:
    return {"title": "Rule", "type": "string", "enum": [rule.value for rule in rules]}


_RuleField = Annotated[Rule, WithJsonSchema(_rule_schema(*Rule))]
_SALT: Final = "requests with another salt share nothing that is kept of this one: no prompt, text or prefix"
_STEP: Final = "measured decode step of the target, nothing drafted"
_DRAFT_TOKEN: Final = "measured extra time of a drafted token in a step"
_MID: Final = "in a cascade: the model that verifies first; the text is the target's"
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
_TARGET = "identity of the target: a text is finished by the one that began it"
EndReason = Literal["stop", "length", "context", "cancelled", "shutdown", "deadline", "error"]


class _Request(StrictMessage):
    model_config = ConfigDict(frozen=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


LOSSY: Final = "true where the text may differ from the target's, also in distribution: the rule is tolerance"
NO_NEAR_GREEDY: Final[dict[str, JsonValue]] = {
    "not": {"type": "number", "exclusiveMinimum": 0.0, "exclusiveMaximum": 0.0001}
}
"""Of a temperature's schema: `SamplingParams` refuses what lies between greedy and the smallest temperature."""


class SamplingFields(_Request):
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


class GrammarField(_Request):
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


class SessionRequest(SamplingFields, ProcessorFields):
    """POST /v1/sessions. Answered by an event stream of SessionOpen, Commit..., SessionEnd.

    With `prefix_hash`, `prompt` holds the tokens that follow the hashed prefix. Servers that know neither `prefix_hash`
    nor `keep_prefix` refuse them as unknown fields.
    """

    prompt: TokenIds = Field(min_length=1, examples=[[12, 5, 80]])
    max_tokens: Integer = Field(ge=1, le=MAX_COUNT, examples=[80])
    stop_ids: StopIds | None = Field(default=None, description="end after one of these, beside the model's own")
    ignore_eos: StrictBool = Field(default=False, description="do not end at the model's own end token")
    patience_ms: Number | None = Field(
        default=None, ge=0.0, description="longest wait for a draft; 0 never waits; unset: the server chooses"
    )
    draft_lag_ms: Number | None = Field(
        default=None,
        ge=0.0,
        le=60_000.0,
        description="a hint: time from a commit to the drafts that know of it; also measured",
    )
    tokenizer: str | None = Field(
        default=None, description="the agent's tokenizer fingerprint; a different one is refused"
    )
    prefix_hash: str | None = Field(
        default=None, max_length=64, description="stands for the tokens before `prompt`, once; a 409 asks for them"
    )
    keep_prefix: StrictBool = Field(
        default=False, description="keep prompt and text for a while; the end names them by a hash"
    )
    grammar: GrammarField | None = Field(default=None, description="the texts that are allowed; unset: all")
    priority: Priority | None = Field(default=None, description=PRIORITY)
    deadline_ms: DeadlineMs | None = Field(default=None, description=DEADLINE)
    provisional: StrictBool = Field(
        default=False, description="of a cascade: also send tokens that the target has not confirmed, marked"
    )
    cache_salt: str | None = Field(default=None, min_length=1, max_length=64, description=_SALT)
    stop: StopStrings = Field(default_factory=list, description="end where the text has one of these")
    logprobs: Integer | None = Field(
        default=None, ge=0, le=MAX_TOP_LOGPROBS, description="report each token's, and so many of the likeliest"
    )
    prediction: Annotated[TokenIds, Field(max_length=MAX_PREDICTION_TOKENS)] = Field(
        default_factory=list, description="what the text may repeat from here on: a hint, drafted from"
    )
    rule: Annotated[Literal[Rule.COUPLED, Rule.GREEDY], WithJsonSchema(_rule_schema(Rule.COUPLED, Rule.GREEDY))] = (
        Rule.COUPLED
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_judging_rules(cls, raw: Any) -> Any:
        """First of all: never another rule in silence, and no advice about the fields that such a request also has."""
        if isinstance(raw, dict) and raw.get("rule") in (Rule.REJECTION, Rule.TOLERANCE):
            raise RequestError(
                "unsupported_rule",
                f"sessions do not verify by the rule {raw['rule']}; send blocks to /v1/verify, or use coupled",
            )
        return raw


class SessionOpen(_Answer):
    """First event of a session's stream."""

    type: Literal["open"] = "open"
    session: str
    model: str
    protocol: int = PROTOCOL_VERSION
    stop_ids: list[int] = Field(default_factory=list, description="the ids after which this session ends")
    max_positions: int | None = Field(default=None, description="tokens, prompt included, at which it ends")
    step_ms: float | None = Field(default=None, description=_STEP)
    draft_token_ms: float | None = Field(default=None, description=_DRAFT_TOKEN)
    vocab_size: int | None = Field(default=None, ge=1, description="every committed id is below it")
    target: str | None = Field(default=None, description=_TARGET)
    keep_alive_s: float | None = Field(default=None, description="the stream is never silent for longer")
    mid: str | None = Field(default=None, description=_MID)
    recent_tokens: int | None = Field(
        default=None, ge=1, description="of the text that this prompt got before, which the server drafts from"
    )


class TokenLogprob(_Answer):
    """Of one token. top: the likeliest tokens with theirs, best first.

    Natural logarithms of the model's own probabilities: temperature 1, before penalties, biases, grammars and top-k or
    top-p. -9999 stands for a probability of 0.
    """

    logprob: float
    top: list[tuple[int, float]] = Field(default_factory=list)


class Commit(_Answer):
    """Tokens that the target has committed. `base` is how many were committed before them.

    The target accepted `accepted` of `proposed` drafted tokens in this pass; both are left out of the JSON when nothing
    was proposed. Of those accepted, the server's prompt lookup guessed `looked_up`; left out when 0. `type` is always
    left out: most events are commits, and an event without a type is one.

    provisional: a cascade's mid-size verifier has committed these tokens and the target has not. They replace earlier
    provisional tokens from `base` on. A commit without the mark is final; provisional tokens that it contradicts, and
    all after them, are void. Sent only where the session asks for it; left out when false.

    step_ms, draft_token_ms: sent where they are no longer what the session's last such message said.
    """

    type: Literal["commit"] = "commit"
    base: int
    tokens: list[int]
    accepted: int = 0
    proposed: int = 0
    looked_up: int = 0
    provisional: bool = False
    logprobs: list[TokenLogprob] | None = Field(default=None, description="of each token, where they were asked for")
    step_ms: float | None = Field(default=None, description=_STEP)
    draft_token_ms: float | None = Field(default=None, description=_DRAFT_TOKEN)


class Usage(_Answer):
    """What a session took. target_passes counts forward passes that committed tokens, not prompt chunks.

    looked_up_tokens: of the accepted tokens, those that the server's prompt lookup guessed.
    """

    prompt_tokens: int
    completion_tokens: int
    target_passes: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    cached_prompt_tokens: int = 0
    waited_ms: float = 0.0
    looked_up_tokens: int = 0


class TextCut(_Answer):
    """Where a stop string ends a text: the tokens of this session up to the one that completes it, and the characters
    before it, counted from the text's first token (the first of `generated`).
    """

    stop: str
    tokens: int
    chars: int


class SessionEnd(_Answer):
    """Last event of a session's stream. `error` is set when reason is "error", `cut` when a stop string ended the text.

    prefix_hash names prompt and text, which the server holds for a while: set where `keep_prefix` asked for it and the
    reason is "stop" or "length".
    """

    type: Literal["end"] = "end"
    reason: EndReason
    usage: Usage
    error: ErrorBody | None = None
    prefix_hash: str | None = None
    cut: TextCut | None = None


class DraftRequest(_Request):
    """POST /v1/sessions/{id}/drafts: the device's guesses.

    base: tokens the device has seen committed in this session. paths: whole guesses of what follows, likeliest first.
    Self-contained and idempotent: loss, duplication and reordering are harmless. Answered 204, or 409 `stale_draft`
    when every path contradicts newer commits. An agent ignores that: those commits are on their way to it.
    """

    base: Integer = Field(ge=0, le=MAX_COUNT)
    paths: Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_PATH_TOKENS)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_PATHS),
    ]


class VerifyItem(SamplingFields, ProcessorFields):
    """A stateless verification: a prefix and a draft. The prefix is given by its tokens, or by a hash that the server
    holds.

    With both, `prefix` holds the tokens that follow the hashed prefix.
    """

    prefix: TokenIds = Field(default_factory=list, examples=[[12, 5, 80]])
    prefix_hash: str | None = Field(default=None, max_length=64)
    draft: TokenIds = Field(default_factory=list, max_length=MAX_PATH_TOKENS)
    rule: _RuleField = Rule.COUPLED
    draft_q: Distributions | None = Field(default=None, description=DISTRIBUTIONS)
    draft_log_q: LogQs | None = Field(default=None, description=LOG_QS)
    delta: Delta | None = Field(default=None, description=DELTA)
    max_tokens: Integer | None = Field(default=None, ge=1, le=MAX_COUNT, description="commit at most this many")
    stop_ids: StopIds | None = None
    ignore_eos: StrictBool = False
    grammar: GrammarField | None = Field(default=None, description="the texts that are allowed; unset: all")


class VerifyRequest(_Request):
    """POST /v1/verify. Items of one call, and of concurrent calls, share engine steps."""

    items: Annotated[list[VerifyItem], Field(fail_fast=True, min_length=1, max_length=MAX_VERIFY_ITEMS)]
    tokenizer: str | None = None
    priority: Priority | None = Field(default=None, description=PRIORITY)
    deadline_ms: DeadlineMs | None = Field(default=None, description=DEADLINE)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=64, description=_SALT)


class ErrorBody(_Answer):
    """An error: `code` is stable and for programs, `message` is for people, `param` names the wrong field."""

    code: str
    message: str
    type: str = "invalid_request_error"
    param: str | None = None


class ErrorAnswer(_Answer):
    """The one JSON shape of every error. request_id: as in `X-Request-Id`, for the server's log."""

    error: ErrorBody
    request_id: str | None = None


class VerifyResult(_Answer):
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


class VerifyAnswer(_Answer):
    """Results in the order of the items. `error` is set when every item failed with one HTTP status, the answer's."""

    results: list[VerifyResult]
    error: ErrorBody | None = None
    model: str | None = None
    target: str | None = Field(default=None, description=_TARGET)
    step_ms: float | None = Field(default=None, description=_STEP)
    draft_token_ms: float | None = Field(default=None, description=_DRAFT_TOKEN)


class ReadyAnswer(_Answer):
    """GET /health/ready: what an agent needs to choose an endpoint."""

    status: Literal["ready", "draining", "failed"]
    model: str
    queue_depth: int = 0
    running: int = 0
    free_block_share: float = 1.0
    step_ms: float | None = None
    draft_token_ms: float | None = None
    target: str | None = Field(default=None, description=_TARGET)


class RenderAnswer(_Answer):
    """POST /v1/render: the prompt's token ids, special tokens included. model, target: whose template it was."""

    tokens: list[int]
    model: str
    target: str | None = Field(default=None, description=_TARGET)


class ModelFacts(_Answer):
    """GET /v1/model: what an agent checks before it drafts for this target, and what its user may want to know."""

    name: str
    protocol: int = PROTOCOL_VERSION
    tokenizer: str
    vocab_size: int
    max_positions: int
    eos_token_ids: list[int]
    has_chat_template: bool
    target: str | None = Field(default=None, description=_TARGET)
    bundle: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    precision: str | None = None
    runtime: str | None = None
    is_widened: bool = False
    mid: str | None = Field(default=None, description=_MID)
    tool_calls: str | None = Field(default=None, description="format of its tool calls: hermes, llama or mistral")
    has_reasoning: bool = Field(default=False, description="its chat template marks reasoning by <think>")


class OfferedFile(_Answer):
    """A file of a draft. path: relative to the bundle; sha256: of its bytes, also its ETag."""

    path: str = Field(min_length=1, max_length=512)
    size: Count
    sha256: Sha256


class OfferedDraft(_Answer):
    """A draft that the server offers for its target.

    name: the draft's in paths, unique on this server. model: the bundle's own name. acceptance: share of drafted tokens
    that this target accepted at temperature 0.8, from the draft's card; None where it has no such measurement.
    files: `manifest.json` first.
    """

    name: str = Field(pattern=DRAFT_NAME)
    model: str
    device: str
    runtime: str
    precision: str
    size_bytes: Count
    acceptance: Share | None = None
    files: list[OfferedFile] = Field(min_length=1)


class DraftList(_Answer):
    """GET /v1/drafts: the drafts for the served target. Each file is at /v1/drafts/{name}/{path}."""

    model: str
    target: str | None = Field(default=None, description=_TARGET)
    tokenizer: str = Field(description="fingerprint; every draft here has it")
    drafts: list[OfferedDraft]


SessionEnd.model_rebuild()

SessionEvent = SessionOpen | Commit | SessionEnd


def parse_event(data: str | bytes) -> SessionEvent:
    """Parses one event of a session's stream, from what follows `data: `. Raises ValueError on anything else;
    pydantic's ValidationError is one.
    """
    raw = from_json(data)
    kind = raw.get("type", "commit") if isinstance(raw, dict) else None
    for message in (Commit, SessionOpen, SessionEnd):
        if kind == message.model_fields["type"].default:
            return message.model_validate(raw)
    raise ValueError(f"the event has type {kind!r}; expected open, commit or end")
