"""Compares ways to write with a draft: ours over HTTP, stop-and-wait as others do it, and peers' speculation.

  cloud-only, stop-and-wait, stream   `outrider-cloud serve` and an agent; stream as it is by default, which copies from
                                      its own text, too; no lookup at the verifier, and no recent texts
  stop-and-wait, N drafted            blocks of N tokens, one request each, nothing meanwhile; where it samples, with
                                      the draft's probabilities and rejection (docs/rules.md)
  a peer, N drafted                   a kind of `bench.peer_drafts`: draft and target in one process
  a peer, plain                       its target alone
  served                              with --served: the local endpoint, `outrider serve`, over HTTP

The same held-out texts in turn. A peer is stopped (SIGSTOP) while it has no turn.

* On one machine (`--cores 0`, the default) all share all cores, nothing is pinned, there is no network.
* On two (`--cores 1 --rtt-ms 20`) the cloud has a core and the agent another, one thread each. A peer has the cloud's
  core, for draft and target; request and tokens cross the same emulated network.

A peer that fails is named with its error, and with the command that shows it. No target keeps prompts from text to
text. Tokens/s are medians of the runs, from the request to the last token; the times between tokens are of all runs, 0
where tokens come together. Time per token is `passes per token` times `ms per pass`. `accepted` is a share of drafted
positions, of which a tree has many that cannot all be right. `MB` is the sum of the most that each process had (Linux);
one number for our modes, whose processes are the same. `own text` counts texts that are those of the same target alone
with the same seed. Where it samples, `nats` is the mean log-probability of a token under the target.

--served measures what the local hop costs: cloud-only, stream and served, and peers that are named. The endpoint runs
on the agent's cores with a draft of its own, over a network of its own. Each run has prompts of its own, so no draft
finds its prompt in its cache. All three make text as tokens come; each piece of a served text counts as a pass.
Exits 1 where served is under 0.98 of stream or 0.97 of cloud-only, or where a text is not the same in all three.

Greedy texts must be equal. Exits 1 where stream is under 0.98 of stop-and-wait, under the best peer's tokens/s (greedy)
or under 1.3 of it (sampled), and where no way of a peer with drafts runs (sampled: none at all).

    python -m bench.one_machine [--temperature 0] [--widen 700] [--runs 3] [--cores 0] [--rtt-ms 0] [--form tree]
    python -m bench.one_machine --served --cores 1 --temperature 0.8 --prompts 2 --max-tokens 80 [--rtt-ms 25]
        [--peers KIND ...] [--vllm-python PYTHON] [--llama-cpp FOLDER] [--json PATH]

--form tree gives up bits that do not depend on the batch. `--peers` without a kind leaves all out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, cycle, pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from bench.bare_http import complete
from bench.beside import Written
from bench.pairs import PAIR_OPTIONS, make_requests, open_pair, pair_of, safetensors_target, verifier_of
from bench.peer_drafts import KINDS
from bench.peer_engines import HUGE_PAGES
from bench.peer_processes import PeerFailed, PeerProcess, peak_mb, prepare
from bench.processes import endpoint_arguments
from bench.report import TO_JSON, figures_table, median_ratio, option, parser, verdict
from bench.round_trips import Subject
from rich.console import Console
from rich.table import Table

from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.laboratory import CLOUD_ONLY, STOP_AND_WAIT, STREAM, connected, network, three_modes
from outrider.edge.modes.assemble import Agent
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.http.answer_text import TextAssembler, TextStyle
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.picks.acceptance import PLAIN_TERMS, Rule, RuleTerms
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

OF_WAITING, OF_PEERS, OF_PEERS_SAMPLED, OF_STREAM, OF_CLOUD_ONLY = 0.98, 1.0, 1.3, 0.98, 0.97
PLAIN, LOOKUP, SERVED = "plain", "openvino_lookup", "served"
_WIDE_GAPS = (50, 95, 99)
Text = GenerationResult | Written
Write = Callable[[GenerationRequest], Awaitable[Text]]
Said = defaultdict[GenerationRequest, set[str]]
"""What the ways wrote on each request. The endpoint brings text, so texts are compared, not tokens."""


def open_endpoint(
    modes: Mapping[str, Agent], draft: Path, subject: Subject, rtt_ms: float, said: Said, stack: ExitStack
) -> dict[str, tuple[Write, str]]:
    """The ways for `bench.one_machine`, which add their texts to `said`; with whose tokens their own are compared."""
    tokenizer, cores = Tokenizer.from_dir(target_dir()), subject.cores.agent
    cloud = stack.enter_context(network(subject.url, rtt_ms, cores))
    command = ["-m", "outrider.edge.cli", *endpoint_arguments(draft, [cloud])]
    url = stack.enter_context(child_process(command, ready_prefix=READY_PREFIX, cores=cores))
    ours = {name: (aloud(modes[name], tokenizer, said), CLOUD_ONLY) for name in (CLOUD_ONLY, STREAM)}
    return {**ours, SERVED: (over_http(url, tokenizer, said), "")}


def aloud(agent: Agent, tokenizer: Tokenizer, said: Said) -> Write:
    """The agent, whose commits become text as they arrive, as `outrider run` and the endpoint make it."""

    async def write(request: GenerationRequest) -> GenerationResult:
        assembler, pieces = TextAssembler(tokenizer.detokenizer(context=request.prompt), TextStyle()), list[str]()
        found = await agent.generate(request, lambda batch: pieces.append(assembler.push(batch.tokens)))
        said[request].add("".join(pieces) + assembler.finish())
        return found

    return write


def over_http(url: str, tokenizer: Tokenizer, said: Said) -> Write:
    """A streamed completion of the endpoint. Its tokens are counted, not known."""

    async def write(request: GenerationRequest) -> Written:
        body = {
            "prompt": tokenizer.decode(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.params.temperature,
            "seed": request.params.seed,
            "ignore_eos": True,
        }
        found = await complete(url, body, time.perf_counter())
        said[request].add("".join(found.pieces))
        num_passes, last_s = len(found.pieces), found.arrival_s[-1:]
        num_more = request.max_tokens - num_passes  # tokens that came together with others
        return Written((), (*found.arrival_s, *last_s * num_more), num_passes, 0, num_more)

    return write


@dataclass(slots=True)
class Found:
    """Of one way to write: the texts of each run, and the memory. plain: the way of the same target alone."""

    plain: str
    runs: list[list[Text]] = field(default_factory=list)
    peak_mb: float = 0.0

    @property
    def texts(self) -> list[Text]:
        """Of all runs."""
        return list(chain.from_iterable(self.runs))

    @property
    def rates(self) -> list[float]:
        """Tokens/s of each run."""
        return [sum(len(text.arrival_s) for text in run) / sum(text.arrival_s[-1] for text in run) for run in self.runs]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """Of the texts of all runs."""
        return [text.tokens for text in self.texts]

    @property
    def figures(self) -> dict[str, Any]:
        """For the table and the document."""
        texts, num_tokens = self.texts, sum(len(text.arrival_s) for text in self.texts)
        num_passes = sum(text.num_passes for text in texts)
        drafted = sum(text.num_drafted for text in texts)
        return {
            "rates": self.rates,
            "first_ms": 1e3 * median(text.arrival_s[0] for text in texts),
            "gaps_ms": gaps_ms([text.arrival_s for text in texts]),
            "passes": num_passes / num_tokens,
            "pass_ms": 1e3 * sum(text.arrival_s[-1] for text in texts) / num_passes,
            "accepted": sum(text.num_accepted for text in texts) / drafted if drafted else None,
            "peak_mb": self.peak_mb,
        }


def gaps_ms(arrivals: Sequence[Sequence[float]]) -> dict[int, float]:
    """Percentiles of the times between tokens, of texts given by their tokens' arrivals."""
    gaps = [1e3 * (later - at) for arrival_s in arrivals for at, later in pairwise(arrival_s)]
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    return {percent: cuts[percent - 1] for percent in _WIDE_GAPS}


