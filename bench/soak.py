"""Runs a thousand short sessions against a real server, and checks its memory, its blocks, its sockets.

    python bench/soak.py

Sessions of every kind in turn: streamed to the end, with drafts, abandoned by the client, ended by DELETE,
stop-and-wait. Prints the server's memory (private, from the system) on the way; exits 1 if it grows by more than 2 %
over the last three quarters, or if a block, sequence, session or socket is not freed.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import psutil
import typer
from bench.bare_http import Wire
from bench.open_and_drop import OPEN, Visit, at_rest, deleted, while_streaming
from rich.console import Console

from outrider.edge.lab.laboratory import Lab, open_lab, three_modes
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.results import GenerationRequest
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.client.client import VerifierClient
from outrider.models.picks.sampling import SamplingParams
from outrider.reference import load_prompts

console = Console()
DROPPED = {"left early": while_streaming, "deleted": deleted}
KINDS = ("cloud_only", "stream", "stop_and_wait", *DROPPED)


def server_of(url: str) -> psutil.Process:
    """The process that listens where `url` points."""
    port = int(url.rsplit(":", 1)[1])
    for child in psutil.Process().children(recursive=True):
        if any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in child.net_connections("tcp")):
            return child
    raise SystemExit(f"no process of ours listens on port {port}")


async def one_session(lab: Lab, kind: str, index: int, tokens: int) -> None:
    """One short session of the given kind, on its own connections."""
    prompts = [list(lab.encode(prompt.text)) for prompt in load_prompts(200)]
    if kind in DROPPED:
        async with Wire(lab.url) as wire:
            return await DROPPED[kind](wire, Visit(lab.url, prompts, 0.3, index))
    params = SamplingParams(temperature=0.8, seed=index)
    request = GenerationRequest(tuple(prompts[index % 200]), params, max_tokens=tokens, ignore_eos=True)
    async with VerifierClient(lab.url) as client:
        await three_modes(Endpoints([client]), lab.drafter)[kind].generate(request)


async def soak(lab: Lab, sessions: int, tokens: int, warm_up: int) -> bool:
    """Runs them; True if nothing grew and everything was freed."""
    server = server_of(lab.url)
    samples: list[tuple[int, float]] = []
    num_descriptors = server.num_fds()
    for index in range(warm_up):
        await one_session(lab, KINDS[index % len(KINDS)], index, tokens)
    for index in range(sessions):
        await one_session(lab, KINDS[index % len(KINDS)], index, tokens)
        if (index + 1) % max(1, sessions // 20) == 0:
            memory = server.memory_full_info()
            samples.append((index + 1, memory.uss / 1e6))
            console.print(f"{index + 1:5d} sessions   {memory.uss / 1e6:8.1f} MB   {server.num_fds()} descriptors")
    gauges = await at_rest(lab.url)
    console.print(gauges)
    steady = [mb for count, mb in samples if count >= sessions // 4]
    growth = steady[-1] - steady[0]
    console.print(f"growth over the last three quarters: {growth:+.2f} MB of {steady[0]:.1f} MB")
    is_clean = not any(gauges[name] for name in OPEN)
    lost = gauges["blocks"] - gauges["free_blocks"] - gauges["parked_blocks"]
    console.print(f"blocks lost: {lost:.0f} (parked prefixes hold {gauges['parked_blocks']:.0f})")
    # The first count is from before any session; a connection that read the metrics may still be closing.
    is_clean = is_clean and server.num_fds() <= num_descriptors + 4
    return is_clean and lost == 0 and growth <= 0.02 * steady[0]


def main(
    sessions: Annotated[int, typer.Option()] = 1000,
    warm_up: Annotated[int, typer.Option(help="sessions before, not measured: each block is used once")] = 400,
    tokens: Annotated[int, typer.Option(help="tokens of a session that runs to its end")] = 12,
) -> None:
    """Soaks; exits 1 on growth or a leak."""
    pair = export_reference_pair()
    # A cache small enough that every block is soon used: pages of a larger one, touched late, would look like growth.
    with open_lab(pair.target, pair.draft, cloud_options=("--kv-cache-mb", "24")) as lab:
        is_fine = asyncio.run(soak(lab, sessions, tokens, warm_up))
    raise typer.Exit(0 if is_fine else 1)


if __name__ == "__main__":
    typer.run(main)
