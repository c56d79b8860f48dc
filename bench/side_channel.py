"""Measures what an eavesdropper learns from the sizes and times of messages: which of 40 prompts a text continues.

The eavesdropper sits where the lab's proxy does, on the device's network. It sees the bytes of every read, its
direction and its time, as if TLS were on, which adds a constant to each record and hides nothing else; not to which
connection the bytes belong. It knows the 40 prompts, and has traces of its own of each, with other seeds. It sees a
window that begins when the first token arrives and is as long for every text, so that neither the prompt's length nor
the text's counts; in the rows `all` also the size of the request that opens the text.

The pair is the real reference pair at exact times (`emulated.Paced`). Each read is delayed by half a round trip and a
random jitter (exponential, its mean is --jitter-ms). Texts of all prompts, of training and of test, are mixed, so that
nothing that drifts tells them apart. Classifiers are trees over the first messages, and naive Bayes over runs of sizes
and gaps; cross-validation of the training traces alone chooses among them. Chance is 1 / prompts.

  as it is   the trace
  padded     computed from it: every read as large as the largest of its direction, at its own time
  steady     the same texts in steady sessions
  all        the opening's size, too

A text without drafts has a token for each step: 25 tokens/s at the default pace; what is above is the drafts' gain.
Exits 1 when the classifier names less than 60 % as it is (then it is too weak to show that anything is hidden), over 5
points more than chance where sessions are steady, or where these lose over 20 % of the gain.

    python -m bench.side_channel [--temperature 0.3] [--train 20] [--test 4] [--rtt-ms 25] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final, cast
from urllib.parse import urlsplit

from bench.eavesdropper import CLASSIFIERS, OPENING, Read, Trace, named, padded, validated
from bench.emulated import Emulation, Paced, emulated_cloud, open_draft
from bench.pairs import make_requests
from bench.report import TO_JSON, figures_table, option, parser, verdict
from rich.console import Console
from scipy.stats import binomtest

from outrider.edge.drafting.drafter import Drafter, ModelDrafter
from outrider.edge.lab.proxy import DelayProxy
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent, make_agent
from outrider.edge.results import GenerationRequest, Mode, TokenBatch
from outrider.export.make.pair import PairPaths
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.runtimes.base import SequenceRuntime

LEAST, OVER_CHANCE, MOST_LOST = 0.6, 0.05, 0.2
MAX_TOKENS: Final = 512
"""More than a window has."""
SLACK_S: Final = 0.05
"""A text goes on for so long after its window, which begins a little before the device has read the first token."""


# -- recording ---------------------------------------------------------------------------------------------------------


class Wiretap(DelayProxy):
    """The delayed network, heard at the device's end: what goes up when it is sent, what goes down when it arrives."""

    def __init__(self, host: str, port: int, rtt_ms: float, jitter_ms: float) -> None:
        super().__init__(host, port, rtt_ms)
        self._jitter, self._jitter_s = random.Random(0), jitter_ms / 1e3
        self.heard: list[Read] = []

    def _due(self, num_bytes: int, *, is_up: bool) -> float:
        now, due = time.perf_counter(), super()._due(num_bytes, is_up=is_up)
        late_s = self._jitter.expovariate(1.0 / self._jitter_s) if self._jitter_s else 0.0
        if num_bytes:
            self.heard.append(Read(now if is_up else now + self._delay_s + late_s, is_up, num_bytes))
        return due + late_s


