"""Serves sequences with vLLM, behind the seam: starts its processes, sends requests and drafts, delivers events.

vLLM runs on an event loop of its own, in a thread of this process; sinks run on that thread. What a sequence commits,
and how it ends, comes from the scheduler over one socket, so events are in order; what vLLM itself returns is used only
to notice that its engine process has died.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from outrider.cloud.distributions import Distributions
from outrider.cloud.engine.request_checks import (
    Turnover,
    check_draft,
    check_request,
    check_tree,
    deadline_exceeded,
    require_room,
    usable_recent,
)
from outrider.cloud.pending.policy import Policy
from outrider.cloud.seam import (
    CommitEvent,
    EndEvent,
    EngineStats,
    Event,
    GenerateRequest,
    PickOptions,
    SequenceEndReason,
    SequenceUsage,
    ServingEngine,
    Sink,
    Totals,
)
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.checks import refuse, require_vllm
from outrider.cloud.vllm.grammars import GrammarsInWorkers, note_refusal
from outrider.cloud.vllm.hang_watch import TICK_S, HangWatch
from outrider.cloud.vllm.numbered import NumberedNodes
from outrider.cloud.vllm.options import ENVIRONMENT, RUNNER_VARIABLE, VllmOptions
from outrider.cloud.vllm.parent import PLACE_VARIABLE
from outrider.cloud.vllm.parked import KeptPrefixes
from outrider.cloud.vllm.terms import Terms
from outrider.models.errors import ConfigError, ModelFault, RequestError, RuntimeUnavailable
from outrider.models.faults import log_fault
from outrider.models.grammar.compiler import BuildElsewhere
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.runtimes.base import ModelLimits
from outrider.models.wire.protocol import MAX_VERIFY_ITEMS
from outrider.models.wire.tree_draft import TreeDraft

_PROBE_S: Final = 60.0
"""How long the steps of one measurement may take."""
_END_S: Final = 10.0
"""How long `stop` waits for cancelled sequences."""
_SHUTDOWN_S: Final = 20.0
"""How long vLLM's processes may take to end; some 6 s on two cores."""
_KEPT_BY_ONEDNN: Final = 128
"""On the CPU build, oneDNN keeps a kernel for each number of tokens that a step ever had, 1024 of them: 350 MB after
2,000 sessions over the reference target. With this many every size of a decode step is kept."""
_PROBE_SIZES: Final = (0, 1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)
"""Drafted tokens of the steps that `calibrate` times."""
_PROBE_CONTEXT: Final = 64
_MAX_PATH: Final = 107
"""Bytes of a local socket's path; vLLM's names have 36."""
_DIED: Final = "vLLM's engine process has died"
_HANGS: Final = "a step hangs in vLLM"

_log = logging.getLogger("outrider.cloud")


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """How the engine runs; names as in EngineConfig. arguments: of vLLM's AsyncEngineArgs. num_threads: of the CPU
    build; 0 leaves it to vLLM."""

    arguments: Mapping[str, Any]
    max_running: int = 32
    max_queue: int = 1024
    max_draft: int = 16
    max_kept: int = MAX_VERIFY_ITEMS
    max_kept_s: float = 600.0
    looks_up: bool = False
    share_between_owners: bool = False
    policy: Policy = Policy.AUTO
    num_threads: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
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
    nodes: NumberedNodes = field(init=False)
    drafting: threading.Lock = field(default_factory=threading.Lock)  # guards `nodes`

    def __post_init__(self) -> None:
        self.nodes = NumberedNodes(self.generated)


