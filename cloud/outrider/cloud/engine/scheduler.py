"""Decides who takes part in a step, with which tokens, and who gives way when blocks run out.

Two things are scarce. *Places*: at most `max_running` sequences take part in a step; where more could, owners share the
places evenly, step by step; those with a higher priority come first, but for every eighth step, so that nobody starves.
*Blocks*: a sequence that has none waits in its owner's queue; where they do not suffice,
those that have had their turn give theirs away. A sequence that waits for a draft takes no place. Within a step,
decoding sequences come first, then their drafts, then prompt chunks in the rest of the step's token budget.

Knows blocks and drafts, but neither the model nor the picks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from outrider.cloud.engine.cache import SequenceCache
from outrider.cloud.engine.config import EngineConfig
from outrider.cloud.engine.owners import Owners
from outrider.cloud.engine.runner import Share
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize, tokens_within_a_step
from outrider.cloud.pending.policy import NO_WAIT
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.cloud.seam import Totals


class Scheduler:
    """The queued sequences and those that have blocks. The engine's thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        cache: SequenceCache,
        drafting: Drafting,
        totals: Totals,
        clock: Callable[[], float],
        on_admit: Callable[[SequenceState], None],
    ) -> None:
        """on_admit: called with a sequence that has `stored` blocks, once it has its own."""
        self._on_admit = on_admit
        self._config = config
        self._clock = clock
        self._cache = cache
        self._drafting = drafting
        self._totals = totals
        self.owners = Owners[SequenceState](config.token_budget)
        self.running: list[SequenceState] = []  # those that have blocks, oldest first
        self._holders: dict[SequenceState, None] = {}  # queued, with the blocks of a parked prefix that they continue

    def add(self, sequence: SequenceState) -> None:
        """Queues a new sequence."""
        self.owners.add(sequence)
        if sequence.blocks:
            self._holders[sequence] = None

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence, queued or running; the caller frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        self._holders.pop(sequence, None)
        self.owners.remove(sequence)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Gives queued sequences blocks for their tokens and the next one: by priority; owners in turn, each owner's in
        order.
        """
        self.owners.admit(self._admit)

    def _admit(self, sequence: SequenceState) -> bool:
        """Gives a queued sequence its blocks; others give way if that suffices. False if it has to wait."""
        length, is_holder = len(sequence.tokens) + 1, sequence in self._holders
        self._cache.match_prefix(sequence)
        while not self._cache.grow(sequence, length):
            givers = self._givers_to(sequence)
            room = self._cache.num_obtainable + sum(len(giver.blocks) for giver in givers)
            if not givers or room < self._cache.num_lacking(sequence, length):
                if not is_holder:
                    self._cache.drop(sequence)
                return False
            self._give_way(givers[0])
        if sequence.stored is not None:
            self._on_admit(sequence)
        self._holders.pop(sequence, None)
        self.running.append(sequence)
        if sequence.submitted_s is not None:
            self._drafting.distributions.queue_s.observe(self._clock() - sequence.submitted_s)
            sequence.submitted_s = None
            self._totals.prompt_tokens += sequence.usage.prompt_tokens
        if not sequence.generated:  # what it finds of its own after it gave way was not cached when it came
            sequence.usage.cached_prompt_tokens = min(sequence.computed, sequence.usage.prompt_tokens)
            self._totals.prefix_hit_tokens += sequence.usage.cached_prompt_tokens
            self._totals.prefix_queried_tokens += sequence.usage.prompt_tokens
        return True

    def _givers_to(self, candidate: SequenceState) -> list[SequenceState]:
        """Who gives blocks to a queued sequence, in order: first those queued with blocks."""
        holders = (s for s in reversed(self._holders) if s is not candidate)
        return [*holders, *self.owners.givers_to(candidate, self.running)]

    def _reserve(self, sequence: SequenceState, length: int, taking_part: set[SequenceState]) -> bool:
        """Reserves blocks for `length` tokens; others that do not take part give way. False if this one had to."""
        while not self._cache.grow(sequence, length):
            if self._holders:
                self._give_way(next(reversed(self._holders)))
                continue
            others = [s for s in self.running if s not in taking_part]
            had_turn = [s for s in others if self.owners.had_turn(s)]
            # Where nobody had a turn, the youngest loses least.
            victim = max(had_turn, key=self.owners.precedence) if had_turn else others[-1]
            self._give_way(victim)
            if victim is sequence:
                return False
        return True

    def _give_way(self, sequence: SequenceState) -> None:
        """Takes a sequence's blocks. Its tokens stay; what is no longer in the cache is computed again."""
        self._cache.drop(sequence)
        if sequence in self._holders:
            del self._holders[sequence]
            return
        self.running.remove(sequence)
        self.owners.gave_way(sequence)
        self._totals.preempted += 1

    # -- steps -------------------------------------------------------------------------------------------------------

    def gather(self, now: float) -> list[Share]:
        """Who takes part, with which tokens: decoding sequences, their drafts, then prompt chunks in the rest."""
        for sequence in self.running:
            sequence.drafts.has_company = len(self.running) > 1
        ready = [s for s in self.running if not self._drafting.is_waiting(s.drafts, now)]
        items = [s for s in ready if s.drafts.num_own and s.num_missing == 1]
        texts = [s for s in self.running if s.num_missing == 1]  # also those that wait for a draft, or for a place
        added_to = [*(s for s in ready if s.num_missing > 1), *items]
        punctual, delaying = self.owners.in_time(added_to, texts)
        in_time = set(punctual)
        if items:
            late = self._late_items(ready, items, in_time, delaying)
            ready = [s for s in ready if s not in late]
        ready = self.owners.take_places(ready, self._config.max_running)
        decoding = [s for s in ready if s.num_missing == 1]
        prompts = [s for s in ready if s.num_missing > 1]
        budget = max(0, self._config.token_budget - len(decoding))
        fixed = plain = StepSize(len(decoding), len(decoding) + sum(s.computed for s in decoding))
        if decoding:
            # Beside items, prompts that delay others too would delay them twice; where all are such items, nobody.
            in_time -= delaying if 0 < sum(s in delaying for s in decoding) < len(decoding) else set()
            prompts = [s for s in prompts if s in in_time]
        # However full a step is, prompts advance by a block: every sequence gets its first token.
        for_prompts = min(sum(s.num_wanted for s in prompts), max(budget - budget // 2, self._cache.pool.block_size))
        has_delaying = any(s in delaying for s in prompts)
        if has_delaying:
            beside = fixed if decoding else StepSize.of(1, texts[0].computed)
            past = sum(s.computed for s in prompts) / max(1, len(prompts))
            added = self._drafting.curve.steps_added(for_prompts, beside, past)
            num_free = sum(s.num_wanted for s in prompts if s not in delaying)
            for_prompts = max(tokens_within_a_step(added), min(for_prompts, num_free))
        if prompts:
            fixed += StepSize.of(for_prompts, sum(s.computed for s in prompts) // len(prompts))
        context = sum(s.computed for s in decoding) / max(1, len(decoding))
        room = max(0, budget - for_prompts)
        if len({s.owner for s in texts}) > 1:
            num_own = sum(s.num_wanted - 1 for s in decoding if s.drafts.num_own)
            room = self._drafting.shared_room(room, num_own, plain, context)
        drafts = self._drafting.choose([s.drafts for s in decoding], room, fixed, context)
        left = max(budget - sum(len(chosen.tokens) for chosen in drafts.values()), for_prompts)
        chunks = self.owners.split_tokens(prompts, for_prompts if has_delaying else left)
        if has_delaying and decoding:  # else the step delays a text by itself at most, and nobody's step is shared
            self.owners.charge({s: count for s, count in chunks.items() if s in delaying}, added)
        given = {s: s.num_wanted - 1 for s in decoding if s in delaying}  # items
        if 0 < len(given) < len(decoding):
            self.owners.charge(given, self._drafting.curve.steps_added(sum(given.values()), fixed, context))
        shares: list[Share] = []
        taking_part: set[SequenceState] = set()
        for sequence in [*decoding, *prompts]:
            new, drafted = self._part_of(sequence, drafts.get(sequence.drafts, NOTHING), chunks.get(sequence, 1))
            if not new or sequence not in self.owners.of(sequence).running:
                continue  # no budget is left, or it has just given way to another
            is_complete = len(new) == sequence.num_missing
            length = sequence.computed + len(new)
            if drafted.tokens:
                drafted = drafted.first(self._cache.room(sequence) - length)  # no sequence gives way for a guess
            while drafted.tokens and not self._cache.grow(sequence, length + len(drafted.tokens)):
                # With evidence as many as have room: whether one is judged must not depend on later ones.
                drafted = drafted.first(len(drafted.tokens) - 1) if drafted.evidence else NOTHING
            if self._reserve(sequence, length + len(drafted.tokens), taking_part):
                taking_part.add(sequence)
                shares.append(Share(sequence, [*new, *drafted.tokens], drafted, is_complete))
                if is_complete and sequence.turn_began is None:
                    sequence.turn_began = self.owners.step
        self.owners.took_part(taking_part)
        return shares

    def _late_items(
        self,
        ready: Sequence[SequenceState],
        items: list[SequenceState],
        in_time: set[SequenceState],
        delaying: set[SequenceState],
    ) -> set[SequenceState]:
        """The /v1/verify items that leave this step to others, because an item's whole draft is verified in its pass.

        Owners take turns, and so do each owner's items. Sessions' drafts and prompts keep their parts of the room. Of
        items that delay others' texts, those whose owners owe no time, as many as at most double the step's time, and
        one at least.
        """
        items.sort(key=lambda s: s.turn)
        num_prompts = sum(s.num_missing > 1 for s in ready)
        has_sessions = any(s.drafts.num_own is None for s in ready)
        room = max(0, self._config.token_budget - self._config.max_running) // (1 + (num_prompts > 0) + has_sessions)
        others = [s for s in ready if s.num_missing == 1 and s not in delaying]
        past = sum(s.computed for s in items) / len(items)
        beside = StepSize(len(others), sum(1 + s.computed for s in others)) if others else StepSize.of(1, int(past))
        shared_room = self._drafting.curve.tokens_in_a_step(room, beside, past) if delaying else room
        ranks: Counter[bytes] = Counter()  # of each owner's next item
        order: list[tuple[int, SequenceState]] = []
        for item in items:
            order.append((ranks[item.request.asker.owner], item))
            ranks[item.request.asker.owner] += 1
        late: set[SequenceState] = set()
        taken: list[bool] = []  # of each whether it delays others
        for _, item in sorted(order, key=lambda entry: entry[0]):
            num_drafted, is_delaying = item.num_wanted - 1, item in delaying
            is_first = True not in taken if is_delaying else not taken
            fits = num_drafted <= (min(room, shared_room) if is_delaying else room)
            if (is_delaying and item not in in_time) or not (is_first or fits):
                late.add(item)
                continue
            taken.append(is_delaying)
            room = max(0, room - num_drafted)
            shared_room -= is_delaying * num_drafted
        if len(late) == len(ready):  # those that they would delay wait for drafts
            late.discard(items[0])
        return late

    def _part_of(self, sequence: SequenceState, chosen: SelectedDrafts, room: int) -> tuple[list[int], SelectedDrafts]:
        """The tokens to run and the drafted ones after them.

        chosen: the drafts of a decoding sequence. room: tokens that a prompt may run. A /v1/verify item gets one pass,
        so its last token waits for the step that has room for its whole draft.
        """
        missing = sequence.num_missing
        if missing == 1:
            return sequence.tokens[sequence.computed :], chosen
        if sequence.num_wanted > max(missing, room) and room > 1:
            room = min(room, missing - 1)
        new = sequence.tokens[sequence.computed : sequence.computed + room]
        return new, sequence.drafts.own_draft(room - missing) if len(new) == missing else NOTHING

    def next_deadline(self, now: float) -> float | None:
        """Seconds until the first wait ends; None when there is nothing to do."""
        deadlines = [s.drafts.wait_deadline for s in self.running if s.drafts.wait is not NO_WAIT]
        if deadlines:
            return max(0.0, min(deadlines) - now)
        return 0.0 if self.running or self.owners.num_queued else None
