"""Measures whether drafts pay again after other work has kept the processor busy for a while.

One verifier and one agent last for all phases, and keep what they have measured. In each phase drafts by tree and
cloud-only streaming take turns, text by text:

  before      a quiet machine
  busy        other work on every core, for `--spell` seconds
  recovering  the work has stopped; texts for `--recover` seconds
  after       again as before; a fresh verifier with a fresh agent takes turns with them: `fresh`

The speed-up is drafts' tokens/s over cloud-only's. Exits 1 where that after is less than 0.9 of the one before and of
the fresh one (so what has changed on the machine meanwhile is no miss), or a text differs from cloud-only's.

    python -m bench.busy --spell 60 [--engine vllm --server PYTHON] [--json PATH]
    python -m bench.busy --spell 600
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from bench.pairs import NO_LOOKUP, REAL_OPTIONS, make_requests
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.round_trips import TREE, rate_of, stream_agent
from bench.verifier import verifier_of
from rich.console import Console

from outrider.edge.lab.cores import CorePlan, running_on
from outrider.edge.lab.laboratory import ALIKE, CLOUD_ONLY, Lab, cloud_process, connected, interleave, open_lab
from outrider.edge.modes.assemble import Agent, make_agent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.client.client import VerifierClient

LEAST: Final = 0.9
WORK: Final = "import numpy as np\na = np.ones((600, 600), np.float32)\nwhile True: a = (a @ a) * 1e-3"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. step_ms, draft_token_ms: as the server says at its end; known_token_ms: as the agent does."""

    name: str
    speed_up: float
    cloud_only: float
    drafts: float
    num_texts: int
    num_different: int
    step_ms: float | None
    draft_token_ms: float | None
    known_token_ms: float


@dataclass(frozen=True, slots=True)
class Side:
    """A verifier's client, and the agents that use it, by mode."""

    client: VerifierClient
    modes: Mapping[str, Agent]

    async def phase(self, name: str, found: dict[str, list[GenerationResult]]) -> Phase:
        """What the texts show."""
        rates = {mode: rate_of([text.arrival_s for text in texts]) for mode, texts in found.items()}
        pairs = list(zip(found[TREE], found[CLOUD_ONLY], strict=True))
        ready = await self.client.ready()
        return Phase(
            name,
            rates[TREE] / rates[CLOUD_ONLY],
            rates[CLOUD_ONLY],
            rates[TREE],
            len(pairs),
            sum(ours.tokens != plain.tokens for ours, plain in pairs),
            ready.step_ms,
            ready.draft_token_ms,
            self.modes[TREE].estimates.extra_ms,  # type: ignore[attr-defined]
        )


@asynccontextmanager
async def opened_side(url: str, lab: Lab, rtt_ms: float) -> AsyncIterator[Side]:
    """Agents with estimates of their own."""
    async with connected(url, lab.cores, rtt_ms) as endpoints, VerifierClient(url) as client:
        agent, _ = stream_agent(endpoints, lab.drafter)
        yield Side(client, {CLOUD_ONLY: make_agent(Mode.CLOUD_ONLY, endpoints, None), TREE: agent})


@contextmanager
def other_work(cores: CorePlan, count: int) -> Iterator[None]:
    """`count` processes on each side's core that never rest."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for each in (cores.cloud, cores.agent):
            with running_on(each):
                started += [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(count)]
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


async def texts_for(
    seconds: float, side: Side, requests: Sequence[GenerationRequest]
) -> dict[str, list[GenerationResult]]:
    """Texts in turn for about so long, at least one of each mode."""
    until = time.monotonic() + seconds
    return await interleave(side.modes, [*requests] * 10_000, has_time=lambda: time.monotonic() < until)


async def measure(
    options: argparse.Namespace, lab: Lab, fresh: Sequence[str], requests: list[GenerationRequest]
) -> list[Phase]:
    """All phases. fresh: the arguments of the second verifier."""
    phases = []
    async with opened_side(lab.url, lab, options.rtt_ms) as lasting:
        await interleave(lasting.modes, requests[:1])  # warms up
        phases.append(await lasting.phase("before", await interleave(lasting.modes, requests * options.runs)))
        with other_work(lab.cores, options.work):
            phases.append(await lasting.phase("busy", await texts_for(options.spell, lasting, requests)))
        phases.append(await lasting.phase("recovering", await texts_for(options.recover, lasting, requests)))
        python = verifier_of(options).python
        with cloud_process(lab.target.path, lab.cores.cloud, fresh, python) as url:
            async with opened_side(url, lab, options.rtt_ms) as other:
                await interleave(other.modes, requests[:1])
                sides = {"after": lasting, "fresh": other}
                both = {f"{name} {mode}": agent for name, side in sides.items() for mode, agent in side.modes.items()}
                found = await interleave(both, requests * options.runs)
                for name, side in sides.items():
                    own = {mode: found[f"{name} {mode}"] for mode in side.modes}
                    phases.append(await side.phase(name, own))
    return phases


def misses(phases: Sequence[Phase]) -> list[str]:
    """What is not as it should be, in words."""
    by_name = {phase.name: phase for phase in phases}
    least = LEAST * min(by_name["before"].speed_up, by_name["fresh"].speed_up)
    after = by_name["after"].speed_up
    told = [f"after the busy spell drafts reach {after:.2f}x, expected {least:.2f}x"] if after < least else []
    different = sum(phase.num_different for phase in phases)
    return told + ([f"{different} texts differ from cloud-only's; run bench.invariant"] if different else [])


def show(console: Console, phases: Sequence[Phase]) -> None:
    """Prints the table."""
    names = ("phase", "speed-up", "cloud-only/s", "drafts/s", "texts", "step ms", "token ms", "the agent's")
    table = figures_table("", *names, left=("phase",))
    for phase in phases:
        told = (phase.step_ms, phase.draft_token_ms, phase.known_token_ms)
        table.add_row(
            phase.name,
            f"{phase.speed_up:.2f}x",
            f"{phase.cloud_only:.1f}",
            f"{phase.drafts:.1f}",
            str(phase.num_texts),
            *("-" if value is None else f"{value:.2f}" for value in told),
        )
    console.print(table)


def main() -> int:
    """The command."""
    runs = {
        "--spell": option(60.0, "of other work", metavar="SECONDS"),
        "--recover": option(30.0, "between it and the measurement", metavar="SECONDS"),
        "--work": option(2, "processes of other work on each core"),
        "--rtt-ms": option(10.0),
        "--runs": option(3, "of all texts, before and after"),
    }
    options = parser(__doc__, {**REAL_OPTIONS, **runs, **TO_JSON}).parse_args()
    console, verifier = Console(width=None if sys.stdout.isatty() else 120), verifier_of(options)
    pair, cloud_options = verifier.pair(options.widen or None), (*ALIKE, *verifier.options, NO_LOOKUP)
    with ExitStack() as stack:
        lab = stack.enter_context(
            open_lab(
                pair.target, options.draft or pair.draft, cloud_options=cloud_options, cloud_python=verifier.python
            )
        )
        console.print(lab.cores.note, highlight=False)
        phases = asyncio.run(measure(options, lab, cloud_options, make_requests(options)))
    show(console, phases)
    document = {"spell_s": options.spell, "phases": [asdict(each) for each in phases]}
    return verdict(console, misses(phases), options.json, document)


if __name__ == "__main__":
    sys.exit(main())
