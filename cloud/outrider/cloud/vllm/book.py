"""Keeps the sequences of vLLM's engine process, their pending drafts, and what was measured: decides what to verify.

The tries and the policy are those of the embedded engine (`pending`). Knows no vLLM, so that tests run it without one.
Only the engine process's main thread calls it. Between two steps it books what was committed and chooses what is
verified next; it learns while the model runs (`learn`), so a choice knows all commits, but has learned from those
before the last one.

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
from outrider.cloud.pending.lookup import PromptLookup
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import NO_WAIT, Policy
from outrider.cloud.pending.selected_drafts import SelectedDrafts
from outrider.cloud.pending.sources import DraftSource
from outrider.cloud.seam import SequenceUsage, Totals
from outrider.cloud.vllm.commits import Commit
from outrider.cloud.vllm.heads import HeadDrafts, drafts_of_heads
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
    num_drafted: of num_wanted, the draft of a /v1/verify item.
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
    num_drafted: int = 0
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


def _alone(served: Served) -> float:
    return 1.0


class Book:
    """All sequences of the process. clock: the monotonic one, which the server shares. crowding: sequences of the same
    owner for each place that it may have. captured: as in StepTimeCurve. has_heads: the target drafts, too.
    """

    def __init__(
        self,
        *,
        max_draft: int,
        policy: Policy,
        looks_up: bool,
        clock: Callable[[], float],
        crowding: Callable[[Served], float] = _alone,
        captured: Sequence[int] = (),
        has_heads: bool = False,
    ) -> None:
        self._max_draft = max_draft
        self._looks_up = looks_up
        self._has_heads = has_heads
        self._clock = clock
        self._crowding = crowding
        self._lessons: list[Served] = []  # committed tokens since `learn`
        # Since `count`: each with the tokens that it verified, and how many were chosen of those that were looked up.
        self._passes: list[tuple[Served, Commit, Sequence[int], int]] = []
        self._steps: list[tuple[StepSize, float]] = []  # since then, and their seconds
        self._served: dict[int, Served] = {}
        self._early: OrderedDict[int, tuple[float, list[Callable[[Served], None]]]] = OrderedDict()  # since when
        self._num_early = 0
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._logged_s = -_LOG_EVERY_S
        self.drafting = Drafting(max_draft, policy, captured=captured)
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
        num_own = min(len(terms.hints.draft), self._max_draft) if terms.once else None
        return self.drafting.pending(terms.client, committed, terms.max_tokens, terms.hints, num_own=num_own)

    def _begin(self, served: Served) -> None:
        """Takes the draft that the request brought, and its prompt for lookups."""
        own: list[DraftSource] = []
        if not served.terms.once and not served.terms.is_probe:
            own += [PromptLookup(served.tokens)] if self._looks_up else []
            own += [HeadDrafts(served.drafts.committed)] if self._has_heads else []
        self.drafting.begin(served.drafts, served.terms.hints, own)

    def close(self, served: Served) -> None:
        """Forgets a sequence, once all of it is counted."""
        self.count()
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

    def take_heads_draft(self, served: Served, tokens: Sequence[int]) -> None:
        """Takes what the target's own heads drafted behind a sequence's text."""

        def take() -> None:
            drafts = served.drafts
            source = drafts_of_heads(drafts)
            if source is not None:
                source.take(tokens)
                if not drafts.trie.has_device_nodes:
                    drafts.trie.clear()  # an older guess of ours, which still holds: all sources are asked again
                self.drafting.reconsider_wait(drafts)

        self._try(served, take)

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
        paths: dict[Served, list[int]] = {}
        others: list[Served] = []
        for served in decoding:
            if served.terms.probe is None:
                others.append(served)
            else:
                num_left = served.drafts.num_left
                paths[served] = [_PROBE_TOKEN] * max(0, min(served.terms.probe, num_left - 1))
        chosen = self._chosen(others, max(0, budget), fixed, context)
        for served in others:
            found = chosen.get(served.drafts)
            paths[served] = list(found.tokens) if found is not None else []
        return paths

    def is_open(self, number: int) -> bool:
        """Whether a sequence is here."""
        return number in self._served

    def is_starved(self, number: int) -> bool:
        """Whether a sequence waits for a draft, or has none to verify."""
        served = self._served.get(number)
        return served is not None and (served.drafts.wait is not NO_WAIT or not served.drafts.trie)

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
        self, served: Served, tokens: list[int], is_over: bool, logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> Commit:
        """Books the tokens of a pass, and moves the drafts to behind them. is_over: the sequence ends with them.

        A wait for the device's next draft begins here; what else is counted and learned waits for `learn`.
        """
        drafts, terms, accepted = served.drafts, served.terms, len(tokens) - 1
        base, proposed, looked_up = len(drafts.committed), max(len(served.proposed), accepted), 0
        served.tokens += tokens
        drafts.committed += tokens
        if not served.is_muted:
            goes_on = not is_over and not terms.once and terms.probe is None
            try:
                looked_up = drafts.follow(tokens, teaches_path=goes_on)
                self._lessons.append(served)
                if goes_on and self.drafting.may_wait(drafts):
                    self.drafting.start_wait(drafts, self._clock(), crowding=self._crowding(served))
            except Exception as error:
                self._mute(served, error)
        done = Commit(terms.number, base, tokens, accepted, proposed, looked_up, logprobs)
        self._passes.append((served, done, served.proposed, drafts.num_lookup_chosen))
        served.proposed, served.is_rerun = (), False
        return done

    def count(self) -> None:
        """Counts the passes since the last call."""
        for served, done, drafted, num_lookup in self._passes:
            num_tokens, accepted, proposed = len(done.tokens), done.accepted, done.proposed
            served.usage.count_pass(num_tokens, proposed, accepted, done.looked_up)
            if served.terms.probe is not None:
                continue
            tested = 0
            if proposed:
                tested = num_tested(accepted, done.tokens, drafted[accepted : accepted + 1])
                self.drafting.distributions.verified(accepted, tested)
            num_lookup = min(num_lookup, proposed)
            self.totals.count_pass(num_tokens, proposed, accepted, num_lookup, done.looked_up, tested=tested)
        self._passes.clear()

    def learn(self) -> None:
        """Counts and learns what was committed, and learns from steps, since the last call: while the model runs."""
        self.count()
        lessons, self._lessons = self._lessons, []
        steps, self._steps = self._steps, []
        for size, seconds in steps:
            self.drafting.stepped(size, seconds, False)
        for served in lessons:
            self._try(served, partial(self._learn, served))

    def _learn(self, served: Served) -> None:
        served.drafts.settle()
        if served.terms.number in self._served:
            self.drafting.prepare(served.drafts, crowding=self._crowding(served))

    def stepped(
        self, size: StepSize, seconds: float, overhead_s: float, *, num_sequences: int = 1, is_probe: bool = False
    ) -> None:
        """Counts a step: from its order to its tokens, and the time spent on choosing. is_probe: counted nowhere.

        How long it took is learned later, by `learn`.
        """
        self._steps.append((size, seconds))
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
