"""Extends vLLM's scheduler: pending drafts become a request's `spec_token_ids` at the start of each step.

It runs in vLLM's engine process. It reports every pass and every end to the server (`engine_messages`), so that a
sequence's events come from one place and in order. Synchronous scheduling only: `checks` sees to that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.seam import CommitEvent
from outrider.cloud.vllm import engine_messages as wire
from outrider.cloud.vllm.book import Book, Served, seconds_to_wait
from outrider.cloud.vllm.checks import SCHEDULER_STATE, missing_attributes, refuse
from outrider.cloud.vllm.engine_process import ServerLink, ask_for_no_drafts, silence_dumps
from outrider.cloud.vllm.faulty_rows import FAULTY, FaultyRows
from outrider.cloud.vllm.parent import end_with_parent
from outrider.cloud.vllm.step_shares import StepShares
from outrider.cloud.vllm.terms import terms_of
from outrider.cloud.vllm.worker_choosers import FOUND, Found

_SLICE_S: Final = 0.002
"""While all sequences wait for drafts: how long the engine process listens for one before it looks for requests."""


class OutriderScheduler(Scheduler):
    """vLLM's scheduler with drafts from outside."""

    running: list[Request]
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        silence_dumps()
        ask_for_no_drafts()
        super().__init__(*args, **kwargs)
        refuse("vLLM's scheduler", missing_attributes(self, SCHEDULER_STATE))
        self._link = ServerLink()
        config = self._link.config
        self._book = Book(
            max_draft=config.max_draft, policy=config.policy, looks_up=config.looks_up, clock=time.monotonic
        )
        self._num_slots = self.max_num_active_reqs
        self._places = StepShares(config.max_running, self.max_num_scheduled_tokens)
        self._of_request: dict[str, Served] = {}
        self._faulty_rows = FaultyRows(self, self._of_request)
        self._ends: list[wire.End] = []
        # Of the present step.
        self._num_promised = 0  # blocks for newcomers
        self._shares: dict[str, int] = {}  # prompt tokens, drafts of an item included, by request
        self._first_drafts: dict[str, list[int]] = {}  # verified with the end of a prompt
        self._num_left = 0  # tokens that there is still room for
        self._passes: dict[Served, CommitEvent] = {}
        self._found = Found()
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
            served = self._of_request[request.request_id] = self._book.open(terms, request.prompt_token_ids)
            served.name = request.request_id
            self._places.open(served)
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """Reports the ends of cancelled requests."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            served = self._of_request.get(request.request_id)
            if served is not None:
                self._end(request.request_id, served, "cancelled")
        if self._ends:
            self._report([])
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
        self._link.read_orders(self._book, 0.0)
        sitting = self._sitting(started)
        if sitting and len(sitting) == len(self.running) and not self.waiting and not self.kv_holding_waiting:
            waits = [served for request in sitting if (served := self._of_request.get(request.request_id))]
            self._link.read_orders(self._book, min(_SLICE_S, seconds_to_wait(waits, started)))
            sitting = self._sitting(time.monotonic())
        output = self._schedule_fairly(sitting, throttle_prefills)
        self._faulty_rows.zero_blocks(output)
        for new in output.scheduled_new_reqs:
            served = self._of_request.get(new.req_id)
            if served is not None and not served.drafts.committed:
                self._book.left_queue(served, new.num_computed_tokens)
        self._book.totals.preempted += len(output.preempted_req_ids or ())
        for request_id, served in self._of_request.items():
            # vLLM may cut drafts, and pads some requests with -1; the V2 runner verifies that as token 0.
            drafted = output.scheduled_spec_decode_tokens.get(request_id, ())
            served.proposed = [token for token in drafted if token >= 0 or self.use_v2_model_runner]
        self._ordered_s = time.monotonic()
        self._overhead_s = self._ordered_s - started
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Books the tokens of a step and reports them."""
        seconds = time.monotonic() - self._ordered_s
        scheduled = scheduler_output.num_scheduled_tokens
        size, is_probe = StepSize(), bool(scheduled)
        self._found = getattr(model_runner_output, FOUND, None) or Found()
        for request_id, count in scheduled.items():
            request = self.requests.get(request_id)
            if request is not None:
                size += StepSize.of(count, max(0, request.num_computed_tokens - count))
                served = self._of_request.get(request_id)
                is_probe &= served is not None and served.terms.is_probe
                self._faulty_rows.take(request, model_runner_output, self._found)
        self._passes.clear()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._faulty_rows.run_again()
        if size.tokens:
            self._book.stepped(size, seconds, self._overhead_s, num_sequences=len(scheduled), is_probe=is_probe)
        commits = [wire.Commit(served.terms.number, done) for served, done in self._passes.items()]
        if commits or self._ends or size.tokens:
            self._report(commits)
        return outputs

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
        self._places.committed(served)
        logprobs = self._found.logprobs.get(request.request_id, ())[: len(new_token_ids)]
        crowding = self._places.owners.crowding(served)
        done = self._book.committed(served, new_token_ids, is_over=is_over, crowding=crowding, logprobs=logprobs)
        reason = "stop" if request.status == RequestStatus.FINISHED_STOPPED else "full"
        if served.terms.once:
            served.logprobs += logprobs
            if not is_over and served.is_answered:
                request.status, is_over, reason = RequestStatus.FINISHED_STOPPED, True, "once"
            if is_over:
                self._passes[served] = _whole(served)
        else:
            self._passes[served] = done
        if is_over:
            self._end(request.request_id, served, reason)
        return new_token_ids, is_over

    # -- drafts ------------------------------------------------------------------------------------------------------

    def _decoding(self) -> list[tuple[Request, Served]]:
        """Running requests of ours whose prompt is complete: they commit at least one token in their next step."""
        return [
            (request, served)
            for request in self.running
            if request.num_computed_tokens == request.num_tokens - 1
            and (served := self._of_request.get(request.request_id)) is not None
        ]

    def _sitting(self, now: float) -> list[Request]:
        """Running requests that sit this step out for a draft."""
        pairs = self._decoding()
        sitting = self._book.waiting([served for _, served in pairs], now, len(self.running))
        return [request for request, served in pairs if served in sitting]

    # -- shares ------------------------------------------------------------------------------------------------------

    def _schedule_fairly(self, sitting: list[Request], throttle_prefills: bool) -> Any:
        """A step in which owners share places and prompt tokens evenly. sitting: who waits for a draft."""
        self._num_promised = 0
        newcomers = self._places.newcomers(self._make_room)
        away = set(sitting)
        ready = [self._of_request[r.request_id] for r in self.running if r not in away]
        chosen = self._places.take_part([*ready, *newcomers])
        self._places.not_admitted([served for served in newcomers if served not in chosen])
        newcomers = [served for served in newcomers if served in chosen]
        hidden = [r for r in self.running if r in away or self._of_request[r.request_id] not in chosen]
        with _hidden_from(self, hidden):
            newcomers = self._choose(newcomers)
            _queue_first(self.waiting, [self.requests[served.name] for served in newcomers])
            self.max_num_active_reqs = len(self.running) + len(newcomers)
            output = super().schedule(throttle_prefills)
        scheduled = output.num_scheduled_tokens
        self._places.not_admitted([served for served in newcomers if served.name not in scheduled])
        self._places.took_part(self._of_request[name] for name in scheduled)
        drafts = output.scheduled_spec_decode_tokens
        for name, tokens in self._first_drafts.items():
            if name in scheduled:
                drafts[name] = [*tokens, *drafts.get(name, ())[len(tokens) :]]
        return output

    def _make_room(self, served: Served, givers: Callable[[], list[Served]]) -> bool:
        """Whether a queued sequence gets blocks in this step; those of `givers` are taken if that suffices."""
        per_block = self.block_size
        needed = -(-(self.requests[served.name].num_tokens + 1) // per_block) * len(
            self.kv_cache_config.kv_cache_groups
        )
        pool = self.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks() - self._num_promised
        num_slots = self._num_slots - self._places.num_running
        if (num_free < needed or num_slots < 1) and self._places.num_running:
            giving: list[Request] = []
            for giver in givers():
                request = self.requests[giver.name]
                giving.append(request)
                num_slots += 1
                groups = self.kv_cache_manager.get_block_ids(giver.name)
                num_free += sum(pool.blocks[block].ref_cnt == 1 for group in groups for block in group)
                if num_free >= needed and num_slots >= 1:
                    break
            else:
                return False
            for request in giving:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
        self._num_promised += needed
        return True

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """Takes a request's blocks, and queues it again."""
        super()._preempt_request(request, timestamp, drop_stale_output)
        served = self._of_request.get(request.request_id)
        if served is not None:
            self._places.returned(served)

    def _choose(self, newcomers: list[Served]) -> list[Served]:
        """Sets the drafts of the running requests and the shares of prompts; gives the newcomers that have one."""
        for request in self.running:
            request.spec_token_ids = []
        self._shares.clear()
        self._first_drafts.clear()
        self._num_left = self.max_num_scheduled_tokens
        pairs = self._decoding()
        decoding, prompts = StepSize(), self._prompts(newcomers)
        for request, _ in pairs:
            decoding += StepSize.of(1, request.num_computed_tokens)
        budget = max(0, self.max_num_scheduled_tokens - len(pairs))
        for_prompts = min(sum(p.num_wanted for p in prompts), max(budget - budget // 2, self.block_size))
        num_drafted = 0
        if pairs:
            fixed = decoding + StepSize.of(for_prompts, 0) if for_prompts else decoding
            context = sum(request.num_computed_tokens for request, _ in pairs) / len(pairs)
            room = max(0, budget - for_prompts) if self._has_spare_blocks(len(pairs)) else 0
            chosen = self._book.choose([served for _, served in pairs], room, fixed, context)
            for request, served in pairs:
                request.spec_token_ids = chosen[served][: self.num_spec_tokens]
                num_drafted += len(request.spec_token_ids)
        added = self._book.drafting.curve.steps_added(for_prompts, decoding, 0.0)
        left = max(0, budget - num_drafted)
        shares = self._places.prompt_shares(prompts, left, [served for _, served in pairs], added)
        left -= sum(shares.values())
        for served, share in shares.items():  # an item's draft is not cut: it gets one pass
            lacking = served.num_wanted - share
            if 0 < lacking <= min(left, len(self._book.own_draft(served, self.num_spec_tokens))):
                shares[served] += lacking
                left -= lacking
        self._shares = {served.name: share for served, share in shares.items()}
        self._places.not_admitted([served for served in newcomers if not shares[served]])
        return [served for served in newcomers if shares[served]]

    def _prompts(self, newcomers: list[Served]) -> list[Served]:
        """Sequences that have prompt tokens to run; sets how many each could run, the draft of an item included."""
        new, found = set(newcomers), []
        for request in [*self.running, *(self.requests[served.name] for served in newcomers)]:
            missing = request.num_tokens - request.num_computed_tokens
            served = self._of_request[request.request_id]
            if missing > 1 or served in new:
                served.num_wanted = missing + len(self._book.own_draft(served, self.num_spec_tokens))
                found.append(served)
        return found

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cuts a prompt to its share of the step; adds the draft of an item whose prompt ends in it.

        vLLM asks this for each request, before it reserves blocks for what is returned. Its V2 runner rejects drafts
        behind the end of a prompt: they are verified in the next step there.
        """
        count: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        share = self._shares.get(request.request_id)
        if share is not None:
            missing = request.num_tokens - num_computed_tokens
            served = self._of_request[request.request_id]
            # After a fault, which a wrong guess may have caused, the prompt runs alone.
            with_draft = not served.is_rerun and not self.use_v2_model_runner
            if count > missing:  # vLLM has added places for drafts
                if with_draft:
                    self._first_drafts[request.request_id] = self._book.own_draft(served, count - missing)
            else:
                count = min(count, share)
                room = min(share, self._num_left, self.max_model_len - 1 - num_computed_tokens) - count
                draft = self._book.own_draft(served, max(0, min(room, self.num_spec_tokens)))
                if count == missing and draft and with_draft:
                    count += len(draft)
                    if request.status == RequestStatus.RUNNING:
                        request.spec_token_ids = draft
                    else:
                        self._first_drafts[request.request_id] = draft
        self._num_left -= count
        return count

    def _has_spare_blocks(self, num_decoding: int) -> bool:
        """Whether drafts need no other request's blocks: none gives way for a guess."""
        per_request = 1 + -(-(1 + self.num_spec_tokens) // self.block_size)
        return bool(self.kv_cache_manager.block_pool.get_num_free_blocks() >= num_decoding * per_request)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _report(self, commits: list[wire.Commit]) -> None:
        ends, self._ends = self._ends, []
        curve, pool = self._book.drafting.curve, self.kv_cache_manager.block_pool
        step_s, extra_s = curve.step_and_extra() if curve.is_known else (None, None)
        running, queued = self.get_request_counts()
        gauges = wire.Gauges(
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
        self._link.report(wire.Report(commits, ends, gauges))


def _queue_first(waiting: Any, requests: list[Request]) -> None:
    """Moves requests to the front of a queue."""
    if requests:
        first = set(requests)
        rest = [request for request in waiting if request not in first]
        waiting.clear()
        waiting.extend([*requests, *rest])


@contextmanager
def _hidden_from(scheduler: OutriderScheduler, hidden: Iterable[Request]) -> Iterator[None]:
    """Hides requests from a step. They keep their blocks."""
    away, before = set(hidden), scheduler.running
    scheduler.running = [request for request in before if request not in away]
    try:
        yield
    finally:
        now, known = set(scheduler.running), set(before)
        stayed = [request for request in before if request in away or request in now]
        scheduler.running = stayed + [request for request in scheduler.running if request not in known]


def _whole(served: Served) -> CommitEvent:
    """All passes of a /v1/verify item as one."""
    tokens, draft = tuple(served.drafts.committed), served.terms.hints.draft
    proposed = min(len(draft), served.terms.max_tokens - 1)
    return CommitEvent(0, tokens, len(tokens) - 1, proposed, logprobs=tuple(served.logprobs))
