"""Handles rows of logits that are not finite: the request is run again in other blocks, and ends if that fails too.

Keys that are not finite, of a wrong guess or left in a block by another sequence, reach the rows beside them, and
neither may end a sequence.
"""

from __future__ import annotations

import time
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from outrider.cloud.vllm.book import Served
from outrider.cloud.vllm.worker_choosers import Found

FAULTY: Final = -1
"""What the samplers give for a row of logits that is not finite."""


class FaultyRows:
    """Those of a scheduler's requests. served: its sequences, by request id."""

    def __init__(self, scheduler: Scheduler, served: dict[str, Served]) -> None:
        self._scheduler = scheduler
        self._served = served
        self._again: list[Request] = []
        self._spoiled: set[int] = set()  # blocks to zero before the next step

    def zero_blocks(self, output: Any) -> None:
        """Has the step zero what a request with a fault has used, and the new blocks of one that is run again."""
        scheduler = self._scheduler
        for request_id, count in output.num_scheduled_tokens.items():
            served = self._served.get(request_id)
            if served is not None and served.is_rerun:
                computed = scheduler.requests[request_id].num_computed_tokens - count
                groups = scheduler.kv_cache_manager.get_block_ids(request_id)
                for blocks, group in zip(groups, scheduler.kv_cache_config.kv_cache_groups, strict=True):
                    self._spoiled.update(blocks[-(-computed // group.kv_cache_spec.block_size) :])  # the new ones
        if self._spoiled:
            output.new_block_ids_to_zero = sorted(self._spoiled.union(output.new_block_ids_to_zero or ()))
            self._spoiled.clear()

    def take(self, request: Request, output: Any, found: Found) -> None:
        """Takes out of a step's output what a request's faulty rows have left, or marks it as FAULTY."""
        ids = output.sampled_token_ids
        if not ids or request.num_computed_tokens < request.num_tokens:
            return  # a part of a prompt
        served = self._served.get(request.request_id)
        index = output.req_id_to_index.get(request.request_id)
        if served is None or index is None:
            return
        served.refusal = found.refusals.get(request.request_id)
        if served.refusal is not None:
            ids[index] = [FAULTY]
            return
        own, num_fine = ids[index], 0
        if self._scheduler.use_v2_model_runner:
            position = found.faults.get(request.request_id)
            if position is None or position - request.num_tokens >= len(own):
                return
            num_fine = position - request.num_tokens
        elif own and own[0] != FAULTY:  # V1: `OutriderVerifier` leaves what is before such a row
            return
        if served.is_rerun and num_fine == 0:
            ids[index] = [FAULTY]
        else:
            ids[index] = own[:num_fine]
            self._again.append(request)

    def run_again(self) -> None:
        """Takes the blocks of requests whose step had a fault, so that it is computed anew."""
        for request in self._again:
            served = self._served.get(request.request_id)
            if served is not None and not request.is_finished():
                served.is_rerun = True
                self.forget_blocks(request)
                self._scheduler.running.remove(request)
                self._scheduler._preempt_request(request, time.monotonic())
        self._again.clear()

    def forget_blocks(self, request: Request) -> None:
        """Has the blocks of a request that had a fault zeroed before they are used again; no other request finds them.

        A kernel may multiply what it masks by 0, which leaves what is not finite as it is. Blocks that others use too
        were full, and in use, before.
        """
        manager = self._scheduler.kv_cache_manager
        groups = manager.get_block_ids(request.request_id)
        own = {block for group in groups for block in group if manager.block_pool.blocks[block].ref_cnt == 1}
        manager.evict_blocks(own)
        self._spoiled |= own