async def compare(
    ways: Mapping[str, tuple[Write, str]], warming: Sequence[GenerationRequest], *runs: Sequence[GenerationRequest]
) -> tuple[dict[str, Found], dict[str, str]]:
    """Every way on the first text, then on the second, ...: what changes on the machine hits all.

    ways: each with the name of its target alone. Returns what was found, and the errors of peers that failed.
    """
    found, failed = {name: Found(plain) for name, (_, plain) in ways.items()}, dict[str, str]()

    async def write(name: str, request: GenerationRequest) -> list[Text]:
        try:
            return [await ways[name][0](request)]
        except PeerFailed as error:
            failed[name] = str(error)
            found.pop(name, None)
            return []

    for name, request in product(list(found), warming):
        await write(name, request)
    for requests in runs:
        for each in found.values():
            each.runs.append([])
        for index, request in enumerate(requests):
            for name in sorted(found, reverse=bool(index % 2)):
                for text in await write(name, request):
                    found[name].runs[-1].append(text)
    return found, failed


def waiting_agents(agent: Agent, drafted: Sequence[int], is_sampled: bool) -> dict[str, Agent]:
    """Stop-and-wait as published systems do it: blocks of one size. agent: its endpoints and its draft serve them."""
    assert isinstance(agent, StopAndWaitAgent)
    terms = RuleTerms(Rule.REJECTION) if is_sampled else PLAIN_TERMS
    return {
        f"{STOP_AND_WAIT}, {count} drafted": StopAndWaitAgent(
            agent.endpoints, agent.drafter, FixedDepth(count), Estimates(), terms=terms
        )
        for count in drafted
    }


