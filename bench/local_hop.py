"""Measures what the local hop costs: `outrider serve` over HTTP against the agent of `outrider run`, by round trip.

The same texts, back to back, in three ways, in another order each time; a run is all texts at one round trip, and
tables show medians of the runs' ratios:

  cloud-only   the target's own stream, no draft
  direct       the stream agent in this process, as `outrider run` makes it
  served       POST /v1/completions with "stream": true to `outrider serve`, a process with a draft of its own

A text's rate is its tokens over the time from the call until the caller has the end of it, so the time to the first
token counts. The text is detokenized in all three. Cloud and device have a core each: this process, `outrider serve`
and the network share the device's. Each run has prompts of its own, so no draft finds its prompt in its cache. The
verifier shares no prefixes and makes no guesses of its own; device-side prompt lookup is on, as by default.

Exits 1 when served is below 0.98 of direct or below 0.97 of cloud-only at a round trip, or when a text differs.

    python -m bench.local_hop [--widen 1450] [--runs 5] [--rtt-ms 0 10 25 50 100 200] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

from bench.bare_http import Wire
from bench.pairs import make_requests
from bench.processes import endpoint_arguments
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.round_trips import in_turn
from rich.console import Console
from rich.progress import Progress

from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.laboratory import ALONE, CLOUD_ONLY, Lab, network, open_lab
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent, make_agent
from outrider.edge.results import GenerationRequest, Mode, TokenBatch
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.client.client import VerifierClient
from outrider.models.http.answer_text import TextAssembler, TextStyle
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.text.tokenizer import Tokenizer

DIRECT: Final = "direct"
SERVED: Final = "served"
WAYS: Final = (CLOUD_ONLY, DIRECT, SERVED)
OVER_DIRECT, OVER_CLOUD_ONLY = 0.98, 0.97


@dataclass(frozen=True, slots=True)
class Call:
    """One text as the caller sees it. first_s, total_s: from the call until text comes, and until the end."""

    text: str
    first_s: float
    total_s: float
    num_accepted: int


Ask = Callable[[GenerationRequest], Awaitable[Call]]


@dataclass(slots=True)
class Way:
    """One way at one round trip, a value per run. first_ms: mean time to the first text."""

    rates: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)  # drafted tokens per token of the text
    num_different: int = 0


@dataclass(slots=True)
class Place:
    """One round trip."""

    rtt_ms: float
    ways: dict[str, Way] = field(default_factory=lambda: {name: Way() for name in WAYS})

    def over(self, name: str, base: str) -> list[float]:
        """Ratios of the runs' rates."""
        return [a / b for a, b in zip(self.ways[name].rates, self.ways[base].rates, strict=True)]

    @property
    def num_different(self) -> int:
        """Texts that differ from cloud-only's."""
        return sum(way.num_different for way in self.ways.values())


# -- the ways ----------------------------------------------------------------------------------------------------------


def ask_agent(agent: Agent, tokenizer: Tokenizer) -> Ask:
    """The agent in this process; its commits become text as they arrive."""

    async def ask(request: GenerationRequest) -> Call:
        assembler = TextAssembler(tokenizer.detokenizer(context=request.prompt), TextStyle())
        pieces: list[str] = []
        began = time.perf_counter()
        first_s = 0.0

        def on_tokens(batch: TokenBatch) -> None:
            nonlocal first_s
            if (piece := assembler.push(batch.tokens)) and not pieces:
                first_s = time.perf_counter() - began
            if piece:
                pieces.append(piece)

        result = await agent.generate(request, on_tokens)
        pieces.append(assembler.finish())
        return Call("".join(pieces), first_s, time.perf_counter() - began, result.num_accepted)

    return ask


