"""Decides who takes part in a step, with which tokens, and who gives way when blocks run out.

Decoding sequences come first, then their drafts, then prompt chunks in the rest of the step's token budget. Knows
blocks and drafts, but neither the model nor the picks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cloud.engine.cache import SequenceCache
from outrider.cloud.engine.config import EngineConfig
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.policy import NO_WAIT
from outrider.cloud.seam import Totals
from outrider.models.runtimes.base import SequenceSlice


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step: `new` tokens to run, the last of them `drafted`.

    is_complete: the tokens reach the sequence's end, so the target picks its next token in this step.
    """

    sequence: SequenceState
    new: list[int]
    drafted: list[int]
    is_complete: bool

    @property
    def num_rows(self) -> int:
        """Rows of logits that it needs."""
        return 1 + len(self.drafted) if self.is_complete else 0

    def as_slice(self) -> SequenceSlice:
        """The same for the runtime."""
        return SequenceSlice(self.new, self.sequence.computed, self.sequence.blocks, self.num_rows)


class Scheduler:
    """The queue and the running sequences. The engine's thread owns it."""

    def __init__(self, config: EngineConfig, cache: SequenceCache, drafting: Drafting, totals: Totals) -> None:
        self._config = config
        self._cache = cache
        self._drafting = drafting
        self._totals = totals
        self.queue: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # oldest first

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence, queued or running; the caller frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence)

    def admit(self) -> None:
        """Admits queued sequences in order, while there is room for their tokens and the next one."""
        while self.queue and len(self.running) < self._config.max_running:
            sequence = self.queue[0]
            self._cache.match_prefix(sequence)
            if not self._cache.grow(sequence, len(sequence.tokens) + 1) and self.running:
                self._cache.drop(sequence)
                return
            self._totals.prefix_hit_tokens += sequence.usage.cached_prompt_tokens
            self.running.append(self.queue.popleft())

    def gather(self, now: float) -> list[Share]:
        """Who takes part, with which tokens: decoding sequences, their drafts, then prompt chunks in the rest."""
        for sequence in self.running:
            sequence.drafts.has_company = len(self.running) > 1
        ready = [s for s in self.running if not self._is_waiting(s, now)]
        decoding = [s for s in ready if s.num_missing == 1]
        budget = max(0, self._config.step_tokens - len(decoding))
        has_prompts = len(decoding) < len(ready)
        drafts = self._drafting.choose(
            [s.drafts for s in decoding], budget // 2 if has_prompts else budget, is_busy=bool(self.queue)
        )
        # However full a step is, a prompt advances by at least a block: every sequence gets its first token.
        budget = max(budget - sum(map(len, drafts.values())), self._cache.pool.block_size)
        shares: list[Share] = []
        for sequence in ready:
            new = sequence.tokens[sequence.computed : sequence.computed + max(1, budget)]
            is_prompt = sequence.num_missing > 1
            if is_prompt and budget <= 0:
                continue
            is_complete = len(new) == sequence.num_missing
            if is_prompt:
                drafted = sequence.drafts.own_draft(budget - len(new)) if is_complete else []
            else:
                drafted = drafts.get(sequence.drafts, [])
            length = sequence.computed + len(new)
            if drafted and sequence in self.running and not self._cache.grow(sequence, length + len(drafted)):
                drafted = []  # no sequence gives way for a guess
            if self._reserve(sequence, length + len(drafted), shares):
                budget -= len(new) + len(drafted) if is_prompt else 0
                shares.append(Share(sequence, [*new, *drafted], drafted, is_complete))
        return shares

    def _is_waiting(self, sequence: SequenceState, now: float) -> bool:
        is_waiting = self._drafting.is_waiting(sequence.drafts, now)
        self._totals.waited_s += sequence.drafts.waited_s - sequence.usage.waited_s
        sequence.usage.waited_s = sequence.drafts.waited_s
        return is_waiting

    def _reserve(self, sequence: SequenceState, length: int, planned: Sequence[Share]) -> bool:
        """Reserves blocks for `length` tokens; the youngest sequences give way. False if this one had to."""
        if sequence not in self.running:
            return False  # just preempted for an older one
        taking_part = {id(share.sequence) for share in planned}
        while not self._cache.grow(sequence, length):
            idle = next((s for s in reversed(self.queue) if s.blocks), None)
            if idle is not None:  # continues a parked prefix, not admitted yet
                self._cache.drop(idle)
                continue
            victim = next(s for s in reversed(self.running) if id(s) not in taking_part)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Moves a sequence to the head of the queue. Its tokens stay; its cache is computed again."""
        self.running.remove(sequence)
        self._cache.drop(sequence)
        self.queue.appendleft(sequence)
        self._totals.preempted += 1

    def next_deadline(self, now: float) -> float | None:
        """Seconds until the first wait ends; None when there is nothing to do."""
        deadlines = [s.drafts.wait_deadline for s in self.running if s.drafts.wait is not NO_WAIT]
        if deadlines:
            return max(0.0, min(deadlines) - now)
        return 0.0 if self.running or self.queue else None
