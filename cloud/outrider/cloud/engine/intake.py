"""Takes requests, drafts and cancellations of any thread, for the engine's thread to carry out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from outrider.cloud.engine.cache import ParkedPrefix
from outrider.cloud.engine.engine_state import EngineState
from outrider.cloud.engine.request_checks import (
    check_draft,
    check_request,
    check_tree,
    internal_error,
    open_one,
    require_room,
    usable_recent,
)
from outrider.cloud.engine.row_choosers import chooser_of
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.engine.spill_file import Spilled
from outrider.cloud.engine.swap import Blocks
from outrider.cloud.pending.lookup import PromptLookup
from outrider.cloud.pending.sources import DraftSource
from outrider.cloud.seam import EndEvent, GenerateRequest, SequenceEndReason, Sink
from outrider.models.errors import RequestError
from outrider.models.faults import log_fault
from outrider.models.picks.acceptance import Rule
from outrider.models.runtimes.base import PickingRuntime
from outrider.models.wire.tree_draft import TreeDraft


class Intake(EngineState):
    """What any thread may call. The engine's thread reads what they leave in the inbox."""

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """Queues a sequence and returns its id; events go to `sink`, the last one an EndEvent.

        Raises RequestError: `overloaded`, `empty_prompt`, `context_length_exceeded`, `token_out_of_range`,
        `prefix_not_held`.
        """
        self._require_room(request)
        # A `reset` in between would let the old pool's blocks into the new one, or forget the sequence.
        with self._gate:
            held = None
            if request.prefix_hash:
                held = self._cache.parked.take(request.asker.owner, request.asker.name_of(request.prefix_hash))
            spilled = request.stored if request.prefix_hash and held is None else None
            if request.prefix_hash and held is None and spilled is None:
                raise RequestError(
                    "prefix_not_held", "this prefix is not held here; send its tokens in place of the hash", status=409
                )
            try:
                sequence = self._new_sequence(request, sink, held, spilled.tokens if spilled else ())
            except BaseException:
                if held:
                    self._put(lambda: self._cache.parked.park(held))
                raise
            self._sequences[sequence.id] = sequence
            self._put(lambda: self._begin(sequence, spilled))
        return sequence.id

    def seek(self, owner: bytes, name: str, done: Callable[[Spilled | None], None]) -> bool:
        """Looks on disk for a prefix that is not held in memory; `done` gets what `GenerateRequest.stored` takes.

        False, and `done` is not called, where there is nothing to wait for.
        """
        store = self._swap.store
        return store is not None and not self._cache.parked.has(owner, name) and store.seek(owner, name, done)

    def _put(self, act: Callable[[], None], merged: SequenceState | None = None) -> None:
        """Has the engine's thread do something. Any thread. merged: whose draft it merges, which may be lost."""
        self._inbox.append((merged, act))
        self.wake()

    def _new_sequence(
        self, request: GenerateRequest, sink: Sink, held: ParkedPrefix | None, spilled: Sequence[int] = ()
    ) -> SequenceState:
        """A sequence that takes over the held prefix, or begins with the spilled tokens.

        Raises RequestError as `check_request` does.
        """
        before = held.tokens if held else spilled
        check_request(request, len(before), self.limits)
        tokens = [*before, *request.prompt]
        hints = replace(request.hints, recent=usable_recent(request, self.limits))
        drafts = self._drafting.pending(
            request.asker.client,
            [],
            min(request.max_tokens, self.limits.max_positions - len(tokens)),
            hints,
            num_own=len(hints.draft) if request.once else None,
        )
        own = () if request.once else self._own_sources(tokens)
        self._drafting.begin(drafts, hints, own)
        sequence = SequenceState(next(self._ids), request, sink, tokens, drafts, submitted_s=self._clock())
        picks = isinstance(self._runtime, PickingRuntime)
        sequence.chooser = chooser_of(request, tokens, self.limits.vocab_size, picks=picks)
        if request.asker.deadline_ms is not None:
            sequence.due_at = self._clock() + request.asker.deadline_ms / 1e3
        sequence.usage.prompt_tokens = len(sequence.tokens)
        if held:
            sequence.blocks, sequence.hashes = list(held.blocks), list(held.hashes)
            sequence.chain = list(held.hashes)
            sequence.computed = min(held.computed, len(sequence.tokens) - 1)
            sequence.usage.cached_prompt_tokens = sequence.computed  # so it costs nothing where it never runs
        return sequence

    def _require_room(self, request: GenerateRequest) -> None:
        """Raises RequestError `overloaded` if the queue is full, by requests or by tokens."""
        config = self._config
        # Also counts those that the engine has not looked at yet.
        if len(self._sequences) >= config.max_running:
            here = [(each.request.asker.owner, each.num_counted) for each in list(self._sequences.values())]
            cache_tokens = self._runtime.num_blocks * self._runtime.block_size
            require_room(
                request.asker.owner,
                here,
                config.max_running,
                config.max_queue,
                cache_tokens,
                lambda num_ahead: self._turnover.retry_after_s(num_ahead, self._clock()),
            )

    def draft(self, sequence_id: int, base: int, paths: Sequence[Sequence[int]]) -> None:
        """Adds guesses of what follows the first `base` tokens that the sequence committed, likeliest path first.

        Raises RequestError: `unknown_session`, `draft_ahead`, `token_out_of_range`.
        """
        sequence, arrived = open_one(self._sequences, sequence_id), self._clock()
        check_draft(base, paths, len(sequence.generated), self.limits)
        self._put(partial(self._drafting.merge, sequence.drafts, base, paths, arrived), sequence)

    def draft_tree(self, sequence_id: int, message: TreeDraft) -> None:
        """Adds guesses of what follows the first `message.base` tokens, as a part of a tree.

        Raises RequestError as `draft` does.
        """
        sequence, arrived = open_one(self._sequences, sequence_id), self._clock()
        check_tree(message, len(sequence.generated), self.limits)
        self._put(partial(self._drafting.merge_tree, sequence.drafts, message, arrived), sequence)

    def cancel(self, sequence_id: int, reason: SequenceEndReason = "cancelled") -> None:
        """Ends a sequence early; does nothing if it is over."""
        self._put(lambda: self._cancel(sequence_id, reason))

    def rewind(self, sequence_id: int, base: int, tokens: Sequence[int], sink: Sink) -> bool:
        """Replaces what a sequence generated after its first `base` tokens by `tokens`, as `ServingEngine.rewind`."""
        with self._gate:  # a `reset` forgets the inbox, and ends what it knows of by its newest sink
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                return False
            sequence.next_sink = sink
            self._put(lambda: self._rewind(sequence, base, list(tokens), sink))
        return True

    def _rewind(self, sequence: SequenceState, base: int, tokens: list[int], sink: Sink) -> None:
        if sequence.id not in self._sequences:
            return sink(EndEvent("cancelled", sequence.usage))
        kept = len(sequence.tokens) - len(sequence.generated) + base
        sequence.tokens[kept:] = tokens
        request = sequence.request
        sequence.drafts.rewind(base, tokens, () if sequence.is_muted else self._own_sources(sequence.tokens))
        sequence.sink = sink
        self._cache.cut(sequence, kept)
        if sequence.chooser is not None:
            try:
                sequence.chooser.go_back(sequence.tokens, kept - base - request.num_generated, kept)
            except RequestError as error:  # a grammar's limits
                self._finish(sequence, "error", error, is_sound=True)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                log_fault(error)
                self._finish(sequence, "error", internal_error(), is_sound=True)

    def _own_sources(self, text: Sequence[int]) -> Sequence[DraftSource]:
        """The verifier's own. text: the sequence's list of tokens, which grows."""
        return [PromptLookup(text)] if self._config.looks_up else []

    def _begin(self, sequence: SequenceState, spilled: Spilled | None) -> None:
        """Queues a sequence; one with a spilled prefix when its blocks are there, or not there in time."""
        if sequence.id not in self._sequences:
            return
        self._first_due = min(self._first_due, sequence.due_at)
        if spilled is None:
            self._enqueue(sequence)
        else:
            self._swap.load(sequence, spilled, lambda data: self._put(lambda: self._enqueue_with(sequence, data)))

    def _enqueue(self, sequence: SequenceState) -> None:
        self._scheduler.add(sequence)
        self._totals.rejection_sequences += sequence.request.pick.terms.rule is Rule.REJECTION
        self._totals.tolerance_sequences += sequence.request.pick.terms.is_lossy

    def _enqueue_with(self, sequence: SequenceState, data: Blocks | None) -> None:
        if self._swap.take(sequence, data):
            self._enqueue(sequence)
