"""Extends vLLM's scheduler: pending drafts become a request's `spec_token_ids` at the start of each step.

It runs in vLLM's engine process. It reports every pass and every end to the server (`engine_messages`), so that a
sequence's events come from one place and in order. Between two steps it books what was committed, and chooses; it
learns, and reads drafts, while the model runs. Synchronous scheduling only: `checks` sees to that.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any, Final

from vllm.v1.request import Request, RequestStatus

from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.book import Served, seconds_to_wait
from outrider.cloud.vllm.commits import Commit
from outrider.cloud.vllm.draft_inbox import DraftReader
from outrider.cloud.vllm.engine_process import (
    ServerLink,
    ask_for_drafts_of_heads,
    ask_for_no_drafts,
    read_order,
    silence_dumps,
)
from outrider.cloud.vllm.fair_steps import FairSteps
from outrider.cloud.vllm.faulty_rows import FAULTY, FaultyRows
from outrider.cloud.vllm.parent import end_with_parent
from outrider.cloud.vllm.terms import terms_of
from outrider.cloud.vllm.worker_choosers import FOUND, Found
from outrider.models.ingress.collector import YOUNG_OBJECTS

_SLICE_S: Final = 0.002
"""While all sequences wait for drafts: how long the engine process listens for one before it looks for requests."""
_FEW: Final = 16
"""Sequences that run: with more of them, a draft for one that has another is worth less than the time that it takes to
read: it is read during the step.
"""


class OutriderScheduler(FairSteps):
    """vLLM's scheduler with drafts from outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        silence_dumps()
        young, *older = gc.get_threshold()
        if 0 < young < YOUNG_OBJECTS:  # with Python's 700, drafts of a step cause several looks, some between two steps
            gc.set_threshold(YOUNG_OBJECTS, *older)
        self._link = ServerLink()
        super().__init__(self._link.config, *args, **kwargs)
        if self._heads is None:
            ask_for_no_drafts()
        else:
            ask_for_drafts_of_heads()
        self._reader = DraftReader(self._link.receive, partial(read_order, self._book), time.monotonic)
        self._faulty_rows = FaultyRows(self, self._of_request)
        self._ends: list[wire.End] = []
        self._is_behind = False  # a step was counted since gauges were reported
        # Of the present step.
        self._runs = False  # it was ordered, and its result is not booked yet
        self._drafted: list[Served] = []  # who verifies drafts
        self._passes: list[Commit] = []
        self._found = Found()
        self._accompanied: Any = None  # the order whose model's run was used
        self._size, self._is_probing = StepSize(), False
        self._ordered_s = self._overhead_s = 0.0

    def shutdown(self) -> None:
        """Closes the sockets."""
        super().shutdown()
        self._link.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Opens a sequence for a request of ours."""
        params = request.sampling_params
        terms = terms_of(params.extra_args) if params is not None else None
        if terms is not None and request.request_id not in self.requests:
            served = self._of_request[request.request_id] = self._book.open(terms.slim, request.prompt_token_ids)
            served.name = request.request_id
            self._places.open(served)
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """Reports the ends of cancelled requests; those that end while a step runs, together with what it did."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            served = self._of_request.get(request.request_id)
            if served is not None:
                self._end(request.request_id, served, "cancelled")
        if self._ends and not self._runs:
            if not self._of_request:
                self._book.learn()
            self._report([], with_gauges=True)
        return finished

    def _end(self, request_id: str, served: Served, reason: str) -> None:
        del self._of_request[request_id]
        self._places.close(served)
        self._book.close(served)
        self._ends.append(wire.End(served.terms.number, reason, served.usage, served.refusal))

    # -- a step ------------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Schedules a step with the drafts that are here; sequences that wait for better ones sit it out."""
        started = time.monotonic()
        reads = self._book.is_open if len(self.running) <= _FEW else self._book.is_starved
        self._reader.read_before(reads)
        decoding, sitting = self._decoding(started)
        if sitting and len(sitting) == len(self.running) and not self.waiting and not self.kv_holding_waiting:
            waits = [served for request in sitting if (served := self._of_request.get(request.request_id))]
            self._reader.read_before(reads, min(_SLICE_S, seconds_to_wait(waits, started)))
            decoding, sitting = self._decoding(time.monotonic())
        output = self._schedule_fairly(decoding, sitting, throttle_prefills)
        self._faulty_rows.zero_blocks(output)
        for new in output.scheduled_new_reqs:
            served = self._of_request.get(new.req_id)
            if served is not None and not served.drafts.committed:
                self._book.left_queue(served, new.num_computed_tokens)
        self._book.totals.preempted += len(output.preempted_req_ids or ())
        for served in self._drafted:
            served.proposed = ()
        self._drafted.clear()
        for request_id, drafted in output.scheduled_spec_decode_tokens.items():
            served = self._of_request.get(request_id)
            if served is not None:
                # vLLM may cut drafts, and pads some requests with -1; the V2 runner verifies that as token 0.
                is_padded = -1 in drafted and not self.use_v2_model_runner
                served.proposed = [token for token in drafted if token >= 0] if is_padded else drafted
                self._drafted.append(served)
        self._runs = True
        self._ordered_s = time.monotonic()
        self._overhead_s = self._ordered_s - started
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Uses the time in which the model runs: vLLM asks this between a step's order and its result.

        The bitmasks are ours, in the workers.
        """
        found = super().get_grammar_bitmask(scheduler_output)
        self._while_the_model_runs(scheduler_output)
        return found

    def _while_the_model_runs(self, output: Any) -> None:
        self._accompanied = output
        tokens = attended = 0
        self._is_probing = bool(output.num_scheduled_tokens)
        for request_id, count in output.num_scheduled_tokens.items():
            request, served = self.requests.get(request_id), self._of_request.get(request_id)
            past = request.num_computed_tokens - count if request is not None else 0
            tokens += count
            attended += count * past + count * (count + 1) // 2
            self._is_probing &= served is not None and served.terms.probe is not None
        self._size = StepSize(tokens, attended)
        self._catch_up()
        self._reader.read_during(self._ordered_s, self._book.drafting.curve.expected_s(self._size))

    def _catch_up(self) -> None:
        """Learns from the last step, and reports what it counted."""
        self._book.learn()
        if self._is_behind:
            self._report([], with_gauges=True)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Books the tokens of a step and reports them."""
        now = time.monotonic()
        if self._accompanied is not scheduler_output:
            self._while_the_model_runs(scheduler_output)  # nobody asked for a bitmask
        size, num_sequences = self._size, len(scheduler_output.num_scheduled_tokens)
        self._found = getattr(model_runner_output, FOUND, None) or Found()
        if size.tokens:
            self._reader.ended(self._ordered_s, now, self._found.prepared_s)
        self._take_faults(model_runner_output)
        commits = self._passes = []
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._faulty_rows.run_again()
        if size.tokens:
            self._book.stepped(
                size, now - self._ordered_s, self._overhead_s, num_sequences=num_sequences, is_probe=self._is_probing
            )
            self._is_behind = True
        self._runs = False
        is_last = not self._of_request  # no model will run then
        if is_last:
            self._book.learn()
        if commits or self._ends or is_last:
            self._report(commits, with_gauges=is_last or bool(self._ends))
        return outputs

    def _take_faults(self, output: Any) -> None:
        """Looks at requests that may have a fault, or a refusal."""
        doubtful = {*self._found.refusals, *self._found.faults}
        ids = output.sampled_token_ids
        for name, index in output.req_id_to_index.items() if ids else ():
            own = ids[index]
            if not own or own[0] == FAULTY:
                doubtful.add(name)
        for name in doubtful:
            request = self.requests.get(name)
            if request is not None:
                self._faulty_rows.take(request, output, self._found)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Books a request's new tokens, and ends what has its answer."""
        served = self._of_request.get(request.request_id)
        if served is None:
            found: tuple[list[int], bool] = super()._update_request_with_output(request, new_token_ids, is_stale)
            return found
        if served.refusal is not None or FAULTY in new_token_ids:
            request.status = RequestStatus.FINISHED_ERROR
            if served.refusal is None:
                self._book.totals.faults += 1
                self._faulty_rows.forget_blocks(request)
            self._end(request.request_id, served, "fault" if served.refusal is None else "refused")
            return [], True
        new_token_ids, is_over = super()._update_request_with_output(request, new_token_ids, is_stale)
        if served.turn_began is None:
            self._places.committed(served)
        found_logprobs = self._found.logprobs
        logprobs = found_logprobs.get(request.request_id, ())[: len(new_token_ids)] if found_logprobs else ()
        done = self._book.committed(served, new_token_ids, is_over, logprobs)
        reason = ""
        if served.terms.once:
            served.logprobs += logprobs
            if not is_over and served.is_answered:
                request.status, is_over, reason = RequestStatus.FINISHED_STOPPED, True, "once"
            if is_over:
                self._passes.append(_whole(served))
        else:
            self._passes.append(done)
        if is_over:
            stopped = request.status == RequestStatus.FINISHED_STOPPED
            self._end(request.request_id, served, reason or ("stop" if stopped else "full"))
        return new_token_ids, is_over

    @property
    def wants_drafts(self) -> bool:
        """Whether the target's own heads draft after the present step."""
        return self._heads is not None and self._heads.num_drafted > 0

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Takes what the target's own heads drafted behind a step."""
        assert self._heads is not None
        for name, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request, served = self.requests.get(name), self._of_request.get(name)
            if request is None or served is None or request.num_computed_tokens != request.num_tokens - 1:
                continue
            if len(tokens) == self._heads.num_drafted:  # else vLLM has filled it up, near the longest sequence's end
                self._book.take_heads_draft(served, tokens)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _report(self, commits: list[Commit], *, with_gauges: bool) -> None:
        ends, self._ends = self._ends, []
        self._is_behind &= not with_gauges
        self._link.report(wire.Report(commits, ends, self._gauges() if with_gauges else None))

    def _gauges(self) -> wire.Gauges:
        curve, pool = self._book.drafting.curve, self.kv_cache_manager.block_pool
        step_s, extra_s = curve.step_and_extra() if curve.is_known else (None, None)
        running, queued = self.get_request_counts()
        return wire.Gauges(
            totals=self._book.totals,
            running=running,
            queued=queued,
            num_blocks=pool.num_gpu_blocks - 1,  # vLLM keeps one for itself
            free_blocks=pool.get_num_free_blocks(),
            block_size=self.block_size,
            patience_ms=self._book.patience_ms(),
            step_ms=None if step_s is None else step_s * 1e3,
            draft_token_ms=None if extra_s is None else extra_s * 1e3,
            distributions=self._book.drafting.distributions.numbers(),
        )


def _whole(served: Served) -> Commit:
    """All passes of a /v1/verify item as one."""
    tokens, draft = list(served.drafts.committed), served.terms.hints.draft
    proposed = min(len(draft), served.terms.max_tokens - 1)
    return Commit(served.terms.number, 0, tokens, len(tokens) - 1, proposed, logprobs=tuple(served.logprobs))
