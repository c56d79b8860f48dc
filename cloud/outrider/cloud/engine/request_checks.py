"""Checks requests before they reach the model."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from outrider.cloud.seam import GenerateRequest
from outrider.models.errors import RequestError
from outrider.models.picks.acceptance import Rule
from outrider.models.picks.rejection import Evidence, SparseDistribution
from outrider.models.runtimes.base import ModelLimits
from outrider.models.wire.fields import require_ids
from outrider.models.wire.tree_draft import TreeDraft

T = TypeVar("T")
_CACHES_QUEUED = 8
"""Prompts may fill the KV cache this many times: what waits longer than that is better sent to another server."""
_MIN_QUEUED_TOKENS = 1 << 20
_NUM_ENDS: Final = 64
_MOST_WAIT_S: Final = 60
"""Nobody is sent away for longer: the measure is of what ran, and what comes may be shorter."""


class Turnover:
    """Measures how fast sequences end, for the advice when to come back to a full queue.

    The engine's thread notes; any thread may ask.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    def note(self, now: float) -> None:
        """A sequence has ended."""
        self._ends.append(now)

    def retry_after_s(self, num_sequences: int, now: float) -> int:
        """Seconds until `num_sequences` more will have ended, 1 to 60, if they go on as the newest did."""
        ends = tuple(self._ends)
        gap_s = (now - ends[0]) / len(ends) if ends else 0.0
        return max(1, min(_MOST_WAIT_S, math.ceil(gap_s * num_sequences)))


def require_room(
    owner: bytes,
    sequences: Iterable[tuple[bytes, int]],
    max_running: int,
    max_queue: int,
    cache_tokens: int,
    retry_after_s: Callable[[int], int],
) -> None:
    """Raises RequestError `overloaded` if the queue is full, by requests or by tokens.

    An owner with less than its share of it is still let in, up to twice the queue's length in all. sequences: those
    that are open, by owner and tokens. cache_tokens: that the KV cache holds. retry_after_s: seconds until so many
    sequences more will have ended.
    """
    tokens: Counter[bytes] = Counter()
    requests: Counter[bytes] = Counter()
    for each, num_tokens in sequences:
        tokens[each] += num_tokens
        requests[each] += 1
    num_waiting = requests.total() - max_running
    max_tokens = max(_MIN_QUEUED_TOKENS, _CACHES_QUEUED * cache_tokens)
    num_owners = len(requests) + (owner not in requests)
    is_full = num_waiting >= max_queue and requests[owner] * num_owners >= max_queue
    is_heavy = tokens.total() >= max_tokens and tokens[owner] * num_owners >= max_tokens
    if is_full or is_heavy or num_waiting >= 2 * max_queue:
        raise RequestError(
            "overloaded",
            f"{num_waiting} requests are queued already; try again later",
            status=503,
            retry_after_s=retry_after_s(max(1, num_waiting - max_queue + 1)),
        )


def check_request(request: GenerateRequest, num_held: int, limits: ModelLimits) -> None:
    """Raises RequestError `empty_prompt`, `token_out_of_range` (it names the field on the wire), `invalid_parameter`,
    `context_length_exceeded`, `wrong_evidence`, and `unsupported_parameter` for what does not go with a rule that
    judges by probabilities.

    num_held: tokens of a parked prefix that come before the prompt.
    """
    length = num_held + len(request.prompt)
    if length == 0:
        raise RequestError("empty_prompt", "the prompt has no tokens; send at least one")
    if length >= limits.max_positions:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {length} tokens; this server takes at most {limits.max_positions - 1}",
        )
    require_ids(request.prompt, "prefix" if request.once else "prompt", limits.vocab_size)
    require_ids(request.hints.draft, "draft", limits.vocab_size)
    if not 0 <= request.num_generated <= length:
        raise RequestError(
            "invalid_parameter",
            f"generated is {request.num_generated}; expected at most {length}, the tokens before the first new one",
        )
    rule, processors = request.pick.terms.rule, request.pick.processors
    processors.require_ids(limits.vocab_size)
    _check_evidence(rule, request.hints.draft, request.hints.evidence, limits)
    if rule.needs_evidence and processors.narrows:
        raise RequestError(
            "unsupported_parameter", f"typical_p and XTC do not go with the rule {rule}; leave one of them out"
        )


def deadline_exceeded() -> RequestError:
    """The error of a sequence that has no text at its deadline."""
    return RequestError(
        "deadline_exceeded", "the request's deadline_ms passed before its text began; allow more time", status=504
    )


def internal_error() -> RequestError:
    """The error of a bug of ours; its own words may quote the request."""
    return RequestError("internal_error", "the server failed on this request; its log has the details", status=500)


def open_one(sequences: Mapping[int, T], number: int) -> T:
    """The open sequence of this number. Raises RequestError 404 `unknown_session` where it is over."""
    sequence = sequences.get(number)
    if sequence is None:
        raise RequestError(
            "unknown_session", "there is no such session: it has ended, or another server has it", status=404
        )
    return sequence


def usable_recent(request: GenerateRequest, limits: ModelLimits) -> tuple[int, ...]:
    """The earlier text, or nothing if it has an id that the model has not: it may come from anywhere."""
    earlier = request.hints.recent
    is_fine = not request.once and bool(earlier) and min(earlier) >= 0 and max(earlier) < limits.vocab_size
    return earlier if is_fine else ()


def _check_evidence(rule: Rule, tokens: Sequence[int], evidence: Sequence[Evidence], limits: ModelLimits) -> None:
    """Raises RequestError `wrong_evidence` where the drafted tokens do not come with what the rule needs, and
    `token_out_of_range`.
    """
    if len(evidence) != (len(tokens) if rule.needs_evidence else 0):
        raise _wrong_evidence(rule, f"there are {len(tokens)} drafted tokens and {len(evidence)} probabilities")
    kind = SparseDistribution if rule is Rule.REJECTION else float
    for token, each in zip(tokens, evidence, strict=False):
        if not isinstance(each, kind):
            raise _wrong_evidence(rule, "the drafted tokens come with what another rule needs")
        if isinstance(each, SparseDistribution):
            if (fault := each.fault(token)) is not None:
                raise _wrong_evidence(rule, f"the distribution of the drafted token {token}: {fault}")
            require_ids(each.ids, "draft_q", limits.vocab_size)


def _wrong_evidence(rule: Rule, found: str) -> RequestError:
    needed = {
        Rule.REJECTION: "the distribution that each was drawn from",
        Rule.TOLERANCE: "log q of each",
    }.get(rule, "token ids only")
    return RequestError("wrong_evidence", f"{found}; the rule {rule.value} expects {needed}")


def check_draft(base: int, paths: Sequence[Sequence[int]], committed: int, limits: ModelLimits) -> None:
    """Raises RequestError `draft_ahead` or `token_out_of_range`. What contradicts the commits is for the merge."""
    check_base(base, committed)
    for path in paths:
        require_ids(path, "paths", limits.vocab_size)


def check_tree(message: TreeDraft, committed: int, limits: ModelLimits) -> None:
    """Raises RequestError as `check_draft` does."""
    check_base(message.base, committed)
    require_ids(message.tokens, "tokens", limits.vocab_size)


def check_base(base: int, committed: int) -> None:
    """Raises RequestError `draft_ahead`."""
    if base > committed:
        raise RequestError(
            "draft_ahead",
            f"base is {base}, but {committed} tokens are committed; send the number of committed tokens received",
        )