async def measure(
    options: argparse.Namespace, subject: Subject, bench_mb: float, said: Said
) -> tuple[dict[str, Found], dict[str, str]]:
    """Our own modes and the peers, interleaved; and what failed. bench_mb: of this process, without the draft."""
    peers, failed = dict[str, PeerProcess](), dict[str, str]()
    with ExitStack() as stack:
        async with connected(subject.url, subject.cores, options.rtt_ms) as endpoints:
            modes = three_modes(endpoints, subject.drafter)
            modes |= waiting_agents(modes[STOP_AND_WAIT], options.others_drafted, options.temperature > 0.0)
            ways: dict[str, tuple[Write, str]] = {name: (agent.generate, CLOUD_ONLY) for name, agent in modes.items()}
            if options.served:
                ways = open_endpoint(modes, pair_of(options).draft, subject, options.rtt_ms, said, stack)
            for kind in options.peers:
                plain = f"{'openvino_genai' if kind == LOOKUP else kind}, {PLAIN}"
                try:
                    opens = prepare(kind, options.widen or None, options.vllm_python, options.llama_cpp)
                    for count in drafts_of(kind, options.drafted, options.others_drafted):
                        name = f"{kind}, {count} drafted" if count else plain
                        peers[name] = opens(count, subject.cores, options.rtt_ms, stack)
                        ways[name] = peers[name].generate, plain
                except PeerFailed as error:
                    failed[kind] = str(error)
            if (peaks := Path("/proc/self/clear_refs")).exists():
                peaks.write_text("5")  # begin anew: exporting is no part of a mode
            found, failures = await compare(ways, *texts_of(options))
        for name, each in found.items():
            each.peak_mb = peers[name].peak_mb if name in peers else _own_mb() - bench_mb
    return found, failed | failures


