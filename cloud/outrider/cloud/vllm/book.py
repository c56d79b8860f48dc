"""Keeps the sequences of vLLM's engine process, their pending drafts, and what was measured: decides what to verify.

The tries and the policy are those of the embedded engine (`pending`). Knows no vLLM, so that tests run it without one.
Only the engine process's main thread calls it.

An exception here would end vLLM's engine process, and all sequences with it. What raises on a sequence's drafts costs
that sequence its drafts, which is always allowed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from outrider.cloud.distributions import num_tested
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.lookup import PromptLookup, RecentTextSource
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import NO_WAIT, Policy
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.cloud.pending.sources import DraftSource, Sources
from outrider.cloud.pending.trie import EARLIER_KINDS, PREDICTED_KINDS
from outrider.cloud.seam import CommitEvent, SequenceUsage, Totals
from outrider.cloud.vllm.terms import Refusal, Terms
from outrider.models.faults import log_fault
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.wire.tree_draft import TreeDraft

_MAX_EARLY: Final = 1024
"""Draft messages kept that arrive before their sequence."""
_EARLY_S: Final = 60.0
"""How long: a sequence that was cancelled before it came here never comes."""
_NUM_ENDED: Final = 4096
"""Sequences that ended last, whose drafts may still be on their way."""
_LOG_EVERY_S: Final = 60.0
"""Faults of the policy that no sequence causes alone may come in each step; one is logged in this time."""
_PROBE_TOKEN: Final = 0


@dataclass(slots=True, eq=False)
class Served:
    """One sequence: its terms, its text, its pending drafts.

    name: vLLM's for the request. proposed: what the present step verifies of the drafts. is_rerun: a step of it had a
    fault, and it has committed nothing since. is_muted: its drafts raised, so it has no more. opened_s: when it came;
    None once it has left the queue. turn, queued_at, turn_began, num_wanted: see `StepShares`, as SequenceState.
    logprobs: of all passes of a /v1/verify item. refusal: why no token of it can be chosen.
    """

    terms: Terms
    tokens: list[int]
    drafts: PendingDrafts
    opened_s: float | None = None
    usage: SequenceUsage = field(default_factory=SequenceUsage)
    proposed: Sequence[int] = ()
    is_rerun: bool = False
    is_muted: bool = False
    name: str = ""
    turn: int = 0
    queued_at: int = 0
    turn_began: int | None = None
    num_wanted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    refusal: Refusal | None = None

    @property
    def owner(self) -> bytes:
        """The key or address that sent the request, as a hash."""
        return self.terms.owner

    @property
    def priority(self) -> int:
        """The higher, the sooner it is served."""
        return self.terms.priority

    @property
    def is_answered(self) -> bool:
        """Whether a `once` sequence has its answer: a token that was not drafted, or the one after its draft."""
        committed, draft = self.drafts.committed, self.terms.hints.draft
        return len(committed) > len(draft) or tuple(committed) != draft[: len(committed)]


class Book:
    """All sequences of the process. clock: the monotonic one, which the server shares."""

    def __init__(self, *, max_draft: int, policy: Policy, looks_up: bool, clock: Callable[[], float]) -> None:
        self._max_draft = max_draft
        self._looks_up = looks_up
        self._clock = clock
        self._served: dict[int, Served] = {}
        self._early: OrderedDict[int, tuple[float, list[Callable[[Served], None]]]] = OrderedDict()  # since when
        self._num_early = 0
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._logged_s = -_LOG_EVERY_S
        self.drafting = Drafting(max_draft, policy)
        self.totals = Totals()

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self, terms: Terms, prompt: Sequence[int]) -> Served:
        """Adds a sequence, with the drafts that arrived before it."""
        tokens = list(prompt)
        served = self._served[terms.number] = Served(terms, tokens, self._pending(terms, []), self._clock())
        served.usage.prompt_tokens = len(tokens)
        early = self._pop_early(terms.number)
        self._try(served, partial(self._begin, served))
        for merge in early:
            self._try(served, partial(merge, served))
        return served

    def _pending(self, terms: Terms, committed: list[int]) -> PendingDrafts:
        """No drafts yet."""
        return self.drafting.pending(
            terms.client,
            committed,
            terms.max_tokens,
            lag_ms=terms.hints.lag_ms,
            patience_ms=terms.hints.patience_ms,
            num_own=min(len(terms.hints.draft), self._max_draft) if terms.once else None,
        )

    def _begin(self, served: Served) -> None:
        """Takes the draft that the request brought, and its prompt for lookups."""
        terms, hints, drafts = served.terms, served.terms.hints, served.drafts
        own: list[DraftSource] = []
        if self._looks_up and not terms.once and not terms.is_probe:
            own.append(PromptLookup(served.tokens))
        if hints.recent:
            kinds = PREDICTED_KINDS if hints.is_predicted else EARLIER_KINDS
            own.append(RecentTextSource(hints.recent, drafts.committed, is_repeat=hints.is_repeat, kinds=kinds))
        drafts.sources = Sources(own)
        drafts.trie.merge(hints.draft, prefer=True)

    def close(self, served: Served) -> None:
        """Forgets a sequence."""
        self._served.pop(served.terms.number, None)
        self._ended[served.terms.number] = None
        if len(self._ended) > _NUM_ENDED:
            self._ended.popitem(last=False)
        self.totals.finished += not served.terms.is_probe

    def left_queue(self, served: Served, num_cached: int) -> None:
        """Records that a sequence runs, and how many tokens of its prompt the cache held."""
        usage = served.usage
        usage.cached_prompt_tokens = min(num_cached, usage.prompt_tokens)
        if served.terms.is_probe:
            return
        if served.opened_s is not None:
            self.drafting.distributions.queue_s.observe(self._clock() - served.opened_s)
            served.opened_s = None
            self.totals.prompt_tokens += usage.prompt_tokens
        self.totals.prefix_hit_tokens += usage.cached_prompt_tokens
        self.totals.prefix_queried_tokens += usage.prompt_tokens

    # -- drafts ------------------------------------------------------------------------------------------------------

    def take_paths(self, number: int, base: int, paths: Sequence[Sequence[int]], arrived: float) -> None:
        """Merges a message of paths; one for a sequence that is not here yet waits for it."""
        self._merge(number, lambda served: self.drafting.merge(served.drafts, base, paths, arrived))

    def take_tree(self, number: int, message: TreeDraft, arrived: float) -> None:
        """The same for a message of a tree."""
        self._merge(number, lambda served: self.drafting.merge_tree(served.drafts, message, arrived))

    def _merge(self, number: int, merge: Callable[[Served], None]) -> None:
        served = self._served.get(number)
        if served is not None:
            self._try(served, partial(merge, served))
            return
        if number in self._ended:
            return
        now = self._clock()
        self._early.setdefault(number, (now, []))[1].append(merge)
        self._num_early += 1
        while self._early:
            oldest, (since, _) = next(iter(self._early.items()))
            if self._num_early <= _MAX_EARLY and now - since < _EARLY_S:
                break
            self._pop_early(oldest)

    def _pop_early(self, number: int) -> Sequence[Callable[[Served], None]]:
        _, early = self._early.pop(number, (0.0, []))
        self._num_early -= len(early)
        return early

    # -- faults ------------------------------------------------------------------------------------------------------

    def _try(self, served: Served, act: Callable[[], Any]) -> Any:
        """Does something with a sequence's drafts, and returns the result; None if it raises: then they are dropped."""
        if not served.is_muted:
            try:
                return act()
            except Exception as error:
                self._mute(served, error)
        return None

    def _mute(self, served: Served, error: Exception) -> None:
        """Drops a sequence's drafts and takes no more of them, so that each sequence logs one fault at most."""
        log_fault(error)
        self.totals.faults += 1
        served.is_muted = True
        served.drafts = self._pending(served.terms, served.drafts.committed)

    # -- a step ------------------------------------------------------------------------------------------------------

    def waiting(self, decoding: Iterable[Served], now: float, num_company: int) -> set[Served]:
        """Those that sit this step out for a draft. num_company: sequences that run, these included."""
        sitting = set()
        for served in decoding:
            served.drafts.has_company = num_company > 1
            if served.drafts.wait is NO_WAIT:
                continue
            try:
                if self.drafting.is_waiting(served.drafts, now):
                    sitting.add(served)
            except Exception as error:
                self._mute(served, error)
                continue
            served.usage.waited_s = served.drafts.waited_s
        return sitting

    def choose(
        self, decoding: Sequence[Served], budget: int, fixed: StepSize, context: float
    ) -> dict[Served, list[int]]:
        """The drafted tokens, a path, that each decoding sequence verifies; at most `budget` in all."""
        others = [served for served in decoding if not served.terms.is_probe]
        probed = {
            served: [_PROBE_TOKEN] * max(0, min(served.terms.probe or 0, served.drafts.num_left - 1))
            for served in decoding
            if served.terms.is_probe
        }
        chosen = self._chosen(others, max(0, budget), fixed, context)
        paths = {served: list(chosen.get(served.drafts, NOTHING).tokens)[: self._max_draft] for served in others}
        return paths | probed

    def own_draft(self, served: Served, room: int) -> list[int]:
        """The drafted tokens that a verify item brought, at most `room`; none for a session."""
        found: SelectedDrafts | None = self._try(served, partial(served.drafts.own_draft, room))
        return [] if found is None else list(found.tokens)

    def _chosen(
        self, decoding: Sequence[Served], budget: int, fixed: StepSize, context: float
    ) -> dict[PendingDrafts, SelectedDrafts]:
        """What the policy chooses. Where it raises, sequences with which it also raises alone lose their drafts."""
        try:
            return self.drafting.choose([served.drafts for served in decoding], budget, fixed, context)
        except Exception as error:
            found = error
        for served in decoding:
            self._try(served, partial(self.drafting.choose, [served.drafts], budget, fixed, context))
        try:
            return self.drafting.choose([served.drafts for served in decoding], budget, fixed, context)
        except Exception:
            self.totals.faults += 1
            if self._clock() - self._logged_s >= _LOG_EVERY_S:
                self._logged_s = self._clock()
                log_fault(found)
            return {}  # this step verifies no drafts

    def committed(
        self,
        served: Served,
        tokens: Sequence[int],
        *,
        is_over: bool,
        crowding: float,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> CommitEvent:
        """Books the tokens of a pass. is_over: the sequence ends with them. crowding: sequences for each place."""
        drafts, accepted = served.drafts, len(tokens) - 1
        base, proposed = len(drafts.committed), max(len(served.proposed), accepted)
        served.tokens += tokens
        drafts.committed.extend(tokens)
        num_lookup = min(drafts.num_lookup_chosen, proposed)
        learn = partial(self._learn, served, tokens, is_over=is_over, crowding=crowding)
        looked_up: int = self._try(served, learn) or 0
        served.usage.count_pass(len(tokens), proposed, accepted, looked_up)
        if not served.terms.is_probe:
            tested = 0
            if proposed:
                tested = num_tested(accepted, tokens, served.proposed[accepted : accepted + 1])
                self.drafting.distributions.verified(accepted, tested)
            self.totals.count_pass(len(tokens), proposed, accepted, num_lookup, looked_up, tested=tested)
        served.proposed, served.is_rerun = (), False
        return CommitEvent(base, tuple(tokens), accepted, proposed, looked_up, tuple(logprobs))

    def _learn(self, served: Served, tokens: Sequence[int], *, is_over: bool, crowding: float) -> int:
        """Moves the drafts to behind the committed `tokens`, and learns from these. Returns how many were looked up."""
        drafts = served.drafts
        pending = drafts.trie.likeliest_of_device(self._max_draft)
        looked_up = drafts.advance(tokens)
        if not (served.terms.is_probe or is_over or served.terms.once):
            self.drafting.committed(drafts, pending, tokens, self._clock(), crowding=crowding)
        return looked_up

    def stepped(
        self, size: StepSize, seconds: float, overhead_s: float, *, num_sequences: int = 1, is_probe: bool = False
    ) -> None:
        """Records a step: from its order to its tokens, and the time spent on choosing. is_probe: counted nowhere."""
        self.drafting.stepped(size, seconds, False)
        if not is_probe:
            self.totals.count_step(size.tokens, model_s=seconds, overhead_s=overhead_s)
            self.totals.draft_nodes = self.drafting.num_nodes
            self.drafting.distributions.stepped(num_sequences, size.tokens, seconds + overhead_s)

    def patience_ms(self) -> float:
        """The longest wait for a draft that is chosen now."""
        return max((served.drafts.wait.lag_s * 1e3 for served in self._served.values()), default=0.0)


def seconds_to_wait(sitting: Iterable[Served], now: float) -> float:
    """Seconds until the first of these waits for drafts ends."""
    return max(0.0, min(served.drafts.wait_deadline for served in sitting) - now)
