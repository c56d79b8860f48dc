"""Defines the wire: every message between agent and verifier, as pydantic models.

Both sides import it, so it stays light: no server, no engine, no model library. Unknown keys are refused in requests
and ignored in answers, so that a newer server can talk to an older agent. Everything is JSON; only token ids cross,
and, in /v1/verify, probabilities where the acceptance rule is rejection or tolerance. docs/protocol.md shows each
message by example, with its bytes.

Positions: a session's `prompt` holds every token before the first one to generate, also those that an earlier session
committed when one is resumed. `base` counts tokens committed *in this session*.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    Field,
    StrictBool,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import from_json

from outrider.models.errors import RequestError
from outrider.models.picks.acceptance import Rule
from outrider.models.wire.fields import (
    DEADLINE,
    DRAFT_TOKEN,
    MAX_COUNT,
    MAX_TOP_LOGPROBS,
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
    Number,
    Priority,
    ProcessorFields,
    SamplingFields,
    StopIds,
    StopStrings,
    StrictMessage,
    TokenId,
    TokenIds,
    rule_schema,
)
from outrider.models.wire.steady import SteadyPace

PROTOCOL_VERSION = 3
TREES_SINCE = 2
"""The version since which drafts may be trees (`tree_draft`); the path form stays."""
TURNS_SINCE = 3
"""The version since which a device may ask the verifier to wait for its next message (`TreeDraft.is_turn`)."""
LONG_SINCE = 3
"""The version since which a session's trees may go up one long request (`draft_stream`); single messages stay."""
TARGET_HEADER = "Outrider-Target"
"""Header of a request that goes on with a text: the target that began it, for who chooses among replicas."""
MAX_PATHS = 8
MAX_PATH_TOKENS = 64
MAX_VERIFY_ITEMS = 256
MAX_PREDICTION_TOKENS = 1 << 14
"""As many as the target's drafts take of an earlier text."""
MAX_DRAFT_LAG_MS = 60_000.0
MAX_BODY_BYTES = 1 << 20
"""Of a request, as servers take it unless they are told otherwise: parsing more would delay every stream."""


_MID: Final = "in a cascade: the model that verifies first; the text is the target's"
_TAKEN: Final = "messages of the long request read so far, and the ms for which the newest was held until this event"
_REFUSED: Final = "numbers, from 1 on, of messages among these that were dropped: send their nodes again"
EndReason = Literal["stop", "length", "context", "cancelled", "shutdown", "deadline", "error"]


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
        le=MAX_DRAFT_LAG_MS,
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
    cache_salt: str | None = Field(default=None, min_length=1, max_length=64, description=SALT)
    stop: StopStrings = Field(default_factory=list, description="end where the text has one of these")
    logprobs: Integer | None = Field(
        default=None, ge=0, le=MAX_TOP_LOGPROBS, description="report each token's, and so many of the likeliest"
    )
    prediction: Annotated[TokenIds, Field(max_length=MAX_PREDICTION_TOKENS)] = Field(
        default_factory=list, description="what the text may repeat from here on: a hint, drafted from"
    )
    rule: Annotated[Literal[Rule.COUPLED, Rule.GREEDY], WithJsonSchema(rule_schema(Rule.COUPLED, Rule.GREEDY))] = (
        Rule.COUPLED
    )
    steady: StrictBool = Field(
        default=False, description="frames of one size at a fixed pace in both directions; drafts up one long request"
    )
    model: ModelName | None = Field(default=None, description=MODEL)

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


class SessionOpen(Answer):
    """First event of a session's stream."""

    type: Literal["open"] = "open"
    session: str
    model: str
    protocol: int = PROTOCOL_VERSION
    stop_ids: list[int] = Field(default_factory=list, description="the ids after which this session ends")
    max_positions: int | None = Field(default=None, description="tokens, prompt included, at which it ends")
    step_ms: float | None = Field(default=None, description=STEP)
    draft_token_ms: float | None = Field(default=None, description=DRAFT_TOKEN)
    vocab_size: int | None = Field(default=None, ge=1, description="every committed id is below it")
    target: str | None = Field(default=None, description=TARGET)
    keep_alive_s: float | None = Field(default=None, description="the stream is never silent for longer")
    mid: str | None = Field(default=None, description=_MID)
    recent_tokens: int | None = Field(
        default=None, ge=1, description="of the text that this prompt got before, which the server drafts from"
    )
    steady: SteadyPace | None = Field(default=None, description="of the frames, where they were asked for")


class TokenLogprob(Answer):
    """Of one token. top: the likeliest tokens with theirs, best first.

    Natural logarithms of the model's own probabilities: temperature 1, before penalties, biases, grammars and top-k or
    top-p. -9999 stands for a probability of 0.
    """

    logprob: float
    top: list[tuple[int, float]] = Field(default_factory=list)