def drafts_of(kind: str, drafted: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    """The numbers of drafted tokens of a kind's ways; 0 is its target alone, which lookup has from `openvino_genai`."""
    if kind == LOOKUP:
        return others[:1]
    return 0, *(drafted if kind == "openvino_genai" else others)


def texts_of(options: argparse.Namespace) -> list[list[GenerationRequest]]:
    """Those that warm up, then those of each run."""
    if not options.served:
        return [make_requests(options)[-1:], *[make_requests(options)] * options.runs]
    found = make_requests(options, (options.runs + 1) * options.prompts)
    return [found[start : start + options.prompts] for start in range(0, len(found), options.prompts)]


def _own_mb() -> float:
    """Of the verifier and of this process, which drafts."""
    own = psutil.Process()
    return peak_mb(own, *(each for each in own.children() if "outrider.cloud.server" in each.cmdline()))


def likelihoods(target: Path, requests: Sequence[GenerationRequest], found: Mapping[str, Found]) -> dict[str, float]:
    """Mean log-probability of a token of each way, at the requests' temperature, in nats."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True)

    @lru_cache
    def likelihood(request: GenerationRequest, text: tuple[int, ...]) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([[*request.prompt, *text]])).logits[0, len(request.prompt) - 1 : -1]
        chances = torch.log_softmax(logits / request.params.temperature, dim=-1)
        return float(chances.gather(1, torch.tensor(text)[:, None]).mean())

    return {name: fmean(map(likelihood, cycle(requests), each.tokens)) for name, each in found.items()}


def as_table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each way."""
    names = ("tokens/s", "of stream", "first ms", "p50 ms", "p95 ms", "p99 ms", "passes per token", "ms per pass")
    table = figures_table("", "way", *names, "accepted", "MB", "own text", "nats", left=("way",))
    for name, each in figures.items():
        table.add_row(
            name,
            f"{median(each['rates']):.1f}",
            f"{median_ratio(each['rates'], figures[STREAM]['rates']):.2f}",
            f"{each['first_ms']:.0f}",
            *(f"{gap_ms:.1f}" for gap_ms in each["gaps_ms"].values()),
            f"{each['passes']:.2f}",
            f"{each['pass_ms']:.1f}",
            "" if each["accepted"] is None else f"{each['accepted']:.2f}",
            f"{each['peak_mb']:.0f}",
            each["own_text"],
            "" if each["nats"] is None else f"{each['nats']:.2f}",
        )
    return table


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    more = {
        "--runs": option(3),
        "--rtt-ms": option(0.0),
        "--drafted": option([3, 5, 8, 12], "tokens that openvino_genai's draft guesses for each pass"),
        "--others-drafted": option([4, 8], "the same of the other peers, and of blocks of one size"),
        "--served": option(False, "`outrider serve` against the agent and cloud-only"),
        "--peers": {
            "nargs": "*",
            "choices": tuple(KINDS),
            "help": "by default all whose place is known; with --served none",
        },
        "--vllm-python": option(help="the interpreter of an environment with vLLM and Outrider"),
        "--llama-cpp": option(type=Path, help="llama.cpp's source, with build/bin/llama-server"),
    }
    cli = parser(__doc__, {**PAIR_OPTIONS, **more, **TO_JSON})
    cli.set_defaults(cores=0, widen=700.0, temperature=0.0, prompts=4, max_tokens=128)
    options, console = cli.parse_args(given), Console(width=None if sys.stdout.isatty() else 190)
    if options.peers is None:
        away = {kind for kind, place in (("vllm", options.vllm_python), ("llama_cpp", options.llama_cpp)) if not place}
        options.peers = [kind for kind in KINDS if kind not in away and not options.served]
    os.environ |= HUGE_PAGES  # of all processes that are started here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or stopped processes would stay behind
    sampled, said = options.temperature > 0.0, Said(set)
    pair_of(options, verifier_of(options))  # exporting, also from the cache, loads torch
    bench_mb = psutil.Process().memory_info().rss / 1e6
    with open_pair(options, beside=False) as subject:
        found, failed = asyncio.run(measure(options, subject, bench_mb, said))
    chances = (
        likelihoods(safetensors_target(options.widen or None), make_requests(options), found)
        if sampled and not options.served
        else {}
    )
    figures = {
        name: {**each.figures, "own_text": own_text(each, found), "nats": chances.get(name)}
        for name, each in found.items()
    }
    console.print(as_table(figures))
    if failed:
        arguments = sys.argv[1:] if given is None else given
        console.print(f"Failed in `python -m bench.one_machine {' '.join(arguments)}`:", highlight=False)
    for name, error in failed.items():
        console.print(f"  {name}: {error}", highlight=False, markup=False)
    goal = OF_PEERS_SAMPLED if sampled else OF_PEERS
    goals = [
        (STREAM, name, OF_WAITING if name.startswith(STOP_AND_WAIT) else goal)
        for name in found
        if name not in (CLOUD_ONLY, STREAM, SERVED)
    ]
    if options.served:
        goals += [(SERVED, STREAM, OF_STREAM), (SERVED, CLOUD_ONLY, OF_CLOUD_ONLY)]
    missed = [
        f"{name} has {ratio:.3f} of {other}; expected at least {goal:g}"
        for name, other, goal in goals
        if (ratio := median_ratio(found[name].rates, found[other].rates)) < goal
    ]
    missed += [f"a text is not the same in all ways: {texts}" for texts in said.values() if len(texts) > 1]
    if not sampled:
        missed += [
            f"{name}: texts differ from stream's"
            for name, each in found.items()
            if name != SERVED and each.tokens != found[STREAM].tokens
        ]
    missed += [
        f"{kind}: no way with drafts runs"
        for kind in options.peers
        # Sampled texts need no way with drafts: some peers speculate greedily only. Their errors are printed.
        if not any(name.startswith(kind) and (sampled or PLAIN not in name) for name in found)
    ]
    told = {"temperature": options.temperature, "rtt_ms": options.rtt_ms, "form": options.form}
    return verdict(console, missed, options.json, {**told, "ways": figures, "failed": failed})


def own_text(found: Found, ways: Mapping[str, Found]) -> str:
    """How many texts are those of the same target alone; empty where that did not run."""
    if (plain := ways.get(found.plain)) is None:
        return ""
    num_same = sum(text == other for text, other in zip(found.tokens, plain.tokens, strict=True))
    return f"{num_same} of {len(plain.tokens)}"


if __name__ == "__main__":
    if not HUGE_PAGES.items() <= os.environ.items():  # glibc reads it at the start of a process, and this one drafts
        again = [sys.executable, "-m", "bench.one_machine", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | HUGE_PAGES)
    sys.exit(main())