class VllmEngine(ServingEngine):
    """vLLM behind the seam. Any thread may call any method; sinks run on the engine's own thread."""

    def __init__(self, config: VllmConfig) -> None:
        """Starts vLLM's processes and loads the model. Raises RuntimeUnavailable or ConfigError."""
        self._config = config
        self.version = require_vllm()
        self._place = Path(tempfile.mkdtemp(prefix="outrider-vllm-"))  # mode 0700
        self._others = set(multiprocessing.active_children())
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = itertools.count(1)
        self._kept = KeptPrefixes(config.max_kept, time.monotonic, max_s=config.max_kept_s)
        self._totals = Totals()
        self._distributions = Distributions()
        self._gauges: wire.Gauges | None = None
        self._gate = threading.Lock()  # between `submit` and the end of everything
        self._sending = threading.Lock()  # a socket is for one thread at a time
        self._is_empty = threading.Event()
        self._is_draining = False
        self._is_closed = False
        self._death: str | None = None
        self._on_death: Callable[[str], None] | None = None
        self._watch = HangWatch()
        self._turnover = Turnover()
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = zmq.Context()
        self._orders = wire.open_socket(self._context, zmq.PUSH, wire.MAX_ORDERS)
        self._orders.connect(wire.orders_address(self._place))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-vllm", daemon=True)
        self._thread.start()
        self._grammars = GrammarsInWorkers(self._loop, self._call_workers, self.fault)
        self._opening = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        try:
            self._limits: ModelLimits = self._opening.result()
        except BaseException:
            self.close()
            raise

    # -- start and end -----------------------------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """Runs `work` on the engine's loop and returns its result. Blocking."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def _call_workers(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        found: list[Any] = await self._llm.collective_rpc(method, args=args)
        return found

    async def _open(self) -> ModelLimits:
        if len(bytes(self._place)) + 1 + 36 > _MAX_PATH:
            raise ConfigError(f"{self._place} is too long for the paths of local sockets; set TMPDIR to a shorter one")
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._is_closed:
            raise RuntimeUnavailable("the load was interrupted")
        # vLLM's processes inherit this thread's mask: Ctrl-C reaches all processes of a terminal, and would end them
        # while this one drains. The tracker, which Python starts beside them, would clear the mask.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        config = self._config
        settings = wire.Settings(config.max_running, config.max_draft, config.policy.value, config.looks_up)
        (self._place / wire.SETTINGS_NAME).write_bytes(msgspec.json.encode(settings))
        self._reports = wire.open_socket(zmq.asyncio.Context.shadow(self._context), zmq.PULL)
        self._reports.bind(wire.reports_address(self._place))
        self._reader = asyncio.create_task(self._read_reports())
        # vLLM's own sockets and files, too, are where only this user can reach them: some carry pickle.
        names = (PLACE_VARIABLE, "VLLM_RPC_BASE_PATH", "TMPDIR")
        before = {name: os.environ.get(name) for name in names}
        os.environ |= dict.fromkeys(names, str(self._place))
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**config.arguments))
        except (ValueError, OSError) as error:  # of the model or the options; vLLM words them
            raise ConfigError(f"vLLM cannot serve this model: {error}") from error
        except RuntimeError as error:
            raise RuntimeUnavailable(
                f"vLLM's engine process did not start ({error}); its log is above. If it names the KV cache, change "
                "--kv-cache-mb, or --vllm-option gpu_memory_utilization or max_model_len"
            ) from error
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        for found in await self._llm.collective_rpc("outrider_install"):
            self.runner = str(found["runner"])
            refuse(f"{self.version} with {self.runner}", found["missing"])
        self._watcher = asyncio.create_task(self._watch_vllm())
        model = self._llm.model_config
        return ModelLimits(model.get_vocab_size(), model.max_model_len)

    def calibrate(self) -> None:
        """Measures steps of one sequence with 0, 1, 2, ... drafted tokens."""
        sizes = [size for size in _PROBE_SIZES if size <= self._config.max_draft]
        for size in sizes:  # untimed: vLLM may prepare for a new shape
            self._probe(size, 2)
        for size in sizes:
            self._probe(size, 4)

    def _probe(self, size: int, num_steps: int) -> None:
        """Runs a sequence whose steps verify `size` tokens that are most likely wrong, and ends it after some."""
        longest = self._limits.max_positions
        prompt = tuple(range(1, 1 + max(1, min(_PROBE_CONTEXT, longest // 2, self._limits.vocab_size - 1))))
        ended = threading.Event()
        ends: list[EndEvent] = []
        passes = itertools.count()

        def sink(event: Event) -> None:
            if isinstance(event, EndEvent):
                ends.append(event)
                ended.set()
            elif next(passes) == num_steps:  # the first is the prompt's
                self.cancel(number)

        request = GenerateRequest(prompt, PickOptions(SamplingParams()), longest)
        number = self._submit(request, array("i", prompt), sink, probe=size)
        if not ended.wait(_PROBE_S):
            raise RuntimeUnavailable("a step of vLLM does not return; its log is above")
        if ends[0].error is not None:
            raise ModelFault(f"a step of vLLM failed: {ends[0].error}")

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
        self._wait_until_empty(drain_s)
        self.end(list(self._sequences), "shutdown")
        self._wait_until_empty(_END_S)
        if self._sequences and self._loop.is_running():  # vLLM hangs, or has died
            self._loop.call_soon_threadsafe(self._end_all, "shutdown", None)

    def end(self, sequence_ids: Iterable[int], reason: SequenceEndReason) -> None:
        """Ends these sequences, those that are over left out, with a reason."""
        for number in sequence_ids:
            sequence = self._sequences.get(number)
            if sequence is not None:
                sequence.ending = reason
                self.cancel(number)

    def _wait_until_empty(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._sequences and self._death is None and time.monotonic() < deadline:
            self._is_empty.wait(timeout=max(0.0, deadline - time.monotonic()))
            self._is_empty.clear()

    def close(self) -> None:
        """Ends vLLM's processes. Call it after `stop`, once."""
        self._is_closed = True
        self._grammars.end()
        llm = getattr(self, "_llm", None)
        if llm is not None:
            llm.shutdown(timeout=_SHUTDOWN_S)
        else:
            self._end_load()
        if self._loop.is_running():
            try:
                self._on_loop(self._end_tasks(), _END_S)
            except TimeoutError:
                _log.warning("vLLM's tasks did not end")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=_END_S)
            if not self._thread.is_alive():
                self._loop.close()
        self._orders.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._place, ignore_errors=True)

    def _end_load(self) -> None:
        """Kills the processes of a load that was interrupted: Python waits for them at its end."""
        deadline = time.monotonic() + _SHUTDOWN_S
        while time.monotonic() < deadline:
            for child in set(multiprocessing.active_children()) - self._others:
                child.kill()
            if wait([self._opening], timeout=0.1).done:
                return
        _log.warning("vLLM's load did not end")

    async def _end_tasks(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_reports"):
            self._reports.close()

    # -- the seam ----------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, and the longest sequence that model and cache can hold."""
        return self._limits

    @property
    def grammar_builder(self) -> BuildElsewhere:
        """Builds grammars in the workers."""
        return self._grammars.build

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """Queues a sequence and returns its id; events go to `sink`, the last one an EndEvent. Raises RequestError."""
        rule = request.pick.terms.rule
        if rule.needs_evidence:
            raise RequestError("unsupported_rule", f"vLLM does not verify by the rule {rule.value}; use coupled")
        self._require_room(request)
        held: Sequence[int] = ()
        if request.prefix_hash:
            found = self._kept.find(request.asker.owner, request.asker.name_of(request.prefix_hash))
            if found is None:
                raise RequestError(
                    "prefix_not_held", "this prefix is not held here; send its tokens in place of the hash", status=409
                )
            held = found
        check_request(request, len(held), self._limits)
        return self._submit(request, array("i", held) + array("i", request.prompt), sink)

    def _submit(self, request: GenerateRequest, prompt: array[int], sink: Sink, probe: int | None = None) -> int:
        terms = Terms(
            number=next(self._numbers),
            params=request.pick.params,
            max_tokens=min(request.max_tokens, self._limits.max_positions - len(prompt)),
            patience_ms=request.hints.patience_ms,
            draft_lag_ms=request.hints.lag_ms,
            draft=request.hints.draft,
            once=request.once,
            probe=probe,
            owner=hashlib.sha256(request.asker.owner).digest(),
            client=hashlib.sha256(request.asker.client).digest(),
            priority=request.asker.priority,
            recent=usable_recent(request, self._limits) if probe is None else (),
            is_repeat=request.hints.is_repeat,
            is_predicted=request.hints.is_predicted,
            processors=request.pick.processors,
            num_generated=request.num_generated,
            num_logprobs=request.pick.num_logprobs,
            stop_ids=request.stop_ids,
            grammar=request.pick.grammar,
        )
        sequence = _Sequence(terms.number, request, sink, prompt, is_probe=probe is not None)
        with self._gate:  # otherwise a request could arrive after the end of everything
            if self._is_draining:
                raise RequestError("shutting_down", "the server is shutting down; use another server", status=503)
            if self.fault() is not None:
                raise RequestError("engine_failed", "the server's engine has failed; use another server", status=503)
            if not self._sequences:
                self._watch.heard()
            self._sequences[terms.number] = sequence
        self._loop.call_soon_threadsafe(self._begin, sequence, terms)
        return terms.number

    def _require_room(self, request: GenerateRequest) -> None:
        """Raises RequestError `overloaded` if the queue is full, by requests or by tokens."""
        config, gauges = self._config, self._gauges
        if len(self._sequences) >= config.max_running:
            here = [
                (
                    each.request.asker.owner,
                    len(each.prompt) + len(each.generated) + each.request.pick.processors.num_ids,
                )
                for each in list(self._sequences.values())
            ]
            cache_tokens = gauges.num_blocks * gauges.block_size if gauges else 0
            require_room(
                request.asker.owner,
                here,
                config.max_running,
                config.max_queue,
                cache_tokens,
                lambda num_ahead: self._turnover.retry_after_s(num_ahead, time.monotonic()),
            )

    def draft(self, sequence_id: int, base: int, paths: Sequence[Sequence[int]]) -> None:
        """Adds guesses of what follows the first `base` committed tokens. Raises RequestError."""
        sequence = self._session(sequence_id)
        order = wire.PathsOrder(sequence_id, base, [list(path) for path in paths], time.monotonic())
        try:
            check_draft(base, paths, sequence.generated, self._limits)
        except RequestError as error:
            if error.code == "stale_draft":  # even a stale draft shows how long the device takes to answer
                self._send(order)
            raise
        if not self._send(order):
            raise _not_taken()

    def draft_tree(self, sequence_id: int, message: TreeDraft) -> None:
        """Adds guesses as a part of a tree. Raises RequestError."""
        sequence = self._session(sequence_id)
        order = wire.TreeOrder(
            sequence_id,
            message.base,
            message.first,
            list(message.tokens),
            list(message.parents),
            list(message.levels),
            time.monotonic(),
        )
        with sequence.drafting:
            try:
                check_tree(message, sequence.nodes.position_of, sequence.generated, self._limits)
            except RequestError as error:
                if error.code == "stale_draft" and self._send(order):
                    sequence.nodes.add(message)
                raise
            if not self._send(order):
                raise _not_taken()
            sequence.nodes.add(message)

    def _session(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise RequestError(
                "unknown_session", "there is no such session: it has ended, or another server has it", status=404
            )
        return sequence

    def _send(self, order: wire.Order) -> bool:
        """Whether it is on its way; not where the engine process hangs, has died, or has too many to read."""
        with self._sending:
            try:
                self._orders.send(wire.encode(order), zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
        return True

    def cancel(self, sequence_id: int) -> None:
        """Ends a sequence early; does nothing if it is over."""
        if sequence_id in self._sequences:
            try:
                self._loop.call_soon_threadsafe(self._abort, sequence_id)
            except RuntimeError:
                pass  # the loop is closed: everything has ended

    def fault(self) -> str | None:
        """Why the engine cannot work now; None when it can."""
        if self._death is None and self._llm.errored:
            return _DIED
        if self._death is None and self._watch.is_hung:
            return _HANGS
        return self._death

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""
        gauges, open_now = self._gauges, len(self._sequences)
        if gauges is not None:
            self._distributions.load(gauges.distributions)
        # Reports come after steps: what vLLM has yet to look at counts as running where there are places.
        queued = min(open_now, max(gauges.queued if gauges else 0, open_now - self._config.max_running))
        return EngineStats(
            totals=replace(self._totals),
            running=open_now - queued,
            queued=queued,
            parked=len(self._kept),
            parked_blocks=0,
            num_blocks=gauges.num_blocks if gauges else 1,
            free_blocks=gauges.free_blocks if gauges else 1,
            patience_ms=gauges.patience_ms if gauges else 0.0,
            step_ms=gauges.step_ms if gauges else None,
            draft_token_ms=gauges.draft_token_ms if gauges else None,
            failed=int(self.fault() is not None),
            distributions=self._distributions,
        )

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _begin(self, sequence: _Sequence, terms: Terms) -> None:
        if sequence.request.asker.deadline_ms is not None:
            delay_s = sequence.request.asker.deadline_ms / 1e3
            sequence.due = self._loop.call_later(delay_s, self.end, [terms.number], "deadline")
        task = self._loop.create_task(self._generate(sequence, terms))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, sequence: _Sequence, terms: Terms) -> None:
        """Has vLLM run a sequence. What it commits arrives in `_read_reports`."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        try:
            params = VllmSamplingParams(
                temperature=0.0,
                max_tokens=terms.max_tokens,
                stop_token_ids=sorted(sequence.request.stop_ids),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=terms.extra_args(),
            )
            is_shared = self._config.share_between_owners
            salt = ("" if is_shared else terms.owner.hex()) + sequence.request.asker.salt.hex()
            prompt = tokens_input(list(sequence.prompt), cache_salt=salt or None)
            outputs = await self._llm.add_request(_name(terms.number), prompt, params)
            sequence.is_added = True
            if sequence.is_cancelled:
                await self._llm.abort(_name(terms.number))
            await outputs.get()  # the end, or an error
            self._watch.answered(sequence.number)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log_fault(error)
            if self._llm.errored:
                self._die(_DIED)
            else:
                self._end(sequence.number, "error", _usage(sequence), _failed())

    def _abort(self, number: int) -> None:
        sequence = self._sequences.get(number)
        if sequence is None or sequence.is_cancelled:
            return
        sequence.is_cancelled = True
        if sequence.is_added:
            task = self._loop.create_task(self._llm.abort(_name(number)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _watch_vllm(self) -> None:
        """Notices what no report and no request shows: that vLLM has died while idle, hangs, or dropped a request."""
        while self._death is None and not self._is_closed:
            await asyncio.sleep(TICK_S)
            lost = self._watch.tick(self._sequences)
            if self._is_closed:
                return
            if self._llm.errored:
                self._die(_DIED)
            elif self._watch.is_dead:
                self._die(_HANGS)
            for number in lost:
                _log.error("vLLM has dropped a request; its log is above")
                self._fail(number)
            self._kept.release_old()

    def _fail(self, number: int) -> None:
        """Ends a sequence with an error, here and in vLLM."""
        sequence = self._sequences.get(number)
        if sequence is not None:
            self._abort(number)
            try:
                self._end(number, "error", _usage(sequence), _failed())
            except Exception as error:  # of its sink, again
                log_fault(error)

    async def _read_reports(self) -> None:
        while True:
            message = await self._reports.recv()
            try:
                self._take(wire.decode_report(message))
            except Exception as error:  # a bug of ours must not hang every client
                log_fault(error)

    def _take(self, report: wire.Report) -> None:
        self._watch.heard()
        self._gauges, self._totals = report.gauges, report.gauges.to_totals()
        for commit in report.commits:
            self._try(commit.number, self._take_commit, commit)
        for end in report.ends:
            self._try(end.number, self._take_end, end)

    def _try(self, number: int, take: Callable[[_Sequence, Any], None], what: wire.Commit | wire.End) -> None:
        """Takes a part of a report; a bug of ours ends this sequence, and leaves the others their tokens."""
        sequence = self._sequences.get(number)
        if sequence is None:
            return
        try:
            take(sequence, what)
        except Exception as error:
            log_fault(error)
            self._fail(number)

    def _take_commit(self, sequence: _Sequence, commit: wire.Commit) -> None:
        sequence.generated.extend(commit.tokens)
        logprobs = tuple(
            TokenLogprobs(token, value, tuple(zip(likeliest, values, strict=True)))
            for token, value, likeliest, values in commit.logprobs
        )
        sequence.sink(
            CommitEvent(commit.base, tuple(commit.tokens), commit.accepted, commit.proposed, commit.looked_up, logprobs)
        )

    def _take_end(self, sequence: _Sequence, end: wire.End) -> None:
        usage = _usage(sequence)
        usage.target_passes, usage.waited_s = end.passes, end.waited_s
        usage.accepted_tokens, usage.rejected_tokens = end.accepted, end.rejected
        usage.cached_prompt_tokens, usage.looked_up_tokens = end.cached_prompt_tokens, end.looked_up
        fault = _not_finite() if end.reason == "fault" else None
        if end.refusal is not None:
            code, message, mark = end.refusal
            fault = _failed() if code == "internal_error" else RequestError(code, message)
            note_refusal(sequence.request.pick.grammar, mark)
        self._end(end.number, _reason(end.reason, sequence), usage, fault)

    def _end(
        self, number: int, reason: SequenceEndReason, usage: SequenceUsage, error: RequestError | None = None
    ) -> None:
        sequence = self._sequences.pop(number, None)
        if sequence is None:
            return
        if sequence.due is not None:
            sequence.due.cancel()
        self._turnover.note(time.monotonic())
        if reason == "deadline" and not sequence.generated:
            reason, error = "error", deadline_exceeded()
        name = None
        if error is None and sequence.request.is_parked_after(reason):
            request = sequence.request
            name = self._kept.keep(request.asker.owner, [*sequence.prompt, *sequence.generated], request.asker.name_of)
        if not sequence.is_probe:
            self._distributions.ended(reason)
        sequence.sink(EndEvent(reason, usage, error, name))
        if not self._sequences:
            self._is_empty.set()

    def _die(self, why: str) -> None:
        """Refuses new work for good, and ends what is open."""
        with self._gate:
            if self._death is not None:
                return
            self._death, act = why, self._on_death
        self._grammars.end()
        self._end_all("error", _failed())
        if act is not None:
            act(why)

    def _end_all(self, reason: SequenceEndReason, error: RequestError | None) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence.number, reason, _usage(sequence), error)
        self._is_empty.set()


def set_environment(options: VllmOptions, num_threads: int) -> None:
    """Sets what vLLM reads from the environment. Call it before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_BY_ONEDNN))
    os.environ[RUNNER_VARIABLE] = "1" if options.runner == "v2" else "0"
    if num_threads:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(num_threads)


def _usage(sequence: _Sequence) -> SequenceUsage:
    return SequenceUsage(prompt_tokens=len(sequence.prompt), completion_tokens=len(sequence.generated))


def _name(number: int) -> str:
    return f"outrider-{number}"


def _reason(reason: str, sequence: _Sequence) -> SequenceEndReason:
    if reason == "full":
        return "length" if len(sequence.generated) == sequence.request.max_tokens else "context"
    if reason == "cancelled":
        return sequence.ending
    if reason in ("fault", "refused"):
        return "error"
    return "stop" if reason == "stop" else "once"


def _failed() -> RequestError:
    return RequestError("internal_error", "the server failed on this request; its log has the details", status=500)


def _not_taken() -> RequestError:
    return RequestError("draft_not_taken", "the engine has too many drafts to read; send this one again", status=503)


def _not_finite() -> RequestError:
    return RequestError("model_fault", "the model's runtime failed: logits are not finite", status=500)