@dataclass(frozen=True, slots=True)
class Lane:
    """A network, with the texts that a device writes over it one after the other: whether each is steady, its prompt's
    number, and the request.
    """

    rtt_ms: float
    jitter_ms: float
    window_s: float
    texts: tuple[tuple[bool, int, GenerationRequest], ...]

    def record(self, pair: PairPaths, pace: Emulation) -> list[Trace]:
        """The traces, of a verifier and a draft of its own."""
        runtime, num_ids = open_draft(pair.draft)
        paced = cast(SequenceRuntime, Paced(runtime, pace))
        with (
            closing(ModelDrafter(paced, num_ids)) as drafter,
            emulated_cloud(pace, None, ("--target", str(pair.target))) as url,
        ):
            return asyncio.run(self.listen(url, drafter))

    async def listen(self, url: str, drafter: Drafter) -> list[Trace]:
        """The traces."""
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        with Wiretap(address.hostname, address.port, self.rtt_ms, self.jitter_ms) as tap:
            async with (
                VerifierClient(tap.url) as plain,
                VerifierClient(tap.url, ClientOptions(is_steady=True)) as steady,
            ):
                agents = [make_agent(Mode.STREAM, Endpoints([client]), drafter) for client in (plain, steady)]
                # The first texts warm up connections and what an agent measures, and are left out.
                warming = [(is_steady, *self.texts[0][1:]) for is_steady in (False, True)]
                traces = [await self._listen(tap, agents[text[0]], *text) for text in (*warming, *self.texts)]
        return traces[len(warming) :]

    async def _listen(
        self, tap: Wiretap, agent: Agent, is_steady: bool, prompt: int, request: GenerationRequest
    ) -> Trace:
        arrivals: list[tuple[float, int]] = []
        tap.heard.clear()
        try:
            async with asyncio.timeout(None) as window:

                def on_tokens(batch: TokenBatch) -> None:
                    if not arrivals:
                        window.reschedule(asyncio.get_running_loop().time() + self.window_s)
                    arrivals.append((time.perf_counter(), len(batch.tokens)))

                await agent.generate(request, on_tokens)
        except TimeoutError:
            pass
        else:
            raise SystemExit(f"a text of {MAX_TOKENS} tokens ended before its window; lower --window-s")
        heard = sorted(tap.heard, key=lambda read: read.at_s)
        begin = max(read.at_s for read in heard if not read.is_up and read.at_s <= arrivals[0][0])
        inside = [read for read in heard if begin <= read.at_s < begin + self.window_s - SLACK_S]
        opening = max(read.num_bytes for read in heard if read.is_up and read.at_s < begin)
        reads = tuple(Read(read.at_s - begin, read.is_up, read.num_bytes) for read in inside)
        num_tokens = sum(count for at_s, count in arrivals if at_s - begin < self.window_s - SLACK_S)
        await asyncio.sleep(2.0 * self.rtt_ms / 1e3)  # until what ends this text has passed
        return Trace(prompt, request.params.seed, opening, num_tokens, reads, is_steady)


