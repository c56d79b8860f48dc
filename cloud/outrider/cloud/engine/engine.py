"""Runs sequences together: they join and leave between steps. A step: admit, gather, forward, commit, emit.

A batch whose forward raises is run again by halves, without drafts, until only sequences that fail alone are left out.
Knows neither HTTP nor the model. One thread calls `step`; any thread may call `submit`, `draft`, `cancel` and `stats`.
The output is a pure function of target, prompt, parameters and seed: drafts, batching, chunking,
preemption and prefix sharing change when a token is committed, never which (up to float rounding in the runtime: see
docs/exactness.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from outrider.cloud.distributions import num_tested
from outrider.cloud.engine.intake import Intake
from outrider.cloud.engine.request_checks import internal_error
from outrider.cloud.engine.row_choosers import choosing
from outrider.cloud.engine.runner import Rows, Share, picked
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.seam import CommitEvent, SequenceEndReason
from outrider.models.errors import ConfigError, ModelFault, RequestError
from outrider.models.faults import log_fault
from outrider.models.processors.chooser import AcceptanceChooser

_MOST_PAUSE: Final = 0.8
"""Of a step's expected time: when the engine begins what it does while a device runs the step."""
_LATER: Final = 0.02
"""So much later than the last time, where it was done before the device was; else at `_SOONER` of that time."""
_SOONER: Final = 0.8
_SHORTEST_S: Final = 0.001  # that is waited for
_LOOK_S: Final = 0.002  # until it looks again whether the device is done


