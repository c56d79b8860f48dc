"""Holds what an engine is made of, says how it is, and ends its sequences."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.cloud.engine.cache import ParkedPrefixes, SequenceCache
from outrider.cloud.engine.config import EngineConfig, TreeForm
from outrider.cloud.engine.health import Health
from outrider.cloud.engine.pool import BlockPool
from outrider.cloud.engine.request_checks import Turnover, deadline_exceeded, internal_error
from outrider.cloud.engine.runner import ModelRunner, Share
from outrider.cloud.engine.scheduler import Scheduler
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.engine.swap import BlockSwap
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.seam import EndEvent, EngineStats, SequenceEndReason, Totals
from outrider.models.errors import ConfigError, RequestError
from outrider.models.faults import log_fault
from outrider.models.runtimes.base import BatchRuntime, LastingFaultRuntime, ModelLimits, TreeRuntime


class EngineState:
    """The parts of an engine, shared by what takes requests and what runs steps.

    limits: vocabulary, and the longest sequence that model and cache together can hold.
    """

    grammar_builder = None  # grammars are built in the server's process

    def __init__(
        self,
        runtime: BatchRuntime,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runtime = runtime
        self._config = config or EngineConfig()
        self._clock = clock
        self._with_trees = verifies_trees(runtime, self._config.form)
        self._drafting = Drafting(self._config.max_draft, self._config.policy, with_trees=self._with_trees)
        self._totals = Totals()
        self._distributions = self._drafting.distributions
        self._moved_s = 0.0  # seconds of the step in which accepted branches were moved
        self._turnover = Turnover()
        self.health = Health(clock, faults_last=isinstance(runtime, LastingFaultRuntime) and runtime.faults_last)
        self._runner = ModelRunner(runtime, self.health, clock)
        self._gate = threading.RLock()  # between `submit` and `reset`
        self._swap = BlockSwap(runtime, self._config.spill, self._totals, clock)
        self._start_afresh()
        self._inbox: deque[tuple[SequenceState | None, Callable[[], None]]] = deque()  # with whose draft it merges
        # Of the last step: what committed and has yet to learn from it, and its time as `Drafting.stepped` takes it.
        self._lessons: deque[SequenceState] = deque()
        self._times: tuple[StepSize, float, bool] | None = None
        self._pause = 0.5  # of a step's expected time, before the engine works beside it
        self._is_beside = False  # a device runs, or ran, the present step
        self._sequences: dict[int, SequenceState] = {}
        self._first_due = math.inf  # when the next deadline of a sequence passes
        self._ids = itertools.count(1)
        longest = min(runtime.limits.max_positions, runtime.num_blocks * runtime.block_size)
        self.limits = ModelLimits(runtime.limits.vocab_size, longest)

    def _start_afresh(self) -> None:
        config, ignore, swap = self._config, lambda prefix: None, self._swap
        is_eager = config.spill is not None and config.spill.always
        on_park, on_evict = (swap.put, ignore) if is_eager else (ignore, swap.put)
        pool = BlockPool(self._runtime.num_blocks, self._runtime.block_size)
        self._cache = SequenceCache(
            ParkedPrefixes(pool, config.max_parked, config.max_parked_s, self._clock, on_evict),
            share_prefixes=config.share_prefixes,
            share_between_owners=config.share_between_owners,
            clock=self._clock,
            on_park=on_park,
        )
        self._scheduler = Scheduler(config, self._cache, self._drafting, self._totals, self._clock, swap.restore)

    def wake(self) -> None:
        """Called when something waits for the engine's thread. Any thread."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence is queued or running."""
        return bool(self._sequences)

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""
        curve = self._drafting.curve
        step_s, extra_s = curve.step_and_extra() if curve.is_known else (None, None)
        num_running = min(len(self._scheduler.running), self._config.max_running)
        return EngineStats(
            totals=replace(self._totals, draft_nodes=self._drafting.num_nodes),
            running=num_running,
            queued=len(self._scheduler.running) - num_running + self._scheduler.owners.num_queued,
            parked=len(self._cache.parked),
            parked_blocks=self._cache.parked.num_blocks,
            num_blocks=self._cache.pool.num_blocks,
            free_blocks=self._cache.pool.num_available,
            step_ms=None if step_s is None else step_s * 1e3,
            draft_token_ms=None if extra_s is None else extra_s * 1e3,
            patience_ms=max((s.drafts.wait.lag_s * 1e3 for s in list(self._scheduler.running)), default=0.0),
            failed=int(self.health.fault is not None),
            trees=int(self._with_trees),
            distributions=self._distributions,
        )

    def _cancel(self, sequence_id: int, reason: SequenceEndReason) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            sequence.request = replace(sequence.request, keep=False)  # it has tokens that the text has not
            self._finish(sequence, reason)

    def _expire(self, now: float) -> None:
        """Ends the sequences whose deadline has passed: with their text, or with an error where they have none."""
        if now < self._first_due:
            return
        for sequence in list(self._sequences.values()):
            if sequence.due_at <= now and sequence.generated:
                self._finish(sequence, "deadline")
            elif sequence.due_at <= now:
                self._finish(sequence, "error", deadline_exceeded(), is_sound=True)
        self._first_due = min((sequence.due_at for sequence in list(self._sequences.values())), default=math.inf)

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
        sequence.usage.waited_s = sequence.drafts.waited_s
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
        self.health.suspect(error)
        ended: list[SequenceState] = []
        try:
            with self._gate:
                ended += self._forget_all()
                self._swap.loading.clear()
                self._start_afresh()
        finally:
            self._end_with_error(ended)

    def abandon(self) -> None:
        """Ends every sequence with an error while a call of the runtime may hang; any thread. The engine is over."""
        with self._gate:
            ended = self._forget_all()
        self._end_with_error(ended)

    def _forget_all(self) -> list[SequenceState]:
        """Every sequence that was open."""
        self._inbox.clear()
        self._lessons.clear()
        ended = list(self._sequences.values())
        self._sequences.clear()
        return ended

    def _end_with_error(self, ended: Sequence[SequenceState]) -> None:
        fault = internal_error()
        for sequence in ended:
            self._totals.finished += 1
            self._distributions.ended("error")
            # A call that returns after all may commit more.
            sink, sequence.sink = sequence.next_sink or sequence.sink, lambda event: None
            try:
                sink(EndEvent("error", sequence.usage, fault))
            except BaseException as second:  # a sink that raises may be the cause
                log_fault(second)


def verifies_trees(runtime: BatchRuntime, form: TreeForm) -> bool:
    """Whether steps may verify trees. ConfigError for `tree` on a runtime that cannot."""
    if form is TreeForm.LINE:
        return False
    reason = runtime.why_no_trees if isinstance(runtime, TreeRuntime) else "the runtime has no trees; use --tree line"
    if form is TreeForm.TREE and reason is not None:
        raise ConfigError(f"steps cannot verify trees here: {reason}")
    return reason is None
