"""Extends vLLM's scheduler: owners share the places, blocks and prompt tokens of its steps, and texts have drafts.

It carries out what `StepShares` and `Book` decide. vLLM's own scheduling goes on below: it sees the requests that take
part in a step, with their drafts, and its queue begins with the newcomers that have room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.vllm.book import Book, Served
from outrider.cloud.vllm.checks import SCHEDULER_STATE, missing_attributes, refuse
from outrider.cloud.vllm.graph_sizes import captured_sizes
from outrider.cloud.vllm.heads import Heads
from outrider.cloud.vllm.options import VllmConfig
from outrider.cloud.vllm.step_shares import StepShares


class FairSteps(Scheduler):
    """vLLM's scheduler, divided between owners. config: ours."""

    running: list[Request]
    max_num_active_reqs: int

    def __init__(self, config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse("vLLM's scheduler", missing_attributes(self, SCHEDULER_STATE))
        self._places = StepShares(config.max_running, self.max_num_scheduled_tokens)
        self._book = Book(
            max_draft=config.max_draft,
            policy=config.policy,
            looks_up=config.looks_up,
            has_heads=self.use_eagle,
            clock=time.monotonic,
            crowding=self._places.owners.crowding,
            captured=captured_sizes(self.vllm_config),
        )
        self._heads = Heads(config.max_draft) if self.use_eagle else None
        self._num_slots = self.max_num_active_reqs
        self._of_request: dict[str, Served] = {}
        # Of the present step.
        self._num_promised = 0  # blocks for newcomers
        self._has_looked = False  # for what the cache has of one that lacks blocks
        self._shares: dict[str, int] = {}  # prompt tokens, drafts of an item included, by request
        self._first_drafts: dict[str, list[int]] = {}  # verified with the end of a prompt
        self._num_left = 0  # tokens that there is still room for

    def _decoding(self, now: float) -> tuple[list[tuple[Request, Served]], list[Request]]:
        """Running requests of ours whose prompt is complete: they commit at least one token in their next step. And
        those of them that sit this step out for a draft.
        """
        pairs: list[tuple[Request, Served]] = []
        for request in self.running:
            if request.num_computed_tokens == request.num_tokens - 1:
                served = self._of_request.get(request.request_id)
                if served is not None:
                    pairs.append((request, served))
        sitting = self._book.waiting([served for _, served in pairs], now, len(self.running))
        return pairs, [request for request, served in pairs if served in sitting] if sitting else []

    def _schedule_fairly(
        self, decoding: list[tuple[Request, Served]], sitting: list[Request], throttle_prefills: bool
    ) -> Any:
        """A step in which owners share places and prompt tokens evenly. sitting: who waits for a draft."""
        self._num_promised, self._has_looked, num_running = 0, False, len(self.running)
        newcomers = self._places.newcomers(self._make_room)
        away = set(sitting)
        ready = [self._of_request[r.request_id] for r in self.running if r not in away]
        ready += newcomers
        chosen = self._places.take_part(ready)
        if len(chosen) < len(ready):
            taking_part = set(chosen)
            self._places.not_admitted([served for served in newcomers if served not in taking_part])
            newcomers = [served for served in newcomers if served in taking_part]
            away.update(r for r in self.running if self._of_request[r.request_id] not in taking_part)
        with _hidden_from(self, away):
            if len(self.running) < num_running:  # some are hidden, or gave way
                here = set(self.running)
                decoding = [pair for pair in decoding if pair[0] in here]
            newcomers = self._choose(decoding, newcomers)
            _queue_first(self.waiting, [self.requests[served.name] for served in newcomers])
            self.max_num_active_reqs = len(self.running) + len(newcomers)
            output = super().schedule(throttle_prefills)
        scheduled = output.num_scheduled_tokens
        self._places.not_admitted([served for served in newcomers if served.name not in scheduled])
        self._places.took_part([self._of_request[name] for name in scheduled])
        drafts = output.scheduled_spec_decode_tokens
        for name, tokens in self._first_drafts.items():
            if name in scheduled:
                drafts[name] = [*tokens, *drafts.get(name, ())[len(tokens) :]]
        if self._heads is not None:
            requests = map(self.requests.__getitem__, scheduled)
            committing = [self._of_request[r.request_id] for r in requests if r.num_computed_tokens >= r.num_tokens]
            output.num_spec_tokens_to_schedule = self._heads.draft_after(
                [served.drafts for served in committing if not served.terms.once],
                is_probing=bool(committing) and all(served.terms.is_probe for served in committing),
            )
        return output

    def _make_room(self, served: Served, givers: Callable[[], list[Served]]) -> bool:
        """Whether a queued sequence gets blocks in this step; those of `givers` are taken if that suffices."""
        pool, found = self.kv_cache_manager.block_pool, self.kv_cache_manager.empty_kv_cache_blocks
        needed = self._num_needed(self.requests[served.name], found, 0)
        num_free = pool.get_num_free_blocks() - self._num_promised
        num_slots = self._num_slots - self._places.num_running
        if num_free < needed and self._places.num_running and not self._has_looked:
            self._has_looked = True  # once in a step: it takes milliseconds for a long prompt
            found, num_cached, _ = self.kv_cache_manager.get_computed_blocks(self.requests[served.name])
            needed = self._num_needed(self.requests[served.name], found, num_cached)
        if (num_free < needed or num_slots < 1) and self._places.num_running:
            giving: list[Request] = []
            kept = {block.block_id for group in found.blocks for block in group}  # for this one, whoever gives them
            for giver in givers():
                request = self.requests[giver.name]
                giving.append(request)
                num_slots += 1
                groups = self.kv_cache_manager.get_block_ids(giver.name)
                num_free += sum(pool.blocks[b].ref_cnt == 1 and b not in kept for group in groups for b in group)
                if num_free >= needed and num_slots >= 1:
                    break
            else:
                return False
            for request in giving:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
        self._num_promised += needed
        return True

    def _num_needed(self, request: Request, found: Any, num_cached: int) -> int:
        """Free blocks that a queued request needs for its text, behind what the cache has of it: as vLLM counts."""
        needed: int = self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=request.num_tokens + 1 + self.num_lookahead_tokens,
            new_computed_blocks=found.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_cached,
            num_local_computed_tokens=num_cached,
            num_tokens_main_model=request.num_tokens + 1,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return needed

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """Takes a request's blocks, and queues it again."""
        super()._preempt_request(request, timestamp, drop_stale_output)
        served = self._of_request.get(request.request_id)
        if served is not None:
            self._places.returned(served)

    def _choose(self, decoding: list[tuple[Request, Served]], newcomers: list[Served]) -> list[Served]:
        """Sets the drafts of the running requests and the shares of prompts; gives the newcomers that have one.

        decoding: the running requests that decode in this step.
        """
        self._shares.clear()
        self._first_drafts.clear()
        self._num_left = self.max_num_scheduled_tokens
        has_prompts = bool(newcomers) or len(decoding) < len(self.running)
        prompts = self._prompts(newcomers) if has_prompts else []
        past = 0
        for request in self.running:
            request.spec_token_ids = []
        for request, _ in decoding:
            past += request.num_computed_tokens
        texts = [served for _, served in decoding]
        plain = StepSize(len(texts), len(texts) + past)
        budget = max(0, self.max_num_scheduled_tokens - len(texts))
        for_prompts = min(sum(p.num_wanted for p in prompts), max(budget - budget // 2, self.block_size))
        num_drafted = 0
        if texts:
            fixed = plain + StepSize.of(for_prompts, 0) if for_prompts else plain
            room = max(0, budget - for_prompts) if self._has_spare_blocks(len(texts)) else 0
            if len({served.owner for served in texts}) > 1:
                items = [served for served in texts if served.terms.once]
                num_own = sum(len(self._book.own_draft(served, self.num_spec_tokens)) for served in items)
                room = self._book.drafting.shared_room(room, num_own, plain, past / len(texts))
            chosen = self._book.choose(texts, room, fixed, past / len(texts))
            for request, served in decoding:
                found = chosen[served]
                if found:
                    request.spec_token_ids = found = found[: self.num_spec_tokens]
                    num_drafted += len(found)
        added = self._book.drafting.curve.steps_added(for_prompts, plain, 0.0)
        shares = self._places.prompt_shares(prompts, max(0, budget - num_drafted), texts, added)
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
                served.num_drafted = len(self._book.own_draft(served, self.num_spec_tokens))
                served.num_wanted = missing + served.num_drafted
                found.append(served)
        return found

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cuts a prompt to its share of the step; adds the draft of an item whose prompt ends in it.

        vLLM asks this for each request, before it reserves blocks for what is returned. Its V2 runner rejects drafts
        behind the end of a prompt: they are verified in the next step there.
        """
        count: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if not self._shares:
            return count
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
        per_group = 1 + -(-(1 + self.num_spec_tokens + self.num_lookahead_tokens) // self.block_size)
        per_request = per_group * len(self.kv_cache_config.kv_cache_groups)
        return bool(self.kv_cache_manager.block_pool.get_num_free_blocks() >= num_decoding * per_request)


def _queue_first(waiting: Any, requests: list[Request]) -> None:
    """Moves requests to the front of a queue."""
    if requests:
        first = set(requests)
        rest = [request for request in waiting if request not in first]
        waiting.clear()
        waiting.extend([*requests, *rest])


@contextmanager
def _hidden_from(scheduler: FairSteps, away: set[Request]) -> Iterator[None]:
    """Hides requests from a step. They keep their blocks."""
    if not away:
        yield
        return
    before = scheduler.running
    scheduler.running = [request for request in before if request not in away]
    try:
        yield
    finally:
        now, known = set(scheduler.running), set(before)
        stayed = [request for request in before if request in away or request in now]
        scheduler.running = stayed + [request for request in scheduler.running if request not in known]
