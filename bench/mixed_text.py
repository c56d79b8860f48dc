"""Measures how deep the device drafts in easy and in hard passages of one text.

    python -m bench.mixed_text

Target and draft are the fake ones, over HTTP: the draft agrees in every other passage and hardly in between. Times of
target, draft and network are the controller's inputs, given by options, so the figures do not depend on the machine.
"""

from __future__ import annotations

import asyncio
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tests.serving import serve_fake
from tests.test_edge_ladder import PARAMS, PASSAGE, Mixed, Steady

from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.results import GenerationRequest
from outrider.models.client.client import VerifierClient


async def depths(num_passages: int) -> list[tuple[int, int]]:
    """Tokens known, and the depth chosen there, at every commit."""
    estimates = Estimates()
    depth = Steady(estimates)
    with serve_fake(config=EngineConfig(policy=Policy.VERIFY, looks_up=False)) as cloud:
        async with VerifierClient(cloud.url) as client:
            agent = StopAndWaitAgent(Endpoints([client]), Mixed(), depth, estimates)
            prompt, count = (1,) * PASSAGE, num_passages * PASSAGE
            await agent.generate(GenerationRequest(prompt, PARAMS, count, ignore_eos=True))
    return depth.plans


def main(passages: Annotated[int, typer.Option(min=2, help="Passages of 64 tokens, hard ones first.")] = 12) -> None:
    """Prints the mean depth by kind of passage and by how far into it; exits 1 unless easy ones run twice as deep."""
    kinds: dict[tuple[bool, int], list[int]] = {}
    for num_known, depth in asyncio.run(depths(passages)):
        position = PASSAGE + num_known
        quarter = position % PASSAGE * 4 // PASSAGE
        kinds.setdefault((position // PASSAGE % 2 == 0, quarter), []).append(depth)
    table = Table("passage", *(f"quarter {quarter + 1}" for quarter in range(4)))
    for is_easy in (True, False):
        cells = [f"{mean(kinds.get((is_easy, quarter)) or [0]):.1f}" for quarter in range(4)]
        table.add_row("easy" if is_easy else "hard", *cells)
    Console().print(table)
    easy, hard = (mean(kinds.get((is_easy, 3)) or [0]) for is_easy in (True, False))
    if easy < 2 * hard:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
