"""Serves sequences with vLLM, behind the seam: sends requests and drafts, and watches vLLM.

vLLM runs on an event loop of its own, in a thread of this process; sinks run on that thread. What a sequence commits,
and how it ends, comes from the scheduler over one socket, so events are in order; what vLLM itself returns is used only
to notice that its engine process has died.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from outrider.cloud.engine.request_checks import check_draft, check_request, check_tree, usable_recent
from outrider.cloud.seam import (
    EndEvent,
    EngineStats,
    Event,
    GenerateRequest,
    PickOptions,
    SequenceEndReason,
    ServingEngine,
    Sink,
)
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.grammars import GrammarsInWorkers
from outrider.cloud.vllm.hang_watch import TICK_S, HangWatch
from outrider.cloud.vllm.known_text import check_known_text, check_same_text
from outrider.cloud.vllm.open_sequences import OpenSequence, OpenSequences, failed
from outrider.cloud.vllm.options import VllmConfig
from outrider.cloud.vllm.processes import VllmProcesses
from outrider.cloud.vllm.terms import Terms, number_of
from outrider.models.errors import ModelFault, RequestError, RuntimeUnavailable
from outrider.models.faults import log_fault
from outrider.models.grammar.compiler import BuildElsewhere
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import ModelLimits
from outrider.models.wire.tree_draft import TreeDraft

_PROBE_S: Final = 60.0
"""How long the steps of one measurement may take."""
_END_S: Final = 10.0
"""How long `stop` waits for cancelled sequences."""
_PROBE_SIZES: Final = (0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)
"""Drafted tokens of the steps that `calibrate` times."""
_PROBE_CONTEXT: Final = 64
_DIED: Final = "vLLM's engine process has died"
_HANGS: Final = "a step hangs in vLLM"

_log = logging.getLogger("outrider.cloud")


class VllmEngine(ServingEngine):
    """vLLM behind the seam. Any thread may call any method; sinks run on the engine's own thread."""

    def __init__(self, config: VllmConfig) -> None:
        """Starts vLLM's processes and loads the model. Raises RuntimeUnavailable or ConfigError."""
        self._config = config
        self._numbers = itertools.count(1)
        self._gate = threading.Lock()  # between `submit` and the end of everything
        self._is_draining = False
        self._death: str | None = None
        self._on_death: Callable[[str], None] | None = None
        self._watch = HangWatch()
        self._sequences = OpenSequences(config, abort=self._abort, heard=self._watch.heard)
        self._processes = VllmProcesses(config)
        self._grammars = GrammarsInWorkers(self._processes.loop, self._processes.call_workers, self.fault)
        self._processes.begin(self._processes.read_reports(self._sequences.take))
        self._processes.begin(self._watch_vllm())

    # -- start and end -----------------------------------------------------------------------------------------------

    def calibrate(self) -> None:
        """Measures steps of one sequence with 0, 1, 2, ... drafted tokens. Raises RuntimeUnavailable where vLLM does
        not pick as Outrider does.
        """
        sizes = [size for size in _PROBE_SIZES if size <= self._config.max_draft]
        for size in sizes:  # untimed: vLLM may prepare for a new shape
            _probe(self, size, 2)

        def submit(request: GenerateRequest, sink: Sink) -> int:
            return self._submit(request, array("i", request.prompt), sink, probe=0)

        check_known_text(submit, self.limits)
        if self._config.is_bitwise:
            check_same_text(submit, self.limits)
        for size in sizes:
            _probe(self, size, 4)

    def start(self) -> None:
        """Does nothing: requests are accepted from the start."""

    def on_death(self, act: Callable[[str], None]) -> None:
        """Has `act` called with the reason when vLLM has died or hangs; at once if it has."""
        with self._gate:
            self._on_death, death = act, self._death
        if death is not None:
            act(death)

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuses new work, lets running sequences finish for up to `drain_s` seconds, then ends the rest. Blocking."""
        with self._gate:
            self._is_draining = True
        self._sequences.wait_until_empty(drain_s, lambda: self._death is not None)
        self.end([each.number for each in self._sequences], "shutdown")
        self._sequences.wait_until_empty(_END_S, lambda: self._death is not None)
        if self._sequences:  # vLLM hangs, or has died
            self._processes.post(self._sequences.end_all, "shutdown")

    def end(self, sequence_ids: Iterable[int], reason: SequenceEndReason) -> None:
        """Ends these sequences, those that are over left out, with a reason."""
        for number in sequence_ids:
            self.cancel(number, reason)

    def close(self) -> None:
        """Ends vLLM's processes. Call it after `stop`, once."""
        self._grammars.end()
        self._processes.close()

    # -- the seam ----------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, and the longest sequence that model and cache can hold."""
        return self._processes.limits

    @property
    def grammar_builder(self) -> BuildElsewhere:
        """Builds grammars in the workers."""
        return self._grammars.build

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """Queues a sequence and returns its id; events go to `sink`, the last one an EndEvent. Raises RequestError."""
        rule, asker = request.pick.terms.rule, request.asker
        if rule.needs_evidence:
            raise RequestError("unsupported_rule", f"vLLM does not verify by the rule {rule.value}; use coupled")
        self._sequences.require_room(asker.owner, self._config)
        held: Sequence[int] = ()
        if request.prefix_hash:
            found = self._sequences.kept.find(asker.owner, asker.name_of(request.prefix_hash))
            if found is None:
                raise RequestError(
                    "prefix_not_held", "this prefix is not held here; send its tokens in place of the hash", status=409
                )
            held = found
        check_request(request, len(held), self.limits)
        return self._submit(request, array("i", held) + array("i", request.prompt), sink)

    def _submit(self, request: GenerateRequest, prompt: array[int], sink: Sink, probe: int | None = None) -> int:
        pick, hints, asker = request.pick, request.hints, request.asker
        terms = Terms(
            number=next(self._numbers),
            params=pick.params,
            max_tokens=min(request.max_tokens, self.limits.max_positions - len(prompt)),
            hints=replace(hints, recent=usable_recent(request, self.limits) if probe is None else ()),
            once=request.once,
            probe=probe,
            owner=hashlib.sha256(asker.owner).digest(),
            client=hashlib.sha256(asker.client).digest(),
            priority=asker.priority,
            processors=pick.processors,
            num_generated=request.num_generated,
            num_logprobs=pick.num_logprobs,
            stop_ids=request.stop_ids,
            grammar=None if pick.grammar is None else number_of(pick.grammar),
        )
        sequence = OpenSequence(terms.number, request, sink, prompt, is_probe=terms.is_probe)
        with self._gate:  # otherwise a request could arrive after the end of everything
            if self._is_draining:
                raise RequestError("shutting_down", "the server is shutting down; use another server", status=503)
            if self.fault() is not None:
                raise RequestError("engine_failed", "the server's engine has failed; use another server", status=503)
            if not self._sequences:
                self._watch.heard()
            self._sequences.by_number[terms.number] = sequence
        self._processes.begin(self._generate(sequence, terms))
        return terms.number

    def draft(self, sequence_id: int, base: int, paths: Sequence[Sequence[int]]) -> None:
        """Adds guesses of what follows the first `base` committed tokens. Raises RequestError."""
        sequence = self._sequences.find(sequence_id)
        order = wire.PathsOrder(sequence_id, base, [list(path) for path in paths], time.monotonic())
        check_draft(base, paths, len(sequence.generated), self.limits)
        if not self._processes.send(order):
            raise _not_taken()

    def draft_tree(self, sequence_id: int, message: TreeDraft) -> None:
        """Adds guesses as a part of a tree. Raises RequestError."""
        sequence = self._sequences.find(sequence_id)
        order = wire.TreeOrder(sequence_id, message, time.monotonic())
        check_tree(message, len(sequence.generated), self.limits)
        if not self._processes.send(order):
            raise _not_taken()

    def cancel(self, sequence_id: int, reason: SequenceEndReason = "cancelled") -> None:
        """Ends a sequence early; does nothing if it is over."""
        sequence = self._sequences.by_number.get(sequence_id)
        if sequence is not None:
            self._processes.post(self._abort, sequence, reason)

    def fault(self) -> str | None:
        """Why the engine cannot work now; None when it can."""
        if self._death is None and self._processes.llm.errored:
            return _DIED
        if self._death is None and self._watch.is_hung:
            return _HANGS
        return self._death

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""
        gauges, open_now = self._sequences.gauges, len(self._sequences)
        self._sequences.distributions.load(gauges.distributions)
        # Reports come after steps: what vLLM has yet to look at counts as running where there are places.
        queued = min(open_now, max(gauges.queued, open_now - self._config.max_running))
        return EngineStats(
            totals=gauges.totals,
            running=open_now - queued,
            queued=queued,
            parked=len(self._sequences.kept),
            parked_blocks=0,
            num_blocks=gauges.num_blocks,
            free_blocks=gauges.free_blocks,
            patience_ms=gauges.patience_ms,
            step_ms=gauges.step_ms,
            draft_token_ms=gauges.draft_token_ms,
            failed=int(self.fault() is not None),
            distributions=self._sequences.distributions,
        )

    # -- the engine's thread -----------------------------------------------------------------------------------------

    async def _generate(self, sequence: OpenSequence, terms: Terms) -> None:
        """Has vLLM run a sequence. What it commits is reported."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if sequence.request.asker.deadline_ms is not None:
            delay_s = sequence.request.asker.deadline_ms / 1e3
            sequence.due = self._processes.loop.call_later(delay_s, self.end, [terms.number], "deadline")
        llm = self._processes.llm
        try:
            params = VllmSamplingParams(
                temperature=0.0,
                max_tokens=terms.max_tokens,
                stop_token_ids=sorted(terms.stop_ids),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=terms.extra_args(),
            )
            owner = "" if self._config.share_between_owners else terms.owner.hex()
            prompt = tokens_input(list(sequence.prompt), cache_salt=(owner + sequence.request.asker.salt.hex()) or None)
            adapter = sequence.request.adapter
            lora = None if adapter is None else self._processes.adapters[adapter]
            outputs = await llm.add_request(sequence.name, prompt, params, lora_request=lora)
            sequence.is_added = True
            if sequence.is_cancelled:
                await llm.abort(sequence.name)
            await outputs.get()  # the end, or an error
            self._watch.answered(sequence.number)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log_fault(error)
            if llm.errored:
                self._die(_DIED)
            else:
                self._sequences.end(sequence, "error", failed())

    def _abort(self, sequence: OpenSequence, reason: SequenceEndReason = "cancelled") -> None:
        if sequence.is_cancelled or sequence.number not in self._sequences.by_number:
            return
        sequence.is_cancelled, sequence.ending = True, reason
        if sequence.is_added:
            self._processes.begin(self._processes.llm.abort(sequence.name))

    async def _watch_vllm(self) -> None:
        """Notices what no report and no request shows: that vLLM has died while idle, hangs, or dropped a request."""
        while self._death is None:
            await asyncio.sleep(TICK_S)
            if self._processes.is_closed:
                return
            lost = self._watch.tick(self._sequences.by_number)
            if (fault := self.fault()) == _DIED or self._watch.is_dead:
                self._die(fault or _HANGS)
            for number in lost:
                _log.error("vLLM has dropped a request; its log is above")
                if number in self._sequences.by_number:
                    self._sequences.fail(self._sequences.by_number[number])
            self._sequences.kept.release_old()

    def _die(self, why: str) -> None:
        """Refuses new work for good, and ends what is open."""
        with self._gate:
            if self._death is not None:
                return
            self._death, act = why, self._on_death
        self._grammars.end()
        self._sequences.end_all("error", failed())
        if act is not None:
            act(why)


def _not_taken() -> RequestError:
    return RequestError("draft_not_taken", "the engine has too many drafts to read; send this one again", status=503)


def _probe(engine: VllmEngine, size: int, num_steps: int) -> None:
    """Runs a sequence whose steps verify `size` tokens that are most likely wrong, and ends it after some."""
    limits = engine.limits
    longest = limits.max_positions
    prompt = tuple(range(1, 1 + max(1, min(_PROBE_CONTEXT, longest // 2, limits.vocab_size - 1))))
    ended = threading.Event()
    ends: list[EndEvent] = []
    passes = itertools.count()

    def sink(event: Event) -> None:
        if isinstance(event, EndEvent):
            ends.append(event)
            ended.set()
        elif next(passes) == num_steps:  # the first is the prompt's
            engine.cancel(number)

    request = GenerateRequest(prompt, PickOptions(SamplingParams()), longest)
    number = engine._submit(request, array("i", prompt), sink, probe=size)
    if not ended.wait(_PROBE_S):
        raise RuntimeUnavailable("a step of vLLM does not return; its log is above")
    if ends[0].error is not None:
        raise ModelFault(f"a step of vLLM failed: {ends[0].error}")