def ask_endpoint(url: str, tokenizer: Tokenizer) -> Ask:
    """A streamed completion of the local endpoint."""

    async def ask(request: GenerationRequest) -> Call:
        body = {
            "prompt": tokenizer.decode(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.params.temperature,
            "seed": request.params.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces: list[str] = []
        first_s, num_accepted = 0.0, 0
        began = time.perf_counter()
        async with Wire(url) as wire:
            await wire.post("/v1/completions", body)
            while (event := await wire.event()) is not None:
                if "error" in event:
                    raise SystemExit(f"the endpoint's stream ended with an error: {event['error']}")
                piece = "".join(choice["text"] for choice in event["choices"])
                if piece and not pieces:
                    first_s = time.perf_counter() - began
                pieces.append(piece)
                if (usage := event.get("usage")) is not None:
                    num_accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
            total_s = time.perf_counter() - began
        return Call("".join(pieces), first_s, total_s, num_accepted)

    return ask


# -- measuring ---------------------------------------------------------------------------------------------------------


def requests_of(options: argparse.Namespace) -> list[list[GenerationRequest]]:
    """The texts of each run: other prompts in every run, and one run more, which warms up."""
    found = make_requests(options, (options.runs + 1) * options.prompts)
    return [found[start : start + options.prompts] for start in range(0, len(found), options.prompts)]


@asynccontextmanager
async def open_ways(lab: Lab, draft: Path, rtt_ms: float) -> AsyncIterator[Mapping[str, Ask]]:
    """The three ways over one link, each with measurements of its own."""
    async with AsyncExitStack() as stack:
        url = stack.enter_context(network(lab.url, rtt_ms, lab.cores.agent))
        endpoint = ["-m", "outrider.edge.cli", *endpoint_arguments(draft, [url])]
        serving = child_process(endpoint, ready_prefix=READY_PREFIX, cores=lab.cores.agent)
        local = stack.enter_context(serving)
        agents = {}
        for mode, drafter in ((Mode.CLOUD_ONLY, None), (Mode.STREAM, lab.drafter)):
            client = await stack.enter_async_context(VerifierClient(url))
            agents[mode] = ask_agent(make_agent(mode, Endpoints([client]), drafter), lab.tokenizer)
        yield {
            CLOUD_ONLY: agents[Mode.CLOUD_ONLY],
            DIRECT: agents[Mode.STREAM],
            SERVED: ask_endpoint(local, lab.tokenizer),
        }


async def measure(
    lab: Lab,
    draft: Path,
    rtts_ms: Sequence[float],
    requests: Sequence[Sequence[GenerationRequest]],
    on_run: Callable[[], None] = lambda: None,
) -> list[Place]:
    """All round trips, one after the other. requests: of the warm-up, then of each run."""
    places = []
    for rtt_ms in rtts_ms:
        places.append(place := Place(rtt_ms))
        async with open_ways(lab, draft, rtt_ms) as ways:
            for ask in ways.values():  # warms up connections, and what agents have measured
                for request in requests[0]:
                    await ask(replace(request, max_tokens=min(32, request.max_tokens)))
            for index, run in enumerate(requests[1:]):
                await _run(place, ways, run, index)
                on_run()
    return places


async def _run(place: Place, ways: Mapping[str, Ask], requests: Sequence[GenerationRequest], index: int) -> None:
    calls: dict[str, list[Call]] = {name: [] for name in ways}
    for name, request in in_turn(list(ways), requests, index):
        calls[name].append(await ways[name](request))
    num_tokens = sum(request.max_tokens for request in requests)
    for name, found in calls.items():
        way = place.ways[name]
        way.rates.append(num_tokens / sum(call.total_s for call in found))
        way.first_ms.append(1e3 * sum(call.first_s for call in found) / len(found))
        way.accepted.append(sum(call.num_accepted for call in found) / num_tokens)
        way.num_different += sum(a.text != b.text for a, b in zip(found, calls[CLOUD_ONLY], strict=True))


# -- results -----------------------------------------------------------------------------------------------------------


def misses(place: Place) -> list[str]:
    """The bounds that this round trip misses, in words."""
    checks = ((DIRECT, OVER_DIRECT), (CLOUD_ONLY, OVER_CLOUD_ONLY))
    missed = [
        f"RTT {place.rtt_ms:g} ms: served is {ratio:.3f} of {base}, expected at least {bound:g}"
        for base, bound in checks
        if (ratio := median(place.over(SERVED, base))) < bound
    ]
    if place.num_different:
        missed.append(f"RTT {place.rtt_ms:g} ms: {place.num_different} texts differ from cloud-only's")
    return missed


def show(console: Console, places: Sequence[Place]) -> None:
    """Prints the table."""
    ratios = ("direct", "served", "served/direct", "first token ms: cloud-only", "direct", "served")
    names = ("RTT ms", "cloud-only tok/s", *ratios, "accepted: direct", "served", "texts")
    table = figures_table("tokens/s, prompt included; medians of the runs (lowest run)", *names)
    for place in places:
        ways = place.ways
        table.add_row(
            f"{place.rtt_ms:g}",
            f"{median(ways[CLOUD_ONLY].rates):.1f}",
            *(f"{_with_lowest(place.over(name, CLOUD_ONLY))}x" for name in (DIRECT, SERVED)),
            f"[bold]{_with_lowest(place.over(SERVED, DIRECT))}[/bold]",
            *(f"{median(ways[name].first_ms):.1f}" for name in WAYS),
            *(f"{median(ways[name].accepted):.3f}" for name in (DIRECT, SERVED)),
            "DIFFERENT" if place.num_different else "equal",
        )
    console.print(table)


def _with_lowest(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f})"


def main() -> int:
    """Measures, prints a table, and returns the exit code."""
    options = parser(
        __doc__,
        {
            "--widen": option(1450.0, "MB of the widened FP32 target; 0: as it is"),
            "--rtt-ms": option([0.0, 10.0, 25.0, 50.0, 100.0, 200.0]),
            "--runs": option(5),
            "--prompts": option(2, "texts of a run"),
            "--max-tokens": option(80),
            "--temperature": option(0.8),
            **TO_JSON,
        },
    ).parse_args()
    console = Console(width=None if sys.stdout.isatty() else 190)
    pair = export_reference_pair(widen_mb=options.widen or None)
    bars = Progress(console=console, transient=True, refresh_per_second=1)
    with open_lab(pair.target, pair.draft, cloud_options=ALONE) as lab, bars as progress:
        console.print(lab.cores.note, highlight=False)
        task = progress.add_task("runs", total=options.runs * len(options.rtt_ms))
        texts = requests_of(options)
        places = asyncio.run(measure(lab, pair.draft, options.rtt_ms, texts, lambda: progress.advance(task)))
    show(console, places)
    missed = [miss for place in places for miss in misses(place)]
    facts = {"widen_mb": options.widen, "temperature": options.temperature}
    found = [
        {
            "rtt_ms": place.rtt_ms,
            "served_over_direct": median(place.over(SERVED, DIRECT)),
            "served_over_cloud_only": median(place.over(SERVED, CLOUD_ONLY)),
            "direct_over_cloud_only": median(place.over(DIRECT, CLOUD_ONLY)),
            "ways": {name: asdict(way) for name, way in place.ways.items()},
        }
        for place in places
    ]
    return verdict(console, missed, options.json, {**facts, "round_trips": found})


if __name__ == "__main__":
    sys.exit(main())
