"""Kills one of two replicas while texts run, and compares every text with that of a single server.

    python -m bench.replicas [--texts 20] [--max-tokens 120] [--json PATH]

Real processes: `outrider-cloud serve`, then `outrider-cloud serve --ray --replicas 2` on the same target; agents with
prompt lookup in this process. Once every text has begun, the replica with more sessions gets SIGKILL. Half of the texts
are greedy, half are sampled at 0.8. Exits 1 where a text differs or does not end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import psutil
import typer
from bench.attacks.subject import Server, Subject
from bench.report import write_json
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import VerifierClient
from outrider.models.picks.sampling import SamplingParams

_WORKER: Final = "ray::ServeReplica:outrider:replicas"
_LIMIT_S: Final = 600.0


def request_of(index: int, max_tokens: int) -> GenerationRequest:
    """The text `index`: its own prompt and seed."""
    params = SamplingParams(temperature=0.8 if index % 2 else 0.0, seed=index)
    return GenerationRequest((12, 5, 80, 100 + index), max_tokens=max_tokens, params=params, ignore_eos=True)


async def texts_of(
    url: str, num_texts: int, max_tokens: int, on_all_begun: Callable[[], Any] = lambda: None
) -> list[GenerationResult]:
    """All texts at the same time; on_all_begun: called, in a thread, once each has a token."""
    begun: set[int] = set()
    everyone = asyncio.Event()

    async def one(index: int) -> GenerationResult:
        def on_tokens(_: Any) -> None:
            begun.add(index)
            if len(begun) == num_texts:
                everyone.set()

        async with VerifierClient(url) as client:
            agent = StreamAgent(Endpoints([client]), NgramDrafter(), FixedDepth(4))
            return await agent.generate(request_of(index, max_tokens), on_tokens)

    texts = [asyncio.create_task(one(index)) for index in range(num_texts)]
    await asyncio.wait_for(everyone.wait(), _LIMIT_S)
    await asyncio.to_thread(on_all_begun)
    return await asyncio.wait_for(asyncio.gather(*texts), _LIMIT_S)


def sessions_by_replica(url: str) -> Counter[str]:
    """Open sessions of each replica, by its tag."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30.0).text)
    samples = next(family.samples for family in families if family.name == "outrider_sessions_open")
    return Counter({sample.labels["replica"]: int(sample.value) for sample in samples})


def kill_one(server: Server) -> dict[str, int]:
    """Kills a replica; returns the sessions that each had."""
    counts = sessions_by_replica(server.url)
    workers = psutil.Process(server.pid).children(recursive=True)
    replicas = [each for each in workers if each.cmdline() and each.cmdline()[0].startswith(_WORKER)]
    os.kill(replicas[0].pid, signal.SIGKILL)
    return dict(counts)


def main(
    texts: Annotated[int, typer.Option(help="generations at the same time")] = 20,
    max_tokens: Annotated[int, typer.Option(help="tokens of each")] = 120,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the raw numbers here")] = None,
) -> None:
    """Runs the texts on one server, then on two replicas of which one is killed."""
    subject = Subject(str(Path(sys.executable).absolute()), start_s=400.0)
    began_s = time.monotonic()
    with subject.serve() as server:
        alone = asyncio.run(texts_of(server.url, texts, max_tokens))
    alone_s = time.monotonic() - began_s
    had: dict[str, int] = {}
    began_s = time.monotonic()
    with subject.serve("--ray", "--replicas", "2") as server:
        ready_s = time.monotonic() - began_s
        began_s = time.monotonic()
        killed = asyncio.run(texts_of(server.url, texts, max_tokens, lambda: had.update(kill_one(server))))
        killed_s = time.monotonic() - began_s
        began_s = time.monotonic()
        while len(now := sessions_by_replica(server.url)) < 2 or set(now) == set(had):
            if time.monotonic() - began_s > _LIMIT_S:
                break
            time.sleep(0.5)
        replaced_s = time.monotonic() - began_s
    num_equal = sum(a.tokens == b.tokens for a, b in zip(alone, killed, strict=True))
    num_resumed = sum(each.num_sessions > 1 for each in killed)
    rows = {
        "texts, tokens of each": f"{texts}, {max_tokens}",
        "sessions of the two replicas at the kill": " and ".join(map(str, had.values())),
        "texts that were resumed": str(num_resumed),
        "texts equal to the single server's": f"{num_equal} of {texts}",
        "time of all texts": f"{killed_s:.1f} s",
        "until the front was ready": f"{ready_s:.0f} s",
        "until another replica had taken its place": f"{replaced_s:.0f} s after the last text",
    }
    Console().print(*(f"{what}: {measured}" for what, measured in rows.items()), sep="\n")
    numbers = {"equal": num_equal, "resumed": num_resumed, "sessions": had, "killed_s": killed_s, "alone_s": alone_s}
    write_json(json_path, {"texts": texts, "max_tokens": max_tokens, **numbers})
    if num_equal < texts or not num_resumed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
