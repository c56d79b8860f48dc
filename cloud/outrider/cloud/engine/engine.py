"""Runs sequences together: they join and leave between steps. A step: admit, gather, forward, commit, emit.

A batch whose forward raises is run again by halves, without drafts, until only sequences that fail alone are left out.
Knows neither HTTP nor the model. One thread calls `step`; any thread may call `submit`, `draft`, `cancel` and `stats`.
The output is a pure function of target, prompt, parameters and seed: drafts, batching, chunking,
preemption and prefix sharing change when a token is committed, never which (up to float rounding in the runtime: see
docs/exactness.md).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.cloud.distributions import num_tested
from outrider.cloud.engine.cache import SequenceCache
from outrider.cloud.engine.config import EngineConfig, TreeForm
from outrider.cloud.engine.health import Health
from outrider.cloud.engine.own_sources import own_sources, require_hidden, teach
from outrider.cloud.engine.parked import ParkedPrefix
from outrider.cloud.engine.request_checks import (
    check_draft,
    check_request,
    check_tree,
    deadline_exceeded,
    require_room,
    usable_recent,
)
from outrider.cloud.engine.row_choosers import chooser_of
from outrider.cloud.engine.runner import ModelRunner, Rows, picked
from outrider.cloud.engine.scheduler import Scheduler
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.engine.share import Share
from outrider.cloud.engine.spill_file import Spilled
from outrider.cloud.engine.swap import Blocks, open_swap
from outrider.cloud.engine.turnover import Turnover
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.recent_text import RecentText
from outrider.cloud.pending.sources import Sources
from outrider.cloud.pending.trie import EARLIER_KINDS, PREDICTED_KINDS
from outrider.cloud.seam import CommitEvent, EndEvent, EngineStats, GenerateRequest, SequenceEndReason, Sink, Totals
from outrider.models.errors import ConfigError, ModelFault, RequestError
from outrider.models.faults import log_fault
from outrider.models.picks.acceptance import Rule
from outrider.models.processors.acceptance_chooser import AcceptanceChooser
from outrider.models.runtimes.base import BatchRuntime, LastingFaultRuntime, ModelLimits, TreeRuntime
from outrider.models.wire.tree_draft import TreeDraft


class Engine:
    """Continuous batching, a block KV cache, chunked prefill, prefix sharing, preemption, verification of drafts."""

    def __init__(
        self,
        runtime: BatchRuntime,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runtime = runtime
        self._config = config or EngineConfig()
        require_hidden(runtime, self._config)
        self._clock = clock
        self._with_trees = verifies_trees(runtime, self._config.form)
        self._drafting = Drafting(self._config.max_draft, self._config.policy, with_trees=self._with_trees)
        self._totals = Totals()
        self._distributions = self._drafting.distributions
        self._moved_s = 0.0  # seconds of the step in which accepted branches were moved
        self._turnover = Turnover()
        self._health = Health(clock, faults_last=isinstance(runtime, LastingFaultRuntime) and runtime.faults_last)
        self._runner = ModelRunner(runtime, self._health, clock)
        self._gate = threading.Lock()  # between `submit` and `reset`
        self._swap = open_swap(runtime, self._config.spill, self._totals, clock)
        self.wake: Callable[[], None] = lambda: None
        self._start_afresh()
        self._inbox: deque[Callable[[], None]] = deque()
        self._sequences: dict[int, SequenceState] = {}
        self._ids = itertools.count(1)
        longest = min(runtime.limits.max_positions, runtime.num_blocks * runtime.block_size)
        self._limits = ModelLimits(runtime.limits.vocab_size, longest)

    def _start_afresh(self) -> None:
        self._cache = SequenceCache(
            self._runtime.num_blocks,
            self._runtime.block_size,
            max_parked=self._config.max_parked,
            max_parked_s=self._config.max_parked_s,
            clock=self._clock,
            share_prefixes=self._config.share_prefixes,
            share_between_owners=self._config.share_between_owners,
            **self._when_spilled(),
        )
        on_admit = self._swap.restore if self._swap is not None else lambda sequence: None
        self._scheduler = Scheduler(
            self._config, self._cache, self._drafting, self._totals, self._clock, on_admit=on_admit
        )

    def _when_spilled(self) -> dict[str, Callable[[ParkedPrefix], None]]:
        if self._swap is None or self._config.spill is None:
            return {}
        return {"on_park" if self._config.spill.always else "on_evict": self._swap.put}

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, and the longest sequence that model and cache together can hold."""
        return self._limits

    @property
    def has_work(self) -> bool:
        """Whether any sequence is queued or running."""
        return bool(self._sequences)

    @property
    def is_hung(self) -> bool:
        """Whether a call of the runtime does not return; any thread."""
        return self._health.is_hung

    @property
    def is_lost(self) -> bool:
        """Whether the runtime has failed for good; any thread."""
        return self._health.is_lost

    # -- any thread --------------------------------------------------------------------------------------------------

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
                held = self._cache.take_parked(request.owner, request.kept_as(request.prefix_hash))
            spilled = request.stored if request.prefix_hash and held is None else None
            if request.prefix_hash and held is None and spilled is None:
                raise RequestError(
                    "prefix_not_held", "this prefix is not held here; send its tokens in place of the hash", status=409
                )
            try:
                sequence = self._new_sequence(request, sink, held, spilled.tokens if spilled else ())
            except BaseException:
                if held:
                    self._inbox.append(lambda: self._cache.park_again(held))
                raise
            self._sequences[sequence.id] = sequence
            self._inbox.append(lambda: self._enqueue(sequence) if spilled is None else self._load(sequence, spilled))
        return sequence.id

    def seek(self, owner: bytes, name: str, done: Callable[[Spilled | None], None]) -> bool:
        """Looks on disk for a prefix that is not held in memory; `done` gets what `GenerateRequest.stored` takes.

        False, and `done` is not called, where there is nothing to wait for.
        """
        if self._swap is None or self._cache.is_parked(owner, name):
            return False
        return self._swap.store.seek(owner, name, done)

    def _loaded(self, sequence: SequenceState, data: Blocks | None) -> None:
        """On the thread that reads blocks."""
        self._inbox.append(lambda: self._enqueue_with(sequence, data))
        self.wake()

    def _new_sequence(
        self, request: GenerateRequest, sink: Sink, held: ParkedPrefix | None, spilled: Sequence[int] = ()
    ) -> SequenceState:
        """A sequence that takes over the held prefix, or begins with the spilled tokens.

        Raises RequestError as `check_request` does.
        """
        before = held.tokens if held else spilled
        check_request(request, len(before), self._limits)
        tokens = [*before, *request.prompt]
        drafts = self._drafting.pending(
            request.client,
            [],
            min(request.max_tokens, self._limits.max_positions - len(tokens)),
            lag_ms=request.draft_lag_ms,
            patience_ms=request.patience_ms,
            num_own=len(request.draft) if request.once else None,
        )
        drafts.evidence = request.evidence
        own = [] if request.once else list(own_sources(self._config, tokens, request.params))
        if earlier := usable_recent(request, self._limits):
            kinds = PREDICTED_KINDS if request.is_predicted else EARLIER_KINDS
            own.append(RecentText(earlier, drafts.committed, is_repeat=request.is_repeat, kinds=kinds))
        drafts.sources = Sources(own)
        drafts.trie.merge(request.draft, prefer=True)
        sequence = SequenceState(next(self._ids), request, sink, tokens, drafts, submitted_s=self._clock())
        sequence.chooser = chooser_of(request, tokens, self._limits.vocab_size)
        if request.deadline_ms is not None:
            sequence.due_at = self._clock() + request.deadline_ms / 1e3
        sequence.usage.prompt_tokens = len(sequence.tokens)
        if held:
            sequence.blocks, sequence.hashes = list(held.blocks), list(held.hashes)
            sequence.chain = list(held.hashes)
            sequence.is_lossy = held.is_lossy
            sequence.computed = min(held.computed, len(sequence.tokens) - 1)
            sequence.usage.cached_prompt_tokens = sequence.computed  # so it costs nothing where it never runs
        return sequence

    def _require_room(self, request: GenerateRequest) -> None:
        """Raises RequestError `overloaded` if the queue is full, by requests or by tokens."""
        config = self._config
        # Also counts those that the engine has not looked at yet.
        if len(self._sequences) >= config.max_running:
            here = [(each.request.owner, each.num_counted) for each in list(self._sequences.values())]
            cache_tokens = self._runtime.num_blocks * self._runtime.block_size
            require_room(
                request.owner,
                here,
                config.max_running,
                config.max_queue,
                cache_tokens,
                lambda num_ahead: self._turnover.retry_after_s(num_ahead, self._clock()),
            )

    def draft(self, sequence_id: int, base: int, paths: Sequence[Sequence[int]]) -> None:
        """Adds guesses of what follows the first `base` tokens that the sequence committed, likeliest path first.

        Raises RequestError: `unknown_session`, `draft_ahead`, `token_out_of_range`, `stale_draft`.
        """
        sequence, arrived = self._session(sequence_id), self._clock()
        try:
            check_draft(base, paths, sequence.generated, self._limits)
        except RequestError as error:
            if error.code == "stale_draft":  # even a stale draft shows how long the device takes to answer
                self._inbox.append(lambda: self._drafting.merge(sequence.drafts, base, paths, arrived))
            raise
        self._inbox.append(lambda: self._drafting.merge(sequence.drafts, base, paths, arrived))

    def draft_tree(self, sequence_id: int, message: TreeDraft) -> None:
        """Adds guesses of what follows the first `message.base` tokens, as a part of a tree.

        Raises RequestError as `draft` does.
        """
        sequence, arrived = self._session(sequence_id), self._clock()
        drafts = sequence.drafts
        try:
            check_tree(message, drafts.trie.position_of, sequence.generated, self._limits)
        except RequestError as error:
            if error.code == "stale_draft":  # as above
                self._inbox.append(lambda: self._drafting.merge_tree(drafts, message, arrived))
            raise
        self._inbox.append(lambda: self._drafting.merge_tree(drafts, message, arrived))

    def _session(self, sequence_id: int) -> SequenceState:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise RequestError(
                "unknown_session", "there is no such session: it has ended, or another server has it", status=404
            )
        return sequence

    def cancel(self, sequence_id: int) -> None:
        """Ends a sequence early; does nothing if it is over."""
        self._inbox.append(lambda: self._cancel(sequence_id))

    def rewind(self, sequence_id: int, base: int, tokens: Sequence[int], sink: Sink) -> bool:
        """Replaces what a sequence generated after its first `base` tokens by `tokens`, as `ServingEngine.rewind`."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._inbox.append(lambda: self._rewind(sequence, base, list(tokens), sink))
        return True

    def _rewind(self, sequence: SequenceState, base: int, tokens: list[int], sink: Sink) -> None:
        if sequence.id not in self._sequences:
            return sink(EndEvent("cancelled", sequence.usage))
        kept = len(sequence.tokens) - len(sequence.generated) + base
        sequence.tokens[kept:] = tokens
        request = sequence.request
        sequence.drafts.rewind(base, tokens, own_sources(self._config, sequence.tokens, request.params))
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
                self._finish(sequence, "error", _failed_text(), is_sound=True)

    def fault(self) -> str | None:
        """Why the engine cannot work now; None when it can."""
        return self._health.fault

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""
        curve = self._drafting.curve
        step_s, extra_s = curve.step_and_extra() if curve.is_known else (None, None)
        num_running = min(len(self._scheduler.running), self._config.max_running)
        return EngineStats(
            totals=self._counted(),
            running=num_running,
            queued=len(self._scheduler.running) - num_running + self._scheduler.num_queued,
            parked=self._cache.num_parked,
            parked_blocks=self._cache.num_parked_blocks,
            num_blocks=self._cache.pool.num_blocks,
            free_blocks=self._cache.pool.num_available,
            step_ms=None if step_s is None else step_s * 1e3,
            draft_token_ms=None if extra_s is None else extra_s * 1e3,
            patience_ms=max((s.drafts.wait.lag_s * 1e3 for s in list(self._scheduler.running)), default=0.0),
            failed=int(self.fault() is not None),
            trees=int(self._with_trees),
            spill_lossy=int(self._swap is not None and self._swap.store.is_lossy),
            distributions=self._distributions,
        )

    def _counted(self) -> Totals:
        totals = replace(self._totals, draft_nodes=self._drafting.num_nodes)
        if self._swap is not None:
            counts = self._swap.store.counts
            totals.spilled, totals.restored, totals.spill_faults = counts.written, counts.loaded, counts.faults
            totals.spill_beyond = counts.beyond
        return totals

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Runs one step. Returns 0 when there may be more to do, else seconds until a wait ends, or None when idle."""
        started = self._clock()
        self._read_inbox()
        self._cache.release_old()
        self._probe_if_due()
        self._end_loading(started)
        for sequence in self._scheduler.overdue(started):
            self._expire(sequence)
        self._scheduler.admit()
        shares = self._scheduler.gather(started)
        if not shares:
            deadlines = (
                self._scheduler.next_deadline(started),
                self._scheduler.seconds_to_due(started),
                self._swap.seconds_to_late(started) if self._swap is not None else None,
                self._health.seconds_to_probe(),
            )
            return min((seconds for seconds in deadlines if seconds is not None), default=None)
        ready = self._clock()
        size = StepSize(sum(len(share.new) for share in shares), sum(share.num_attended for share in shares))
        passes, faults = self._totals.passes, self._totals.faults
        self._moved_s = 0.0
        try:
            rows = self._runner.forward(shares)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a runtime may raise anything, such as a Rust panic
            self._fail(self._run_apart(shares, error), error)
            ran = self._clock()
        else:
            ran = self._clock()
            self._commit(shares, rows, ran)
            has_trees = any(share.depths for share in shares)
            self._totals.tree_steps += has_trees
            self._drafting.stepped(size, ran - ready + self._moved_s, has_trees)
        model_s = ran - ready + self._moved_s
        took_s = self._clock() - started
        self._totals.count_step(size.tokens, model_s=model_s, overhead_s=took_s - model_s)
        self._distributions.stepped(len(shares), size.tokens, took_s)
        if self._totals.passes > passes:
            self._health.worked()
        elif self._totals.faults > faults and self._health.fault is None:
            self._probe()
        return 0.0

    def _run_apart(self, shares: Sequence[Share], error: BaseException) -> list[tuple[Share, BaseException]]:
        """Runs shares again that failed together with `error`: by halves, without drafts. Commits those that succeed.

        Returns those that fail alone, each with its error. Nothing of the failed call is used: each run writes the
        keys and values of its new tokens again.
        """
        if len(shares) == 1 and not shares[0].num_drafted:
            return [(shares[0], error)]
        bare = [share.without_drafts() for share in shares]
        middle = len(bare) // 2
        failed: list[tuple[Share, BaseException]] = []
        for half in filter(None, (bare[:middle], bare[middle:])):
            try:
                rows = self._runner.forward(half)
            except KeyboardInterrupt:
                raise
            except BaseException as again:
                failed += self._run_apart(half, again)
            else:
                self._commit(half, rows, self._clock())
        return failed

    def _probe_if_due(self) -> None:
        if self._health.seconds_to_probe() == 0.0:
            self._probe()

    def _probe(self) -> None:
        """Runs one token of its own: whether this succeeds tells a runtime that cannot work from a bad request."""
        blocks = self._cache.pool.allocate(1)
        if blocks is None:  # none is free, and without a probe a full cache of an idle server would never recover
            self._cache.release_parked()
            blocks = self._cache.pool.allocate(1)
        if blocks is None:
            return self._health.put_off()  # sequences hold them all: their next step tells
        try:
            self._runner.probe(blocks)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._health.failed(error)
        else:
            self._health.worked()
        finally:
            self._cache.pool.release(blocks)

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _enqueue(self, sequence: SequenceState) -> None:
        if sequence.id in self._sequences:
            self._scheduler.add(sequence)
            self._totals.rejection_sequences += sequence.request.terms.rule is Rule.REJECTION
            self._totals.tolerance_sequences += sequence.request.terms.is_lossy

    def _load(self, sequence: SequenceState, spilled: Spilled) -> None:
        """The sequence is queued when the blocks of its prefix are there, or not there in time."""
        if self._swap is not None and sequence.id in self._sequences:
            self._swap.load(sequence, spilled, lambda data: self._loaded(sequence, data))

    def _enqueue_with(self, sequence: SequenceState, data: Blocks | None) -> None:
        if self._swap is not None and self._swap.take(sequence, data):
            self._enqueue(sequence)

    def _end_loading(self, now: float) -> None:
        """Ends sequences whose deadline passes while their blocks are read; runs tokens whose blocks do not come."""
        for sequence in self._swap.late(now) if self._swap is not None else ():
            if sequence.due_at is not None and sequence.due_at <= now:
                self._expire(sequence)
            else:
                self._enqueue_with(sequence, None)

    def _commit(self, shares: Sequence[Share], rows: Rows, now: float) -> None:
        """Picks row by row, accepts drafted tokens while they equal the picks, and notifies the sinks.

        A share whose rows are not finite runs again without drafts: keys of a wrong guess that are not finite reach the
        rows beside it (a masked weight of 0 times NaN is NaN), and no guess may end a sequence.
        """
        first = 0
        spoiled: list[tuple[Share, ModelFault]] = []
        refused: list[tuple[SequenceState, RequestError]] = []
        hidden = self._runner.hidden_rows() if self._config.heads is not None else None
        for share in shares:
            own = rows[first : first + share.num_rows]
            states = None if hidden is None else hidden[first : first + share.num_rows]
            first += share.num_rows
            if not share.is_complete:
                share.sequence.computed += len(share.new)
                continue
            sequence, params = share.sequence, share.sequence.request.params
            stops, left = sequence.request.stop_ids, sequence.num_left
            try:
                position = len(sequence.tokens)
                branch = picked(
                    own,
                    share.drafted,
                    params,
                    position,
                    chooser=sequence.chooser,
                    stop_ids=stops,
                    max_tokens=left,
                )
            except ModelFault as fault:
                spoiled.append((share, fault))
                continue
            except RequestError as error:  # a grammar's limits, or what it leaves together with other rules
                # Its traceback holds this frame, and so the error itself: a cycle, with all that the sequence holds.
                refused.append((sequence, error.with_traceback(None)))
                continue
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a library's bug, also past Exception, costs the text that met it
                if sequence.chooser is None:
                    raise
                log_fault(error)
                refused.append((sequence, _failed_text()))
                continue
            teach(share, branch, own, states)
            is_held = self._move_into_place(sequence, branch.nodes)
            self._take_tokens(share, branch.tokens, branch.nodes, now, is_held=is_held)
        for sequence, refusal in refused:
            self._finish(sequence, "error", refusal, is_sound=True)
        for share, not_finite in spoiled:  # last: another forward may overwrite the rows
            self._fail(self._run_apart([share], not_finite), not_finite)

    def _move_into_place(self, sequence: SequenceState, nodes: Sequence[int]) -> bool:
        """Moves keys and values of the accepted drafted tokens to where those of the next positions belong.

        Returns whether they are there. Where the move fails, what the slots hold is not known, and the log has why.
        """
        sources, targets = self._cache.moves(sequence, nodes)
        if not sources:
            return True
        started = self._clock()
        try:
            self._runner.move(sources, targets)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a runtime may raise anything
            self._totals.faults += 1
            log_fault(error)
            return False
        finally:
            self._moved_s += self._clock() - started
        return True

    def _take_tokens(
        self, share: Share, tokens: list[int], accepted_nodes: Sequence[int], now: float, *, is_held: bool
    ) -> None:
        """Appends the picked tokens to the sequence, notifies its sink, and ends it where they end it.

        accepted_nodes: indices of the accepted drafted tokens. is_held: whether the cache holds them in their places;
        else they run again.
        """
        sequence = share.sequence
        base, proposed, accepted = len(sequence.generated), share.num_drafted, len(tokens) - 1
        pending = sequence.drafts.trie.likeliest_of_device(self._config.max_draft)
        chooser = sequence.chooser
        by_rule = chooser if isinstance(chooser, AcceptanceChooser) else None
        sequence.computed = len(sequence.tokens) + (accepted if is_held else 0)
        sequence.tokens += tokens
        sequence.generated.extend(tokens)
        num_lookup_proposed = min(sequence.drafts.num_lookup_chosen, proposed)
        looked_up = sequence.drafts.advance(tokens)
        self._cache.register_full_blocks(sequence)
        sequence.usage.count_pass(len(tokens), proposed, accepted, looked_up)
        tested = 0
        if proposed:
            if by_rule is not None:
                tested = by_rule.num_tested
            else:
                tested = num_tested(accepted, tokens, share.drafted.after(accepted_nodes))
            self._distributions.verified(accepted, tested)
        self._totals.count_pass(len(tokens), proposed, accepted, num_lookup_proposed, looked_up, tested=tested)
        logprobs = tuple(chooser.logprobs) if chooser is not None else ()
        judged = None
        if by_rule is not None:
            judged = by_rule.num_tested
            self._totals.tolerated += by_rule.num_tolerated
        sequence.sink(CommitEvent(base, tuple(tokens), accepted, proposed, looked_up, logprobs, judged))
        reason = self._end_reason(sequence)
        if reason:
            self._finish(sequence, reason)
        else:
            self._drafting.committed(sequence.drafts, pending, tokens, now, crowding=self._scheduler.crowding(sequence))

    def _end_reason(self, sequence: SequenceState) -> SequenceEndReason | None:
        if sequence.tokens[-1] in sequence.request.stop_ids:
            return "stop"
        if sequence.num_left == 0:
            return "length" if len(sequence.generated) == sequence.request.max_tokens else "context"
        return "once" if sequence.request.once else None

    # -- ends --------------------------------------------------------------------------------------------------------

    def _cancel(self, sequence_id: int) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    def _expire(self, sequence: SequenceState) -> None:
        """Ends a sequence at its deadline: with its text, or with an error where it has none."""
        if sequence.generated:
            self._finish(sequence, "deadline")
        else:
            self._finish(sequence, "error", deadline_exceeded(), is_sound=True)

    def _finish(
        self,
        sequence: SequenceState,
        reason: SequenceEndReason,
        error: RequestError | None = None,
        *,
        is_sound: bool = False,
    ) -> None:
        """Frees everything the sequence holds, or parks it, and notifies its sink.

        is_sound: the error says nothing against the blocks, so they may be shared again.
        """
        self._scheduler.remove(sequence)
        if self._swap is not None:
            self._swap.forget(sequence)
        name = None
        if error is not None and not is_sound:
            self._cache.discard(sequence)
        elif sequence.request.is_parked_after(reason):
            name = self._cache.park(sequence)
        else:
            self._cache.drop(sequence)
        self._totals.finished += 1
        self._distributions.ended(reason)
        self._turnover.note(self._clock())
        del self._sequences[sequence.id]  # last: what raises before this leaves the end to `reset`
        sequence.sink(EndEvent(reason, sequence.usage, error, name))

    def _fail(self, failed: Sequence[tuple[Share, BaseException]], error: BaseException) -> None:
        """Ends each share's sequence with its own error; `error` is the step's."""
        self._totals.faults += 1
        for fault in {repr(each): each for each in (error, *(own for _, own in failed))}.values():
            log_fault(fault)
        for share, own in failed:
            words = f"the model's runtime failed: {str(own) or type(own).__name__}"
            self._finish(share.sequence, "error", RequestError("model_fault", words, status=500))

    def reset(self, error: BaseException) -> None:
        """Ends every sequence with an error and starts afresh, after a step that raised (a bug of ours).

        Blocks and books may be in any state, so they are not trusted: the cache starts empty.
        """
        log_fault(error)
        self._totals.faults += 1
        self._health.suspect(error)
        ended: list[SequenceState] = []
        try:
            with self._gate:
                self._inbox.clear()
                ended += self._sequences.values()
                self._sequences.clear()
                if self._swap is not None:
                    self._swap.clear()
                self._start_afresh()
        finally:
            self._end_with_error(ended)

    def abandon(self) -> None:
        """Ends every sequence with an error while a call of the runtime may hang; any thread. The engine is over."""
        with self._gate:
            self._inbox.clear()
            ended = list(self._sequences.values())
            self._sequences.clear()
        self._end_with_error(ended)

    def _end_with_error(self, ended: Sequence[SequenceState]) -> None:
        fault = _failed_text()
        for sequence in ended:
            self._totals.finished += 1
            self._distributions.ended("error")
            sink, sequence.sink = sequence.sink, lambda event: None  # a call that returns after all may commit more
            try:
                sink(EndEvent("error", sequence.usage, fault))
            except BaseException as second:  # a sink that raises may be the cause
                log_fault(second)

    def shut_down(self) -> None:
        """Ends every sequence with reason "shutdown" and frees all blocks; the engine can be used again."""
        self._read_inbox()
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "shutdown")
        if self._swap is None:
            self._cache.release_parked()
        else:  # all of them go to disk, however many wait
            self._cache.release_parked(self._swap.store.settle)
            self._swap.store.flush()

    def close(self) -> None:
        """Ends the thread that writes prefixes to disk. Call it last."""
        if self._swap is not None:
            self._swap.store.close()

    def calibrate(self, *, max_tokens: int = 32, context: int = 64, repeats: int = 3) -> None:
        """Measures the step-time curve, up to max_tokens tokens after `context` others. Call before any request."""
        context = max(1, min(context, self._limits.max_positions - max_tokens - 1))
        blocks = self._cache.pool.allocate(-(-(context + max_tokens) // self._cache.pool.block_size))
        if blocks is None:
            raise ConfigError(
                f"the KV cache has {self._cache.pool.num_blocks} blocks of {self._cache.pool.block_size} tokens, "
                "too few to measure a step; raise --kv-cache-mb"
            )
        try:
            self._runner.time(context, 0, blocks, 1)
            sizes = [n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if n <= max_tokens]
            for n in sizes:  # untimed: a runtime may prepare for a new shape
                self._runner.time(n, context, blocks, n)
            for n in sizes * repeats:
                self._drafting.stepped(StepSize.of(n, context), self._runner.time(n, context, blocks, n), False)
        finally:
            self._cache.pool.release(blocks)


def _failed_text() -> RequestError:
    return RequestError("internal_error", "the server failed on this request; its log has the details", status=500)


def verifies_trees(runtime: BatchRuntime, form: TreeForm) -> bool:
    """Whether steps may verify trees. ConfigError for `tree` on a runtime that cannot."""
    if form is TreeForm.LINE:
        return False
    reason = runtime.why_no_trees if isinstance(runtime, TreeRuntime) else "the runtime has no trees; use --tree line"
    if form is TreeForm.TREE and reason is not None:
        raise ConfigError(f"steps cannot verify trees here: {reason}")
    return reason is None
