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
from dataclasses import dataclass, field, replace
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
from outrider.edge.results import GenerationRequest, Mode
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.client.client import VerifierClient
from outrider.models.http.answer_text import TextAssembler, TextStyle
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.text.tokenizer import Tokenizer

DIRECT: Final = "direct"
SERVED: Final = "served"
WAYS: Final = (CLOUD_ONLY, DIRECT, SERVED)
OVER_DIRECT, OVER_CLOUD_ONLY = 0.98, 0.97


Ask = Callable[[GenerationRequest], Awaitable[tuple[str, float]]]
"""Returns the text, and the seconds from the call until its end."""


@dataclass(slots=True)
class Place:
    """One round trip. rates: tokens/s of each way's runs. num_different: texts that differ from cloud-only's."""

    rtt_ms: float
    rates: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in WAYS})
    num_different: int = 0

    def over(self, name: str, base: str) -> list[float]:
        """Ratios of the runs' rates."""
        return [a / b for a, b in zip(self.rates[name], self.rates[base], strict=True)]


# -- the ways ----------------------------------------------------------------------------------------------------------


def ask_agent(agent: Agent, tokenizer: Tokenizer) -> Ask:
    """The agent in this process; its commits become text as they arrive."""

    async def ask(request: GenerationRequest) -> tuple[str, float]:
        assembler = TextAssembler(tokenizer.detokenizer(context=request.prompt), TextStyle())
        pieces, began = list[str](), time.perf_counter()
        await agent.generate(request, lambda batch: pieces.append(assembler.push(batch.tokens)))
        pieces.append(assembler.finish())
        return "".join(pieces), time.perf_counter() - began

    return ask


def ask_endpoint(url: str, tokenizer: Tokenizer) -> Ask:
    """A streamed completion of the local endpoint."""

    async def ask(request: GenerationRequest) -> tuple[str, float]:
        body = {
            "prompt": tokenizer.decode(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.params.temperature,
            "seed": request.params.seed,
            "ignore_eos": True,
            "stream": True,
        }
        pieces, began = list[str](), time.perf_counter()
        async with Wire(url) as wire:
            await wire.post("/v1/completions", body)
            while (event := await wire.event()) is not None:
                if "error" in event:
                    raise SystemExit(f"the endpoint's stream ended with an error: {event['error']}")
                pieces += (choice["text"] for choice in event["choices"])
            return "".join(pieces), time.perf_counter() - began

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
    found: dict[str, list[tuple[str, float]]] = {name: [] for name in ways}
    for name, request in in_turn(list(ways), requests, index):
        found[name].append(await ways[name](request))
    num_tokens = sum(request.max_tokens for request in requests)
    for name, texts in found.items():
        place.rates[name].append(num_tokens / sum(total_s for _, total_s in texts))
        place.num_different += sum(a != b for (a, _), (b, _) in zip(texts, found[CLOUD_ONLY], strict=True))


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
    names = ("RTT ms", "cloud-only tok/s", "direct", "served", "served/direct", "texts")
    table = figures_table("tokens/s, prompt included; medians of the runs (lowest run)", *names)
    for place in places:
        ratios = [place.over(*pair) for pair in ((DIRECT, CLOUD_ONLY), (SERVED, CLOUD_ONLY), (SERVED, DIRECT))]
        table.add_row(
            f"{place.rtt_ms:g}",
            f"{median(place.rates[CLOUD_ONLY]):.1f}",
            *(f"{median(runs):.3f} ({min(runs):.3f})" for runs in ratios),
            "DIFFERENT" if place.num_different else "equal",
        )
    console.print(table)


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
    found = [
        {
            "rtt_ms": place.rtt_ms,
            "served_over_direct": median(place.over(SERVED, DIRECT)),
            "served_over_cloud_only": median(place.over(SERVED, CLOUD_ONLY)),
            "direct_over_cloud_only": median(place.over(DIRECT, CLOUD_ONLY)),
            "rates": place.rates,
            "num_different": place.num_different,
        }
        for place in places
    ]
    return verdict(console, missed, options.json, {"widen_mb": options.widen, "round_trips": found})


if __name__ == "__main__":
    sys.exit(main())
