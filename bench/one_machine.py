"""Compares draft and target on one machine, all cores shared, with peers that run both in one process.

  cloud-only, stop-and-wait, stream   `outrider-cloud serve` with a thread for each core and an agent with one, over
                                      loopback, nothing pinned; no prompt lookup and no recent texts on either side
  openvino_genai                      its speculation, at each of --drafted; without drafts where it samples: there
                                      its speculation ends with an error (2026.4.1)
  transformers                        its assisted generation, in FP32, where it samples

The same held-out texts in turn, f32 arithmetic and cache on both sides. A peer is stopped (SIGSTOP) while it has no
turn. Greedy texts must be equal. Exits 1 where stream is under 0.98 of stop-and-wait, under the best peer's tokens/s
(greedy) or under 1.3 of it (sampled).

    python -m bench.one_machine [--temperature 0] [--widen 700] [--runs 3] [--rtt-ms 0] [--form tree] [--json PATH]

--form tree gives up bits that do not depend on the batch. A round trip over 0 is for our own modes only.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from bench.pairs import PAIR_OPTIONS, make_requests, open_pair
from bench.peer_drafts import Asked
from bench.peer_engines import EngineProcess
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.round_trips import Subject
from bench.verifier import Verifier, safetensors_target
from rich.console import Console

from outrider.edge.lab.laboratory import STOP_AND_WAIT, STREAM, connected, three_modes
from outrider.edge.results import GenerationRequest
from outrider.reference import draft_dir

OF_WAITING, OF_PEERS, OF_PEERS_SAMPLED = 0.98, 1.0, 1.3

Write = Callable[[GenerationRequest], tuple[tuple[int, ...], float]]
"""A text's tokens, and the seconds that it took."""


def written(peer: EngineProcess, drafted: int, request: GenerationRequest) -> tuple[tuple[int, ...], float]:
    """One text of a kind of `bench.peer_drafts`, which is stopped while it has no turn."""
    params = request.params
    peer.go_on()
    found = peer.ask(asdict(Asked(request.prompt, request.max_tokens, drafted, params.temperature, params.seed)))
    peer.pause()
    return tuple(found["tokens"]), found["took_s"]


@dataclass(slots=True)
class Found:
    """Of one way to write: tokens/s of each run, the texts of the last, and passes in turns."""

    rates: list[float] = field(default_factory=list)
    texts: list[tuple[int, ...]] = field(default_factory=list)
    num_turns: int = 0

    @property
    def rate(self) -> float:
        """Median of the runs."""
        return median(self.rates)


async def compare(
    subject: Subject, peers: Mapping[str, Write], requests: Sequence[GenerationRequest], num_runs: int, rtt_ms: float
) -> dict[str, Found]:
    """Every way on the first text, then on the second, ...: what changes on the machine hits all."""
    async with connected(subject.url, subject.cores, rtt_ms) as endpoints:
        modes = three_modes(endpoints, subject.drafter)
        found = {name: Found() for name in [*modes, *peers]}

        async def write(name: str, request: GenerationRequest) -> tuple[tuple[int, ...], float]:
            if name in peers:
                return await asyncio.to_thread(peers[name], request)
            result = await modes[name].generate(request)
            found[name].num_turns += result.num_turns
            return result.tokens, result.arrival_s[-1]

        for name in found:
            await write(name, requests[-1])
        for _ in range(num_runs):
            num, seconds = dict.fromkeys(found, 0), dict.fromkeys(found, 0.0)
            for each in found.values():
                each.texts.clear()
            for index, request in enumerate(requests):
                for name in sorted(found, reverse=bool(index % 2)):
                    tokens, took_s = await write(name, request)
                    found[name].texts.append(tokens)
                    num[name] += len(tokens)
                    seconds[name] += took_s
            for name, each in found.items():
                each.rates.append(num[name] / seconds[name])
        return found


def open_peers(stack: ExitStack, temperature: float, widen_mb: float, drafted: Sequence[int]) -> Mapping[str, Write]:
    """Each at each number of drafted tokens."""

    def opened(kind: str, target: Path, draft: Path) -> EngineProcess:
        command = ["-m", "bench.peer_drafts", kind, str(target), str(draft), "--threads", str(os.cpu_count())]
        peer = EngineProcess(kind, command)
        stack.callback(peer.close)
        return peer

    pair = Verifier().pair(widen_mb or None)
    genai = opened("openvino_genai", pair.target, pair.draft)
    if temperature == 0.0:
        return {f"openvino_genai, {count} drafted": partial(written, genai, count) for count in drafted}
    torch = opened("transformers", safetensors_target(widen_mb or None), draft_dir())
    return {"openvino_genai, plain": partial(written, genai, 0)} | {
        f"transformers, {count} drafted": partial(written, torch, count) for count in drafted
    }


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    more = {
        "--runs": option(3),
        "--rtt-ms": option(0.0),
        "--drafted": option([3, 5, 8, 12], "tokens that the peers draft for each pass"),
        "--no-peers": option(False, "only our own modes"),
    }
    cli = parser(__doc__, {**PAIR_OPTIONS, **more, **TO_JSON})
    cli.set_defaults(cores=0, widen=700.0, temperature=0.0, prompts=4, max_tokens=128)
    options, console = cli.parse_args(given), Console(width=None if sys.stdout.isatty() else 190)
    sampled = options.temperature > 0.0
    with ExitStack() as stack:
        subject = stack.enter_context(open_pair(options, beside=False, lookup=False))
        peers = {} if options.no_peers else open_peers(stack, options.temperature, options.widen, options.drafted)
        requests = make_requests(options)
        found = asyncio.run(compare(subject, peers, requests, options.runs, options.rtt_ms))
    stream = found[STREAM]
    table = figures_table("tokens/s, medians of the runs", "way", "tokens/s", "of stream", "in turns", left=("way",))
    for name, each in found.items():
        table.add_row(name, f"{each.rate:.1f}", f"{each.rate / stream.rate:.2f}", str(each.num_turns or ""))
    console.print(table)
    goals = {STOP_AND_WAIT: OF_WAITING} | dict.fromkeys(peers, OF_PEERS_SAMPLED if sampled else OF_PEERS)
    missed = [
        f"stream has {ratio:.3f} of {name}; expected at least {goal:g}"
        for name, goal in goals.items()
        if (ratio := median(a / b for a, b in zip(stream.rates, found[name].rates, strict=True))) < goal
    ]
    if not sampled:
        missed += [f"{name}: texts differ from stream's" for name, each in found.items() if each.texts != stream.texts]
    figures = {name: {"rates": each.rates, "turns": each.num_turns} for name, each in found.items()}
    told = {"temperature": options.temperature, "rtt_ms": options.rtt_ms, "form": options.form, "ways": figures}
    return verdict(console, missed, options.json, told)


if __name__ == "__main__":
    sys.exit(main())
