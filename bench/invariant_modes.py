"""Generates the same texts in modes for every way in which drafts and the network can fail.

Used by `bench.invariant` over the real pair and by tests/test_invariant.py. Knows no model: it takes a verifier's URL
and drafters, one per worker, and each worker generates one text at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from tests.always_wrong import AlwaysWrongDrafter
from tests.faulty_posts import FaultRates, FaultyPosts
from tests.faulty_proxy import FaultyProxy

from outrider.edge.drafting.depth import CostModelDepth, DepthController, DraftPlan, FixedDepth
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import ClientOptions, VerifierClient

FAULTS: Final = FaultRates(drop=0.2, duplicate=0.2, delay=0.5, max_delay_s=0.05)
DEPTH: Final = 5
"""Fixed where the point is to have many drafts under way, also ones that a sensible controller would not send."""

MakeAgent = Callable[[Endpoints, Drafter, int], Agent]


def _stream(endpoints: Endpoints, drafter: Drafter, vocab_size: int, width: int = 4) -> Agent:
    """A tree: four guesses per token; or a path: one."""
    estimates, options = Estimates(), AgentOptions(tree=TreeLimits(width=width))
    return StreamAgent(endpoints, drafter, CostModelDepth(estimates), estimates, options)


def _mixed(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    """Model and prompt lookup in one tree."""
    return StreamAgent(endpoints, drafter.with_lookup(), FixedDepth(DEPTH))


def _stop_and_wait(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    estimates = Estimates()
    return StopAndWaitAgent(endpoints, drafter, CostModelDepth(estimates), estimates)


def _always_wrong(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    """A tree of four guesses per token, none of which is the draft's own."""
    return StreamAgent(endpoints, AlwaysWrongDrafter(drafter, vocab_size), FixedDepth(DEPTH))


def _wrong_blocks(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    """Drafts that are always rejected: a session soon stops verifying them, a block is always verified."""
    return StopAndWaitAgent(endpoints, AlwaysWrongDrafter(drafter, vocab_size), FixedDepth(DEPTH), Estimates())


def _no_draft(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    return StreamAgent(endpoints)


def _faulty(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    seeds = itertools.count(vocab_size)  # other faults in every session
    return StreamAgent(
        endpoints, drafter, FixedDepth(DEPTH), wrap_posts=lambda client: FaultyPosts(client, FAULTS, seed=next(seeds))
    )


def _turns(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    """As on shared cores; some turns never arrive."""
    seeds, turns = itertools.count(vocab_size), DepthController(DraftPlan(DEPTH), DraftPlan(DEPTH, in_turns=True))
    return StreamAgent(
        endpoints, drafter, turns, wrap_posts=lambda client: FaultyPosts(client, FAULTS, seed=next(seeds))
    )


def _many_drafts(endpoints: Endpoints, drafter: Drafter, vocab_size: int) -> Agent:
    return StreamAgent(endpoints, drafter, FixedDepth(DEPTH))


STEADY: Final = "steady"
PATH: Final = "path"
MIXED: Final = "mixed"
WRONG_TREE: Final = "always-wrong tree"
WRONG_BLOCKS: Final = "always-wrong blocks"
FAULTY: Final = "faulty network"
TURNS: Final = "turns, faulty network"
CUT: Final = "cut and resumed"
REPEATED: Final = "repeated"
"""Each request twice; the second is drafted from the text of the first, too, where the server keeps texts."""
MODES: Final[dict[str, MakeAgent]] = {
    "stream": _stream,
    PATH: partial(_stream, width=1),
    MIXED: _mixed,
    "stop-and-wait": _stop_and_wait,
    WRONG_TREE: _always_wrong,
    WRONG_BLOCKS: _wrong_blocks,
    "no draft": _no_draft,
    FAULTY: _faulty,
    TURNS: _turns,
    STEADY: _many_drafts,
    CUT: _many_drafts,
    REPEATED: _many_drafts,
}


async def generate_all(
    mode: str,
    url: str,
    drafters: Sequence[Drafter],
    vocab_size: int,
    requests: Sequence[GenerationRequest],
) -> list[GenerationResult]:
    """Runs all requests in `mode`, one per drafter at a time; results in the requests' order."""
    results: dict[int, GenerationResult] = {}
    waiting = iter(enumerate(requests))

    async def work(drafter: Drafter) -> None:
        with _line(url, is_cut=mode == CUT) as (place, cut_next):
            async with VerifierClient(
                place, ClientOptions(no_store=mode != REPEATED, is_steady=mode == STEADY)
            ) as client:
                agent = MODES[mode](Endpoints([client]), drafter, vocab_size)
                for index, request in waiting:
                    if mode == REPEATED:
                        await agent.generate(request)
                    cut_next(index)
                    results[index] = await agent.generate(request)

    async with asyncio.TaskGroup() as workers:
        for drafter in drafters:
            workers.create_task(work(drafter))
    return [results[index] for index in range(len(requests))]


@contextmanager
def _line(url: str, *, is_cut: bool) -> Iterator[tuple[str, Callable[[int], None]]]:
    """A worker's way to the verifier: its URL, and what to call before text `index`. Cut, it has a proxy, which breaks
    in the middle of every text of 40 tokens or more: by the events that come, not by the tokens that the agent has
    seen, as on a busy machine it sees them all at once.
    """
    if not is_cut:
        yield url, lambda index: None
        return
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    with FaultyProxy(parts.hostname, parts.port) as proxy:

        def cut_next(index: int) -> None:
            # Twice, at different places in each text, the second perhaps before the session is resumed. A session's
            # first event opens it; one of the next 5 is in its middle, as a commit has a few tokens.
            chance = random.Random(index)
            proxy.cut_after(b"data: ", chance.randrange(2, 7), chance.randrange(1, 5))

        yield proxy.url, cut_next
