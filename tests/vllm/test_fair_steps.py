"""What a step of vLLM's scheduler gets: blocks for a queued sequence, counted as vLLM counts them, and drafts.

Its cache is real; no engine runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.test_vllm_parts import book, verified
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.policy import Policy
from outrider.cloud.vllm.fair_steps import FairSteps
from outrider.cloud.vllm.step_shares import StepShares
from outrider.cloud.vllm.terms import Terms
from outrider.models.picks.sampling import SamplingParams as Picks

BLOCK = 16
NUM_BLOCKS = 100
"""Free ones, behind the one that vLLM keeps for itself."""

STEP_TOKENS = 64


class Blocks:
    """vLLM's cache, and of our scheduler what asks for blocks; one text runs. num_windows: groups of sliding layers."""

    def __init__(self, num_windows: int = 0) -> None:
        init_none_hash(sha256)
        shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
        windowed = SlidingWindowSpec(sliding_window=32, **shape)
        groups += [KVCacheGroupSpec([f"window {index}"], windowed) for index in range(num_windows)]
        config = KVCacheConfig(NUM_BLOCKS + 1, [], groups)
        self.manager = KVCacheManager(config, 4096, BLOCK, BLOCK, max_in_flight_tokens=STEP_TOKENS)
        self.scheduler: Any = object.__new__(FairSteps)
        self.scheduler.__dict__.update(
            kv_cache_manager=self.manager,
            kv_cache_config=config,
            block_size=BLOCK,
            num_lookahead_tokens=0,
            num_spec_tokens=3,
            requests={},
            running=[],
            _num_promised=0,
            _has_looked=False,
            _num_slots=8,
            _places=SimpleNamespace(num_running=1),
            _preempt_request=lambda request, now: self.manager.free(request),
        )

    def open(self, name: str, prompt: Sequence[int]) -> SimpleNamespace:
        """A queued sequence."""
        hashes = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.requests[name] = Request(
            name, list(prompt), SamplingParams(max_tokens=4), None, block_hasher=hashes
        )
        return SimpleNamespace(name=name)

    def run(self, served: SimpleNamespace) -> None:
        """Runs a sequence's prompt as vLLM does: in parts, the first of which takes what the cache has."""
        request = self.scheduler.requests[served.name]
        found, num_cached, _ = self.manager.get_computed_blocks(request)
        first = min(STEP_TOKENS, request.num_tokens - num_cached)
        assert self.manager.allocate_slots(request, first, num_cached, found, full_sequence_must_fit=True)
        request.num_computed_tokens = num_cached + first
        while num_left := request.num_tokens - request.num_computed_tokens:
            assert self.manager.allocate_slots(request, min(STEP_TOKENS, num_left))
            request.num_computed_tokens += min(STEP_TOKENS, num_left)
        self.scheduler.running.append(request)

    def has_room(self, served: SimpleNamespace, *givers: SimpleNamespace) -> bool:
        """Whether the sequence gets blocks in a step of its own."""
        self.scheduler._num_promised, self.scheduler._has_looked = 0, False
        return bool(self.scheduler._make_room(served, lambda: list(givers)))


def test_blocks_that_another_holds_need_not_be_free() -> None:
    """A prompt of 70 blocks, 60 of which a running one holds: it fits in the 40 that are free."""
    blocks = Blocks()
    blocks.run(blocks.open("runs", range(60 * BLOCK)))
    alike = blocks.open("alike", range(70 * BLOCK - 1))
    assert blocks.has_room(alike)
    blocks.run(alike)
    assert not blocks.has_room(blocks.open("unlike", range(7, 70 * BLOCK)))


def test_what_a_giver_holds_is_no_room_for_one_that_needs_it_itself() -> None:
    """50 further blocks of a prompt that begins as the giver's: it keeps its own, which were no help."""
    blocks = Blocks()
    giver = blocks.open("giver", range(60 * BLOCK))
    blocks.run(giver)
    assert not blocks.has_room(blocks.open("alike", range(110 * BLOCK)), giver)
    assert [request.request_id for request in blocks.scheduler.running] == ["giver"]
    assert blocks.has_room(blocks.open("unlike", range(7, 90 * BLOCK)), giver)
    assert not blocks.scheduler.running


def test_a_long_prompt_of_a_model_with_windows_is_admitted_beside_others() -> None:
    """40 blocks in each of six groups are more than there are; five of the groups hold no more than their window."""
    blocks = Blocks(num_windows=5)
    blocks.run(blocks.open("runs", range(BLOCK)))
    long = blocks.open("long", range(7, 40 * BLOCK))
    assert blocks.has_room(long)
    blocks.run(long)


def test_a_step_looks_at_the_cache_for_one_that_lacks_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for none that has room: for a long prompt it takes milliseconds."""
    blocks = Blocks()
    blocks.run(blocks.open("runs", range(60 * BLOCK)))
    looked = Mock(wraps=blocks.manager.get_computed_blocks)
    monkeypatch.setattr(blocks.manager, "get_computed_blocks", looked)
    assert blocks.has_room(blocks.open("small", range(7, 3 * BLOCK))) and not looked.called
    blocks.scheduler._num_promised = 0
    for name in ("first", "second"):
        blocks.scheduler._make_room(blocks.open(name, range(9, 80 * BLOCK)), lambda: [])
    assert [call.args[0].request_id for call in looked.call_args_list] == ["first"]


def test_drafts_need_blocks_in_each_group() -> None:
    """Two for a text in each of six groups, so eight texts have none to spare in 90."""
    blocks = Blocks(num_windows=5)
    assert blocks.scheduler._has_spare_blocks(8)
    blocks.run(blocks.open("runs", range(BLOCK)))
    assert not blocks.scheduler._has_spare_blocks(8)


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Policy))
def test_another_owners_sure_drafts_add_no_more_time_than_a_step(policy: Policy) -> None:
    """Sixteen texts with right drafts beside one without: a step has at most as many as double it, but for capacity."""
    on, clock = book(max_draft=16, policy=policy)
    for size in (1, 4, 8, 16, 32, 64, 128, 256) * 3:
        on.stepped(StepSize(size, size), 0.006 + 0.0005 * size, 0.0)
    served = [on.open(Terms(n, Picks(), 400, owner=b"many" if n else b"one"), [9]) for n in range(17)]
    for at in range(0, 90, 9):
        for each in served[1:]:
            on.take_paths(each.terms.number, at, [range(at, at + 8)], clock.now)
            each.proposed = verified(on, each)
            on.committed(each, list(range(at, at + 9)), False)
        on.learn()
    scheduler, places = Blocks().scheduler, StepShares(32, 512)
    for each in served:
        if each.terms.number:
            on.take_paths(each.terms.number, 90, [range(90, 106)], clock.now)
        places.open(each)
    running = [SimpleNamespace(num_computed_tokens=90, spec_token_ids=[]) for _ in served]
    scheduler.__dict__.update(
        _book=on,
        _places=places,
        _shares={},
        _first_drafts={},
        running=running,
        max_num_scheduled_tokens=512,
        num_spec_tokens=16,
    )
    scheduler._choose(list(zip(running, served, strict=True)), [])
    num_drafted = sum(len(request.spec_token_ids) for request in running)
    assert num_drafted >= 16 and (num_drafted <= 32) is (policy is not Policy.VERIFY)
