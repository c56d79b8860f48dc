"""Keeps the sequences of vLLM's engine process, their pending drafts, and what was measured: decides what to verify.

The tries and the policy are those of the embedded engine (`pending`). Knows no vLLM, so that tests run it without one.
Only the engine process's main thread calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.drafts import PendingDrafts
from outrider.cloud.pending.earlier import EarlierText
from outrider.cloud.pending.estimators import AcceptanceEstimator, DraftLag, StepSize
from outrider.cloud.pending.lookup import PromptLookup
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.policy import NO_WAIT, Policy
from outrider.cloud.seam import SequenceUsage, Totals
from outrider.cloud.vllm.terms import Terms
from outrider.models.tree_draft import TreeDraft

_MAX_EARLY: Final = 1024
"""Draft messages kept that arrive before their sequence."""
_PROBE_TOKEN: Final = 0


@dataclass(slots=True, eq=False)
class Served:
    """One sequence: its terms, its text, its pending drafts.

    proposed: what the present step verifies of them. is_rerun: a step of it had a fault, and it has committed nothing
    since.
    """

    terms: Terms
    tokens: list[int]
    drafts: PendingDrafts
    usage: SequenceUsage = field(default_factory=SequenceUsage)
    proposed: Sequence[int] = ()
    is_rerun: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether a `once` sequence has its answer: a token that was not drafted, or the one after its draft."""
        committed, draft = self.drafts.committed, self.terms.draft
        return len(committed) > len(draft) or tuple(committed) != draft[: len(committed)]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass committed; as CommitEvent."""

    base: int
    tokens: Sequence[int]
    accepted: int
    proposed: int
    looked_up: int


class Book:
    """All sequences of the process. clock: the monotonic one, which the server shares."""

    def __init__(self, *, max_draft: int, policy: Policy, looks_up: bool, clock: Callable[[], float]) -> None:
        self._max_draft = max_draft
        self._looks_up = looks_up
        self._clock = clock
        self._served: dict[int, Served] = {}
        self._early: OrderedDict[int, list[Callable[[Served], None]]] = OrderedDict()
        self._num_early = 0
        self.drafting = Drafting(max_draft, policy)
        self.totals = Totals()

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self, terms: Terms, prompt: Sequence[int]) -> Served:
        """Adds a sequence, with the drafts that arrived before it."""
        tokens = list(prompt)
        drafts = PendingDrafts(
            committed=[],
            max_new=terms.max_tokens,
            acceptance=AcceptanceEstimator(self._max_draft, parent=self.drafting.acceptance),
            chances=NodeChances(self.drafting.chances),
            lookup=PromptLookup(tokens) if self._looks_up and not terms.once and not terms.is_probe else None,
            lag=DraftLag(terms.draft_lag_ms),
            patience_ms=terms.patience_ms,
            num_own=len(terms.draft) if terms.once else None,
        )
        if terms.earlier:
            drafts.earlier = EarlierText(terms.earlier, drafts.committed, is_repeat=terms.is_repeat)
        drafts.trie.merge(terms.draft, prefer=True)
        served = self._served[terms.number] = Served(terms, tokens, drafts)
        served.usage.prompt_tokens = len(tokens)
        early = self._early.pop(terms.number, ())
        self._num_early -= len(early)
        for merge in early:
            merge(served)
        return served

    def close(self, served: Served) -> None:
        """Forgets a sequence."""
        self._served.pop(served.terms.number, None)
        self.totals.finished += not served.terms.is_probe

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
            merge(served)
            return
        self._early.setdefault(number, []).append(merge)
        self._num_early += 1
        while self._num_early > _MAX_EARLY:
            _, dropped = self._early.popitem(last=False)
            self._num_early -= len(dropped)

    # -- a step ------------------------------------------------------------------------------------------------------

    def waiting(self, decoding: Iterable[Served], now: float, num_company: int) -> set[Served]:
        """Those that sit this step out for a draft. num_company: sequences that run, these included."""
        sitting = set()
        for served in decoding:
            served.drafts.has_company = num_company > 1
            if served.drafts.wait is NO_WAIT:
                continue
            if self.drafting.is_waiting(served.drafts, now):
                sitting.add(served)
            self.totals.waited_s += served.drafts.waited_s - served.usage.waited_s
            served.usage.waited_s = served.drafts.waited_s
        return sitting

    def next_deadline(self, sitting: Iterable[Served], now: float) -> float:
        """Seconds until the first of these waits ends."""
        return max(0.0, min(served.drafts.wait_deadline for served in sitting) - now)

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
        chosen = self.drafting.choose([served.drafts for served in others], max(0, budget), fixed, context)
        paths = {served: list(chosen[served.drafts].tokens)[: self._max_draft] for served in others}
        return paths | probed

    def committed(self, served: Served, tokens: Sequence[int], *, is_over: bool, crowding: float) -> Pass:
        """Books the tokens of a pass. is_over: the sequence ends with them. crowding: sequences for each place."""
        drafts, proposed = served.drafts, len(served.proposed)
        base, accepted = len(drafts.committed), len(tokens) - 1
        pending = drafts.trie.likeliest_of_device(self._max_draft)
        served.tokens += tokens
        drafts.committed.extend(tokens)
        num_lookup = min(drafts.num_lookup_chosen, proposed)
        looked_up = drafts.advance(tokens)
        served.usage.count_pass(len(tokens), proposed, accepted, looked_up)
        if not served.terms.is_probe:
            self.totals.count_pass(len(tokens), proposed, accepted, num_lookup, looked_up)
            if not is_over and not served.terms.once:
                self.drafting.committed(drafts, pending, tokens, self._clock(), crowding=crowding)
        served.proposed, served.is_rerun = (), False
        return Pass(base, tokens, accepted, proposed, looked_up)

    def stepped(self, size: StepSize, seconds: float, overhead_s: float, *, is_probe: bool = False) -> None:
        """Records a step: from its order to its tokens, and the time spent on choosing. is_probe: counted nowhere."""
        self.drafting.stepped(size, seconds, False)
        if not is_probe:
            self.totals.count_step(size.tokens, model_s=seconds, overhead_s=overhead_s)

    def patience_ms(self) -> float:
        """The longest wait for a draft that is chosen now."""
        return max((served.drafts.wait.lag_s * 1e3 for served in self._served.values()), default=0.0)