def record(options: argparse.Namespace) -> list[Trace]:
    """Traces of all prompts with all seeds, those for the test behind those for training."""
    texts = [
        (is_steady, number, replace(request, params=replace(request.params, seed=seed)))
        for number, request in enumerate(make_requests(options))
        for seed in range(options.train + options.test)
        for is_steady in (False, True)
    ]
    random.Random(0).shuffle(texts)
    pair, pace = export_reference_pair(), Emulation(*options.pace)
    lanes = [
        Lane(options.rtt_ms, options.jitter_ms, options.window_s, tuple(texts[first :: options.lanes]))
        for first in range(options.lanes)
    ]
    with ProcessPoolExecutor(options.lanes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(partial(Lane.record, pair=pair, pace=pace), lanes)
        return [trace for traces in found for trace in traces]


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """What the eavesdropper reaches in one row. low, high: 95 % interval of accuracy (Wilson 1927)."""

    name: str
    classifier: str
    accuracy: float
    low: float
    high: float
    bytes_up: float  # per token, as are those down
    bytes_down: float
    tokens_per_s: float


def judge(name: str, traces: Sequence[Trace], num_train: int, window_s: float, *, sees_opening: bool = False) -> Found:
    """Chooses a classifier on the training traces, and lets it guess the others. sees_opening: its size as well."""
    known = [trace for trace in traces if trace.seed < num_train]
    others = [trace for trace in traces if trace.seed >= num_train]
    choices = OPENING if sees_opening else CLASSIFIERS
    chosen = max(choices, key=lambda each: validated(choices[each](), known))
    accuracy = named(choices[chosen](), known, others)
    num_tokens = sum(trace.num_tokens for trace in traces)
    up, down = (
        sum(read.num_bytes for trace in traces for read in trace.reads if read.is_up is is_up) / num_tokens
        for is_up in (True, False)
    )
    rate = num_tokens / (len(traces) * window_s)
    interval = binomtest(round(accuracy * len(others)), len(others)).proportion_ci(method="wilson")
    return Found(name, chosen, accuracy, float(interval.low), float(interval.high), up, down, rate)


def show(console: Console, found: Sequence[Found], num_prompts: int, num_tests: int) -> None:
    """Prints the table."""
    names = ("seen", "prompts named", "95 %", "by", "bytes up", "bytes down", "tokens/s")
    title = f"{num_prompts} prompts (chance {1 / num_prompts:.1%}), {num_tests} texts to name; bytes per token"
    table = figures_table(title, *names, left=("seen", "by"))
    for row in found:
        table.add_row(
            row.name,
            f"{row.accuracy:.1%}",
            f"{row.low:.1%} to {row.high:.1%}",
            row.classifier,
            *(f"{value:.1f}" for value in (row.bytes_up, row.bytes_down, row.tokens_per_s)),
        )
    console.print(table)


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    cli = parser(
        __doc__,
        {
            "--prompts": option(40),
            "--train": option(20, "seeds of each prompt that the eavesdropper knows"),
            "--test": option(4, "other seeds of each prompt"),
            "--temperature": option(0.3),
            "--window-s": option(0.9, "that is seen of a text"),
            "--rtt-ms": option(25.0),
            "--jitter-ms": option(1.0, "mean of each read's"),
            "--pace": option([40.0, 1.0, 1.0], nargs=3, metavar=("STEP_MS", "EXTRA_MS", "DRAFT_MS")),
            "--lanes": option(2, "texts at a time, each with a verifier of its own"),
            **TO_JSON,
        },
    )
    cli.set_defaults(max_tokens=MAX_TOKENS)
    options = cli.parse_args(given)
    if min(options.train, options.prompts) < 2 or options.test < 1:
        raise SystemExit("--prompts and --train have to be at least 2, and --test at least 1")
    traces, window_s = record(options), options.window_s - SLACK_S
    plain, steady = ([trace for trace in traces if trace.is_steady is wanted] for wanted in (False, True))
    seen = {"as it is": plain, "padded": padded(plain), "steady": steady}
    found = [judge(name, each, options.train, window_s) for name, each in seen.items()]
    whole = {"all, as it is": plain, "all, steady": steady}
    found += [judge(name, each, options.train, window_s, sees_opening=True) for name, each in whole.items()]
    console = Console(width=None if sys.stdout.isatty() else 140)
    show(console, found, options.prompts, options.prompts * options.test)
    first, _, in_frames, *wholes = found
    missed = [
        f"{row.name}: {row.accuracy:.1%} are named, expected at least {LEAST:.0%}: too weak to show anything"
        for row in (first, wholes[0])
        if row.accuracy < LEAST
    ]
    most = 1 / options.prompts + OVER_CHANCE
    missed += [
        f"{row.name}: {row.accuracy:.1%} are named, expected at most {most:.1%}"
        for row in (in_frames, wholes[1])
        if row.accuracy > most
    ]
    undrafted = 1e3 / options.pace[0]
    lost = (first.tokens_per_s - in_frames.tokens_per_s) / (first.tokens_per_s - undrafted)
    console.print(f"steady sessions lose {lost:.0%} of the gain over {undrafted:g} tokens/s", highlight=False)
    if lost > MOST_LOST:
        missed.append(f"steady sessions lose {lost:.0%} of the gain, expected at most {MOST_LOST:.0%}")
    told = {
        "temperature": options.temperature,
        "prompts": options.prompts,
        "lost": lost,
        "rows": [asdict(row) for row in found],
    }
    return verdict(console, missed, options.json, told)


if __name__ == "__main__":
    sys.exit(main())