class Engine(Intake):
    """Continuous batching, a block KV cache, chunked prefill, prefix sharing, preemption, verification of drafts."""

    def step(self) -> float | None:
        """Runs one step. Returns 0 when there may be more to do, else seconds until a wait ends, or None when idle."""
        started = self._clock()
        self._read_inbox()
        self._cache.parked.evict_old()
        if self.health.seconds_to_probe() == 0.0:
            self._probe()
        self._expire(started)
        for sequence in self._swap.late(started):
            self._enqueue_with(sequence, None)  # its tokens run
        self._scheduler.admit()
        shares = self._scheduler.gather(started)
        if not shares:
            self._learn()
            deadlines = (
                self._scheduler.next_deadline(started),
                self._first_due - started if self.has_work and self._first_due < math.inf else None,
                self._swap.seconds_to_late(started),
                self.health.seconds_to_probe(),
            )
            return min((seconds for seconds in deadlines if seconds is not None), default=None)
        ready = self._clock()
        size = StepSize(sum(len(share.new) for share in shares), sum(share.num_attended for share in shares))
        passes, faults = self._totals.passes, self._totals.faults
        self._moved_s, self._is_beside = 0.0, False
        try:
            rows = self._runner.forward(shares, lambda is_over: self._try(lambda: self._beside(ready, size, is_over)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a runtime may raise anything, such as a Rust panic
            self._fail(self._run_apart(shares, error), error)
            ran = self._clock()
        else:
            ran = self._clock()
            self._commit(shares, rows, ran)
            if len(shares) == 1:
                time.sleep(0.0)  # lets the event loop have Python at once: for one text that is sooner, for many later
            has_trees = any(share.depths for share in shares)
            self._totals.tree_steps += has_trees
            self._learn_times()  # of the step before, where nothing was done beside this one
            self._times = size, ran - ready + self._moved_s, has_trees
            if not self._is_beside:
                self._learn_times()
        model_s = ran - ready + self._moved_s
        took_s = self._clock() - started
        self._totals.count_step(size.tokens, model_s=model_s, overhead_s=took_s - model_s)
        self._distributions.stepped(len(shares), size.tokens, took_s)
        if self._totals.passes > passes:
            self.health.worked()
        elif self._totals.faults > faults and self.health.fault is None:
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

    def _commit(self, shares: Sequence[Share], rows: Rows, now: float) -> None:
        """Picks row by row, accepts drafted tokens while they equal the picks, and notifies the sinks."""
        with choosing(shares, rows):
            self._commit_rows(shares, rows, now)

    def _commit_rows(self, shares: Sequence[Share], rows: Rows, now: float) -> None:
        """As `_commit`.

        A share whose rows are not finite runs again without drafts: keys of a wrong guess that are not finite reach the
        rows beside it (a masked weight of 0 times NaN is NaN), and no guess may end a sequence.
        """
        first = 0
        spoiled: list[tuple[Share, ModelFault]] = []
        refused: list[tuple[SequenceState, RequestError]] = []
        for share in shares:
            own = rows[first : first + share.num_rows]
            first += share.num_rows
            if not share.is_complete:
                share.sequence.computed += len(share.new)
                continue
            sequence, params = share.sequence, share.sequence.request.pick.params
            try:
                branch = picked(
                    own,
                    share.drafted,
                    params,
                    len(sequence.tokens),
                    chooser=sequence.chooser,
                    stop_ids=sequence.request.stop_ids,
                    max_tokens=sequence.drafts.num_left,
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
                refused.append((sequence, internal_error()))
                continue
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
        sequence, drafts = share.sequence, share.sequence.drafts
        base, proposed, accepted = len(sequence.generated), share.num_drafted, len(tokens) - 1
        chooser = sequence.chooser
        by_rule = chooser if isinstance(chooser, AcceptanceChooser) else None
        sequence.computed = len(sequence.tokens) + (accepted if is_held else 0)
        sequence.tokens += tokens
        sequence.generated.extend(tokens)
        reason = self._end_reason(sequence)
        num_lookup_proposed = min(drafts.num_lookup_chosen, proposed)
        looked_up = drafts.follow(tokens, teaches_path=not reason)
        if self._is_beside and base:
            self._lessons.append(sequence)  # it learns beside the next step
        else:
            drafts.settle()  # at once; a text's first commit teaches most
        self._cache.register_full_blocks(sequence)
        sequence.usage.count_pass(len(tokens), proposed, accepted, looked_up)
        judged, tested = None, 0
        if by_rule is not None:
            judged = tested = by_rule.num_tested
            self._totals.tolerated += by_rule.num_tolerated
        elif proposed:
            tested = num_tested(accepted, tokens, share.drafted.after(accepted_nodes))
        if proposed:
            self._distributions.verified(accepted, tested)
        self._totals.count_pass(len(tokens), proposed, accepted, num_lookup_proposed, looked_up, tested=tested)
        logprobs = tuple(chooser.logprobs) if chooser is not None else ()
        sequence.sink(CommitEvent(base, tuple(tokens), accepted, proposed, looked_up, logprobs, judged))
        if reason:
            self._finish(sequence, reason)
        elif not sequence.is_muted and self._drafting.may_wait(drafts):
            self._drafting.start_wait(drafts, now, crowding=self._scheduler.owners.crowding(sequence))

    def _end_reason(self, sequence: SequenceState) -> SequenceEndReason | None:
        if sequence.tokens[-1] in sequence.request.stop_ids:
            return "stop"
        if sequence.drafts.num_left == 0:
            return "length" if len(sequence.generated) == sequence.request.max_tokens else "context"
        return "once" if sequence.request.once else None

    def _probe(self) -> None:
        """Runs one token of its own: whether this succeeds tells a runtime that cannot work from a bad request."""
        blocks = self._cache.pool.allocate(1)
        if blocks is None:  # none is free, and without a probe a full cache of an idle server would never recover
            self._cache.release_parked()
            blocks = self._cache.pool.allocate(1)
        if blocks is None:
            return self.health.put_off()  # sequences hold them all: their next step tells
        try:
            self._runner.probe(blocks)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.health.failed(error)
        else:
            self.health.worked()
        finally:
            self._cache.pool.release(blocks)

    def _read_inbox(self) -> None:
        for _ in range(len(self._inbox)):  # what comes meanwhile waits for the next step
            self._do(*self._inbox.popleft())

    def _do(self, merged: SequenceState | None, act: Callable[[], None]) -> None:
        """What came through the inbox."""
        if merged is None:
            act()
        else:
            self._try(act, merged)

    def _try(self, act: Callable[[], None], sequence: SequenceState | None = None) -> None:
        """Does something that only concerns drafts: any may be lost. Where it raises, the sequence loses its own, and
        has no more, so that each logs one fault at most.
        """
        if sequence is not None and sequence.is_muted:
            return
        try:
            act()
        except Exception as error:
            self._totals.faults += 1
            log_fault(error)
            if sequence is not None:
                sequence.is_muted = True
                asker, old = sequence.request.asker, sequence.drafts
                sequence.drafts = self._drafting.pending(
                    asker.client, old.committed, old.max_new, sequence.request.hints, num_own=old.num_own
                )
                sequence.drafts.waited_s = old.waited_s

    def _beside(self, began: float, size: StepSize, is_over: Callable[[], bool]) -> None:
        """What need not be done between two steps, while a device runs one that began at `began`: learns from the last
        one, and merges drafts that no request or cancellation comes before. is_over: whether the device is done.

        It begins late, so that drafts arrive before, and the event loop has Python to itself; sooner after steps that
        were over before it was done.
        """
        self._is_beside = True
        self._learn_times()
        until = began + self._pause * self._drafting.curve.expected_s(size)
        while (pause_s := until - self._clock()) > _SHORTEST_S and not is_over():
            time.sleep(min(pause_s, _LOOK_S))
        self._learn(is_over)
        self._lessons.clear()  # what is left is learned with its sequence's next commit; of ended ones it is lost
        while self._inbox and self._inbox[0][0] is not None and not is_over():
            self._do(*self._inbox.popleft())
        self._pause = self._pause * _SOONER if is_over() else min(_MOST_PAUSE, self._pause + _LATER)

    def _learn_times(self) -> None:
        """Learns how long the last step took."""
        if self._times is not None:
            times, self._times = self._times, None
            self._drafting.stepped(*times)

    def _learn(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Learns from the last step's commits, and prepares what the choice after them needs."""
        while self._lessons and not is_over():
            sequence = self._lessons.popleft()
            self._try(sequence.drafts.settle, sequence)
            if sequence.id in self._sequences:
                crowding = self._scheduler.owners.crowding(sequence)
                self._try(partial(self._drafting.prepare, sequence.drafts, crowding=crowding), sequence)

    def shut_down(self) -> None:
        """Ends every sequence with reason "shutdown" and frees all blocks; the engine can be used again."""
        self._read_inbox()
        self._lessons.clear()
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "shutdown")
        if (store := self._swap.store) is None:
            self._cache.release_parked()
        else:  # all of them go to disk, however many wait
            self._cache.release_parked(store.settle)
            store.flush()

    def close(self) -> None:
        """Ends the thread that writes prefixes to disk. Call it last."""
        if self._swap.store is not None:
            self._swap.store.close()

    def calibrate(self, *, max_tokens: int = 32) -> None:
        """Measures the step-time curve, up to max_tokens tokens after 64 others. Call before any request."""
        context = max(1, min(64, self.limits.max_positions - max_tokens - 1))
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
            for n in sizes * 3:
                self._drafting.stepped(StepSize.of(n, context), self._runner.time(n, context, blocks, n), False)
        finally:
            self._cache.pool.release(blocks)
