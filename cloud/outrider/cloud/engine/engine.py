"""Runs sequences together: they join and leave between steps. A step: admit, gather, forward, commit, emit.

A batch whose forward raises is run again by halves, without drafts, until only sequences that fail alone are left out.
Knows neither HTTP nor the model. One thread calls `step`; any thread may call `submit`, `draft`, `cancel` and `stats`.
The output is a pure function of target, prompt, parameters and seed: drafts, batching, chunking,
preemption and prefix sharing change when a token is committed, never which (up to float rounding in the runtime: see
docs/exactness.md).
"""

from __future__ import annotations

from outrider.cloud.engine.commits import Commits
from outrider.cloud.engine.intake import Intake
from outrider.cloud.pending.estimators import StepSize
from outrider.models.errors import ConfigError


class Engine(Intake, Commits):
    """Continuous batching, a block KV cache, chunked prefill, prefix sharing, preemption, verification of drafts."""

    def step(self) -> float | None:
        """Runs one step. Returns 0 when there may be more to do, else seconds until a wait ends, or None when idle."""
        started = self._clock()
        self._read_inbox()
        self._cache.parked.evict_old()
        if self.health.seconds_to_probe() == 0.0:
            self._probe()
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
                self.health.seconds_to_probe(),
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
            self.health.worked()
        elif self._totals.faults > faults and self.health.fault is None:
            self._probe()
        return 0.0

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
        while self._inbox:
            self._inbox.popleft()()

    def _end_loading(self, now: float) -> None:
        """Ends sequences whose deadline passes while their blocks are read; runs tokens whose blocks do not come."""
        for sequence in self._swap.late(now) if self._swap is not None else ():
            if sequence.due_at is not None and sequence.due_at <= now:
                self._expire(sequence)
            else:
                self._enqueue_with(sequence, None)

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
        context = max(1, min(context, self.limits.max_positions - max_tokens - 1))
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