class Commit(Answer):
    """Tokens that the target has committed. `base` is how many were committed before them.

    The target accepted `accepted` of `proposed` drafted tokens in this pass; both are left out of the JSON when nothing
    was proposed. Of those accepted, the server's prompt lookup guessed `looked_up`; left out when 0. `type` is always
    left out: most events are commits, and an event without a type is one.

    provisional: a cascade's mid-size verifier has committed these tokens and the target has not. They replace earlier
    provisional tokens from `base` on. A commit without the mark is final; provisional tokens that it contradicts, and
    all after them, are void. Sent only where the session asks for it; left out when false.

    step_ms, draft_token_ms: sent where they are no longer what the session's last such message said.

    taken, refused: as of `Taken`; sent to sessions with a long request only, where there is something new.
    """

    type: Literal["commit"] = "commit"
    base: int
    tokens: list[int]
    accepted: int = 0
    proposed: int = 0
    looked_up: int = 0
    provisional: bool = False
    logprobs: list[TokenLogprob] | None = Field(default=None, description="of each token, where they were asked for")
    step_ms: float | None = Field(default=None, description=STEP)
    draft_token_ms: float | None = Field(default=None, description=DRAFT_TOKEN)
    taken: tuple[int, float] | None = Field(default=None, description=_TAKEN)
    refused: list[int] = Field(default_factory=list, description=_REFUSED)


class Taken(Answer):
    """Acknowledges messages of a session's long request where no commit comes soon that could carry it.

    error: why the server ended the request; messages after those taken are lost, and no more are taken.
    """

    type: Literal["taken"] = "taken"
    taken: tuple[int, float] = Field(description=_TAKEN)
    refused: list[int] = Field(default_factory=list, description=_REFUSED)
    error: ErrorBody | None = None


class Usage(Answer):
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


class TextCut(Answer):
    """Where a stop string ends a text: the tokens of this session up to the one that completes it, and the characters
    before it, counted from the text's first token (the first of `generated`).
    """

    stop: str
    tokens: int
    chars: int


class SessionEnd(Answer):
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


class DraftRequest(StrictMessage):
    """POST /v1/sessions/{id}/drafts: the device's guesses.

    base: tokens the device has seen committed in this session. paths: whole guesses of what follows, likeliest first.
    Self-contained and idempotent: loss, duplication and reordering are harmless. Answered 204, also where newer commits
    contradict every path: such a message changes nothing.
    """

    base: Integer = Field(ge=0, le=MAX_COUNT)
    paths: Annotated[
        list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_PATH_TOKENS)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_PATHS),
    ]


class ErrorBody(Answer):
    """An error: `code` is stable and for programs, `message` is for people, `param` names the wrong field."""

    code: str
    message: str
    type: str = "invalid_request_error"
    param: str | None = None


class ErrorAnswer(Answer):
    """The one JSON shape of every error. request_id: as in `X-Request-Id`, for the server's log."""

    error: ErrorBody
    request_id: str | None = None


class ReadyAnswer(Answer):
    """GET /health/ready: what an agent needs to choose an endpoint."""

    status: Literal["ready", "draining", "failed"]
    model: str
    queue_depth: int = 0
    running: int = 0
    free_block_share: float = 1.0
    step_ms: float | None = None
    draft_token_ms: float | None = None
    target: str | None = Field(default=None, description=TARGET)


class RenderAnswer(Answer):
    """POST /v1/render: the prompt's token ids, special tokens included. model, target: whose template it was."""

    tokens: list[int]
    model: str
    target: str | None = Field(default=None, description=TARGET)


class ModelFacts(Answer):
    """GET /v1/model: what an agent checks before it drafts for this target, and what its user may want to know."""

    name: str
    protocol: int = PROTOCOL_VERSION
    tokenizer: str
    vocab_size: int
    max_positions: int
    eos_token_ids: list[int]
    has_chat_template: bool
    target: str | None = Field(default=None, description=TARGET)
    bundle: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    precision: str | None = None
    runtime: str | None = None
    is_widened: bool = False
    mid: str | None = Field(default=None, description=_MID)
    tool_calls: str | None = Field(default=None, description="format of its tool calls: hermes, llama or mistral")
    has_reasoning: bool = Field(default=False, description="its chat template marks reasoning by <think>")
    adapters: dict[str, str] = Field(
        default_factory=dict, description="LoRA adapters, by the name that requests give: identity of each"
    )

    @property
    def adapter(self) -> str | None:
        """The adapter that these are the facts of; None: none."""
        return self.name if self.name in self.adapters else None

    def named(self, model: str) -> ModelFacts | None:
        """The facts of the model that a request would name so; None where it is not served."""
        if model == self.name:
            return self
        target = self.adapters.get(model)
        return None if target is None else self.model_copy(update={"name": model, "target": target})


SessionEnd.model_rebuild()
Taken.model_rebuild()

SessionEvent = SessionOpen | Commit | SessionEnd


def parse_event(data: str | bytes) -> SessionEvent | Taken:
    """Parses one event of a session's stream, from what follows `data: `. Raises ValueError on anything else;
    pydantic's ValidationError is one.
    """
    raw = from_json(data)
    kind = raw.get("type", "commit") if isinstance(raw, dict) else None
    for message in (Commit, SessionOpen, SessionEnd, Taken):
        if kind == message.model_fields["type"].default:
            return message.model_validate(raw)
    raise ValueError(f"the event has type {kind!r}; expected open, commit, taken or end")
