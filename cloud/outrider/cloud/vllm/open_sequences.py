"""Keeps the open sequences of vLLM's engine: what is reported of them goes to their sinks, and each ends once.

On the engine's thread, but for what says otherwise. Knows no vLLM.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from outrider.cloud.distributions import AdapterCounts, Distributions
from outrider.cloud.engine.request_checks import Turnover, deadline_exceeded, open_one, require_room
from outrider.cloud.seam import EndEvent, GenerateRequest, SequenceEndReason, SequenceUsage, Sink
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.grammars import note_refusal
from outrider.cloud.vllm.options import VllmConfig
from outrider.cloud.vllm.parked import KeptPrefixes
from outrider.models.errors import RequestError
from outrider.models.faults import log_fault


@dataclass(slots=True, eq=False)
class OpenSequence:
    """An open sequence. generated: append-only, so any thread may read it."""

    number: int
    request: GenerateRequest
    sink: Sink
    prompt: array[int]
    generated: list[int] = field(default_factory=list)
    ending: SequenceEndReason = "cancelled"  # what a cancellation means
    is_probe: bool = False
    is_added: bool = False  # vLLM knows of it
    is_cancelled: bool = False
    due: asyncio.TimerHandle | None = None  # ends it at its deadline

    @property
    def num_ids(self) -> int:
        """Token ids that it holds."""
        return len(self.prompt) + len(self.generated) + self.request.pick.processors.num_ids

    @property
    def name(self) -> str:
        """Its name in vLLM."""
        return f"outrider-{self.number}"


class OpenSequences:
    """By number. abort: ends a sequence in vLLM. heard: called with each report. gauges: as reported last."""

    def __init__(self, config: VllmConfig, *, abort: Callable[[OpenSequence], None], heard: Callable[[], None]) -> None:
        self.by_number: dict[int, OpenSequence] = {}
        self.kept = KeptPrefixes(config.max_kept, time.monotonic, max_s=config.max_kept_s)
        self.distributions = Distributions()
        self.distributions.adapters = {name: AdapterCounts() for name in config.adapters}
        self.gauges = wire.Gauges()
        self._abort = abort
        self._heard = heard
        self._turnover = Turnover()
        self._is_empty = threading.Event()

    def __len__(self) -> int:
        return len(self.by_number)

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter(list(self.by_number.values()))

    def find(self, number: int) -> OpenSequence:
        """An open sequence. Raises RequestError 404 `unknown_session` for one that is over. On any thread."""
        return open_one(self.by_number, number)

    def require_room(self, owner: bytes, config: VllmConfig) -> None:
        """Raises RequestError `overloaded` if the queue is full, by requests or by tokens. On any thread."""
        if len(self) >= config.max_running:
            here = [(each.request.asker.owner, each.num_ids) for each in self]
            cache_tokens = self.gauges.num_blocks * self.gauges.block_size
            retry_after_s = partial(self._turnover.retry_after_s, now=time.monotonic())
            require_room(owner, here, config.max_running, config.max_queue, cache_tokens, retry_after_s)

    def wait_until_empty(self, seconds: float, is_dead: Callable[[], bool]) -> None:
        """Blocks until all are over, for so many seconds at most, or until the engine is dead. On any other thread."""
        deadline = time.monotonic() + seconds
        while self.by_number and not is_dead() and time.monotonic() < deadline:
            self._is_empty.wait(timeout=max(0.0, deadline - time.monotonic()))
            self._is_empty.clear()

    # -- what is reported --------------------------------------------------------------------------------------------

    def take(self, report: wire.Report) -> None:
        """Gives each sequence what is reported of it; a bug of ours ends this sequence, and no other."""
        self._heard()
        if report.gauges is not None:
            self.gauges = report.gauges
        reported: list[wire.Commit | wire.End] = [*report.commits, *report.ends]
        for what in reported:
            sequence = self.by_number.get(what.number)
            if sequence is not None:
                try:
                    self._take(sequence, what)
                except Exception as error:
                    log_fault(error)
                    self.fail(sequence)

    def _take(self, sequence: OpenSequence, what: wire.Commit | wire.End) -> None:
        if isinstance(what, wire.Commit):
            event, adapter = what.event, sequence.request.adapter
            sequence.generated.extend(event.tokens)
            if adapter is not None:
                self.distributions.committed_with(
                    adapter, len(event.tokens), proposed=event.proposed, accepted=event.accepted
                )
            sequence.sink(event)
            return
        fault = None
        if what.reason == "fault":
            fault = RequestError("model_fault", "the model's runtime failed: logits are not finite", status=500)
        if what.refusal is not None:
            code, message, mark = what.refusal
            fault = failed() if code == "internal_error" else RequestError(code, message)
            note_refusal(sequence.request.pick.grammar, mark)
        self.end(sequence, _reason(what.reason, sequence), fault, what.usage)

    # -- ends --------------------------------------------------------------------------------------------------------

    def end(
        self,
        sequence: OpenSequence,
        reason: SequenceEndReason,
        error: RequestError | None = None,
        usage: SequenceUsage | None = None,
    ) -> None:
        """Ends a sequence, unless it is over. usage: as reported, where that is known."""
        if self.by_number.pop(sequence.number, None) is None:
            return
        if sequence.due is not None:
            sequence.due.cancel()
        self._turnover.note(time.monotonic())
        if reason == "deadline" and not sequence.generated:
            reason, error = "error", deadline_exceeded()
        request, name = sequence.request, None
        # What is cancelled as "stop" has tokens that the text has not.
        if error is None and sequence.ending != "stop" and request.is_parked_after(reason):
            name = self.kept.keep(request.asker.owner, [*sequence.prompt, *sequence.generated], request.asker.name_of)
        if not sequence.is_probe:
            self.distributions.ended(reason)
        usage = usage or SequenceUsage(prompt_tokens=len(sequence.prompt))
        usage.completion_tokens = len(sequence.generated)
        sequence.sink(EndEvent(reason, usage, error, name))
        if not self.by_number:
            self._is_empty.set()

    def fail(self, sequence: OpenSequence) -> None:
        """Ends a sequence with an error, here and in vLLM."""
        self._abort(sequence)
        try:
            self.end(sequence, "error", failed())
        except Exception as error:  # of its sink, again
            log_fault(error)

    def end_all(self, reason: SequenceEndReason, error: RequestError | None = None) -> None:
        """Ends what is open, also where vLLM does not answer."""
        for sequence in self:
            self.end(sequence, reason, error)
        self._is_empty.set()


def failed() -> RequestError:
    """The error of a bug, ours or vLLM's."""
    return RequestError("internal_error", "the server failed on this request; its log has the details", status=500)


def _reason(reason: str, sequence: OpenSequence) -> SequenceEndReason:
    if reason == "full":
        return "length" if len(sequence.generated) == sequence.request.max_tokens else "context"
    if reason == "cancelled":
        return sequence.ending
    known: dict[str, SequenceEndReason] = {"stop": "stop", "once": "once", "fault": "error", "refused": "error"}
    return known[reason]
