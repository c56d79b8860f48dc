"""Compares the adaptive agent with the best fixed settings while the link or the text changes, phase by phase.

Two scenarios, each of three phases of `--phase-tokens` tokens of one text:

  link   the round trip jumps, 10 -> 150 -> 10 ms, in the middle of the text
  text   the draft is accepted as usual, 0.2 of the time, and as usual again, at a steady round trip: in the second
         phase its scores get noise, by so much that its own pick is the target's at that share of the positions

The link changes when the device gets the commit with a phase's last token. A phase lasts from the commit with the last
token of the phase before (of the prompt, for the first: from the first commit) to the commit with its own last token,
and its rate is the tokens that came meanwhile over this time. So a phase begins with what the controller believes of
the phase before. Texts are the same in all settings, so each phase has the same tokens to guess.

The fixed settings are every depth of `--depths` with every width of `--widths`, and no drafts at all. Each measures all
phases itself, with estimates of its own that it keeps between the texts, as the adaptive agent keeps its own. The best
fixed setting of a phase is the one with the most tokens/s there over all rounds, so it is another one in each phase. A
round is one text in every setting, in another order each time.

Exits 1 when the adaptive agent is below 0.90 of the best fixed setting in a phase, when a text differs, or when the
draft's share in the hard phase is not within 0.05 of `--acceptance`.

    python -m bench.controllers [--emulate 40 1 1] [--rounds 2] [--phase-tokens 120] [--json PATH]
    python -m bench.controllers --real [--widen 1450] [--scenarios link]

The emulated pair has exact times, also on a busy machine (`bench.emulated`); `--real` takes the widened reference pair.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.changing_link import ChangingLink, changing_link
from bench.emulated import Emulation, emulated_cloud, emulated_draft
from bench.pairs import make_requests
from bench.report import write_json
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.edge.lab.laboratory import ALONE, cloud_process
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent, make_agent, make_options, open_draft_bundle, open_draft_model
from outrider.edge.results import GenerationRequest, Mode, TokenBatch
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.client.client import VerifierClient
from outrider.models.runtimes.base import SequenceRuntime

OF_BEST, OFF_BY = 0.90, 0.05
NUM_PHASES: Final = 3
ADAPTIVE: Final = "adaptive"
LINK, TEXT = "link", "text"
NO_DRAFTS: Final = "no drafts"
_NUM_FITS: Final = 14


class HardDrafter(ModelDrafter):
    """Drafts with a model whose scores get noise where the text is hard.

    hard: positions of the tokens that are guessed badly. noise: how strong, in units of the scores' own spread.
    """

    def __init__(self, runtime: SequenceRuntime, num_ids: int | None = None) -> None:
        super().__init__(runtime, num_ids)
        self.hard = range(0)
        self.noise = 0.0
        size = num_ids or runtime.limits.vocab_size
        self._table = np.random.default_rng(0).standard_normal(2 * size, np.float32)

    def _best(self, logits: NDArray[np.float32], branch: Sequence[int], width: int) -> list[Guess]:
        position = self.length + len(branch)
        if position in self.hard and self.noise:
            row = logits[: len(self._table) // 2]
            # Another part of the table at each position and after each branch, the same in every setting.
            start = (position * 7919 + int(row.argmax()) * 104_729) % len(row)
            logits = row + self.noise * float(row.std()) * self._table[start : start + len(row)]
        return super()._best(logits, branch, width)


@dataclass(frozen=True, slots=True)
class Subject:
    """The pair that is measured, and the link between its halves."""

    link: ChangingLink
    drafter: HardDrafter


@dataclass(frozen=True, slots=True)
class Setting:
    """How far and how widely to draft. depth: as of `make_agent`; None drafts nothing."""

    depth: str | None = "auto"
    width: str = "auto"

    def __str__(self) -> str:
        if self.depth is None:
            return NO_DRAFTS
        return ADAPTIVE if self.depth == "auto" else f"depth {self.depth}, width {self.width}"

    def agent(self, endpoints: Endpoints, drafter: ModelDrafter) -> Agent:
        """An agent with estimates of its own."""
        if self.depth is None:
            return make_agent(Mode.CLOUD_ONLY, endpoints, None)
        return make_agent(Mode.STREAM, endpoints, drafter, self.depth, make_options(self.width))


@dataclass(frozen=True, slots=True)
class Scenario:
    """What changes from phase to phase. is_hard: whether the second phase's text is."""

    name: str
    rtts_ms: tuple[float, ...]
    is_hard: bool


@dataclass(slots=True)
class Phase:
    """One setting in one phase: sums over the rounds."""

    num_tokens: int = 0
    took_s: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return self.num_tokens / self.took_s


@dataclass(slots=True)
class Found:
    """One scenario's results. cells: by setting, a phase each. shares: of positions at which the draft is right."""

    scenario: Scenario
    noise: float
    shares: list[float]
    cells: dict[str, list[Phase]] = field(default_factory=dict)
    num_different: int = 0

    def best(self, phase: int) -> str:
        """The fixed setting with the most tokens/s in a phase."""
        fixed = [name for name in self.cells if name != ADAPTIVE]
        return max(fixed, key=lambda name: self.cells[name][phase].rate)

    def ratio(self, phase: int) -> float:
        """The adaptive agent over the best fixed setting."""
        return self.cells[ADAPTIVE][phase].rate / self.cells[self.best(phase)][phase].rate


# -- the pair ----------------------------------------------------------------------------------------------------------


@contextmanager
def open_subject(options: argparse.Namespace) -> Iterator[Subject]:
    """The pair that the options name; this thread stays on the device's core."""
    cores = plan_cores()
    with ExitStack() as stack:
        if options.real:
            pair = export_reference_pair(widen_mb=options.widen or None)
            url = stack.enter_context(cloud_process(pair.target, cores.cloud, ALONE))
            stack.enter_context(running_on(cores.agent))
            model = open_draft_model(open_draft_bundle(pair.draft), num_threads=1)
            assert model.runtime is not None
            drafter = HardDrafter(model.runtime, model.num_ids)
        else:
            step_ms, extra_ms, draft_ms = options.emulate
            emulation = Emulation(step_ms, extra_ms, draft_ms, temperature=options.temperature)
            url = stack.enter_context(emulated_cloud(emulation, cores.cloud))
            stack.enter_context(running_on(cores.agent))
            drafter = HardDrafter(emulated_draft(emulation))
        stack.enter_context(closing(drafter))
        yield Subject(stack.enter_context(changing_link(url, cores.agent)), drafter)


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """The adaptive one, and all fixed ones."""
    fixed = [Setting(str(depth), str(width)) for depth in options.depths for width in options.widths]
    return [Setting(), Setting(None), *fixed]


# -- how hard the text is ----------------------------------------------------------------------------------------------


def share_right(drafter: ModelDrafter, request: GenerationRequest, text: Sequence[int], positions: range) -> float:
    """How often the draft's own pick is the text's token, at these positions of the text, counted from its first."""
    drafter.begin([*request.prompt, *text[: positions.start]], request.params)
    num_right = 0
    for index in positions:
        (guesses,) = drafter.guess([()], 1)
        num_right += bool(guesses) and guesses[0].token == text[index]
        drafter.extend(text[index : index + 1])
    return num_right / len(positions)


def shares(subject: Subject, requests: Sequence[GenerationRequest], texts: Sequence[Sequence[int]]) -> list[float]:
    """The same for each phase, over all texts, with the noise in force in the second one."""
    found = []
    for phase in phases_of(len(texts[0])):
        parts = []
        for request, text in zip(requests, texts, strict=True):
            subject.drafter.hard = hard_positions(request)
            parts.append(share_right(subject.drafter, request, text, phase))
        found.append(sum(parts) / len(parts))
    return found


def fit_noise(
    subject: Subject, requests: Sequence[GenerationRequest], texts: Sequence[Sequence[int]], acceptance: float
) -> float:
    """The noise with which the draft is right in the second phase as often as `acceptance` says, by bisection."""
    hard = phases_of(len(texts[0]))[1]
    low, high = 0.0, 8.0
    best = (1.0, 0.0)
    for _ in range(_NUM_FITS):
        noise = (low + high) / 2
        subject.drafter.noise = noise
        parts = []
        for request, text in zip(requests, texts, strict=True):
            subject.drafter.hard = hard_positions(request)
            parts.append(share_right(subject.drafter, request, text, hard))
        found = sum(parts) / len(parts)
        best = min(best, (abs(found - acceptance), noise))
        low, high = (noise, high) if found > acceptance else (low, noise)
    return best[1]


def phases_of(num_tokens: int) -> list[range]:
    """The phases of a text, as positions from its first token."""
    size = num_tokens // NUM_PHASES
    return [range(start, start + size) for start in range(0, NUM_PHASES * size, size)]


def hard_positions(request: GenerationRequest) -> range:
    """Positions of the second phase, the prompt's included."""
    hard, first = phases_of(request.max_tokens)[1], len(request.prompt)
    return range(first + hard.start, first + hard.stop)


# -- measuring ---------------------------------------------------------------------------------------------------------


async def measure(
    subject: Subject,
    scenarios: Sequence[Scenario],
    settings: Sequence[Setting],
    requests: Sequence[GenerationRequest],
    acceptance: float,
    on_text: Callable[[], None] = lambda: None,
) -> list[Found]:
    """All scenarios. requests: a round each."""
    subject.link.set_rtt_ms(0.0)
    async with VerifierClient(subject.link.url) as client:
        plain = make_agent(Mode.CLOUD_ONLY, Endpoints([client]), None)
        texts = [(await plain.generate(request)).tokens for request in requests]
    every = []
    for scenario in scenarios:
        noise = 0.0
        if scenario.is_hard:
            noise = await asyncio.to_thread(fit_noise, subject, requests, texts, acceptance)
        subject.drafter.noise = noise
        found = Found(scenario, noise, await asyncio.to_thread(shares, subject, requests, texts))
        every.append(found)
        await _measure(subject, found, settings, requests, texts, on_text)
    return every


async def _measure(
    subject: Subject,
    found: Found,
    settings: Sequence[Setting],
    requests: Sequence[GenerationRequest],
    texts: Sequence[Sequence[int]],
    on_text: Callable[[], None],
) -> None:
    async with VerifierClient(subject.link.url) as client:
        agents = {str(setting): setting.agent(Endpoints([client]), subject.drafter) for setting in settings}
        found.cells = {name: [Phase() for _ in range(NUM_PHASES)] for name in agents}
        subject.link.set_rtt_ms(found.scenario.rtts_ms[0])
        subject.drafter.hard = range(0)
        for agent in agents.values():  # warms up connections, and what agents have measured
            await agent.generate(_short(requests[-1]))
        names = list(agents)
        for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
            subject.drafter.hard = hard_positions(request)
            for i in range(len(names)):
                name = names[(i + index * len(names) // len(requests)) % len(names)]
                tokens = await _one_text(subject, found, name, agents[name], request)
                found.num_different += tuple(tokens) != tuple(text)
                on_text()


def _short(request: GenerationRequest) -> GenerationRequest:
    return GenerationRequest(request.prompt, request.params, 32, request.stop_ids, request.ignore_eos)


async def _one_text(
    subject: Subject, found: Found, name: str, agent: Agent, request: GenerationRequest
) -> tuple[int, ...]:
    """One text in one setting; adds its phases to the results."""
    link, rtts_ms, phases = subject.link, found.scenario.rtts_ms, phases_of(request.max_tokens)
    link.set_rtt_ms(rtts_ms[0])
    counts: list[tuple[float, int]] = []  # commits: when, and the tokens known then

    def on_tokens(batch: TokenBatch) -> None:
        num_known = (counts[-1][1] if counts else 0) + len(batch.tokens)
        counts.append((batch.at_s, num_known))
        phase = min(num_known // len(phases[0]), NUM_PHASES - 1)
        if link.rtt_ms != rtts_ms[phase]:
            link.set_rtt_ms(rtts_ms[phase])

    result = await agent.generate(request, on_tokens)
    before = counts[0]
    for cell, phase in zip(found.cells[name], phases, strict=True):
        after = next(commit for commit in counts if commit[1] >= phase.stop)
        cell.took_s += after[0] - before[0]
        cell.num_tokens += after[1] - before[1]
        before = after
    return result.tokens


# -- results -----------------------------------------------------------------------------------------------------------


def misses(found: Found, acceptance: float) -> list[str]:
    """The bounds that a scenario misses, in words."""
    missed = [
        f"{found.scenario.name}, phase {phase + 1}: adaptive is {ratio:.3f} of {found.best(phase)}, expected at least "
        f"{OF_BEST:g}"
        for phase in range(NUM_PHASES)
        if (ratio := found.ratio(phase)) < OF_BEST
    ]
    if found.scenario.is_hard and abs(found.shares[1] - acceptance) > OFF_BY:
        missed.append(f"{found.scenario.name}: the draft is right at {found.shares[1]:.2f}, expected {acceptance:g}")
    if found.num_different:
        missed.append(f"{found.scenario.name}: {found.num_different} texts differ from cloud-only's")
    return missed


def show(console: Console, found: Found) -> None:
    """Prints a scenario's tables."""
    table = Table(title=f"{found.scenario.name}: tokens/s by phase", title_justify="left", box=None)
    names = ("phase", "RTT ms", "draft right", "adaptive", "no drafts", "best fixed", "", "adaptive/best")
    for name in names:
        table.add_column(name, justify="right")
    for phase, rtt_ms in enumerate(found.scenario.rtts_ms):
        best = found.best(phase)
        table.add_row(
            str(phase + 1),
            f"{rtt_ms:g}",
            f"{found.shares[phase]:.2f}",
            *(f"{found.cells[name][phase].rate:.1f}" for name in (ADAPTIVE, NO_DRAFTS, best)),
            best,
            f"[bold]{found.ratio(phase):.3f}[/bold]",
        )
    console.print(table)
    for name, phases in found.cells.items():
        rates = "  ".join(f"{phase.rate:6.1f}" for phase in phases)
        console.print(f"{name:>20}  {rates}", style="dim", highlight=False)


def as_json(found: Found) -> dict[str, Any]:
    """A scenario as plain data."""
    return {
        "name": found.scenario.name,
        "rtts_ms": found.scenario.rtts_ms,
        "draft_right": found.shares,
        "noise": found.noise,
        "best_fixed": [found.best(phase) for phase in range(NUM_PHASES)],
        "adaptive_over_best": [found.ratio(phase) for phase in range(NUM_PHASES)],
        "tokens_per_s": {name: [phase.rate for phase in phases] for name, phases in found.cells.items()},
        "num_different": found.num_different,
    }


def main() -> int:
    """Measures, prints the tables, and returns the exit code."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("STEP_MS", "EXTRA_MS", "DRAFT_MS")
    cli.add_argument("--emulate", type=float, nargs=3, metavar=names, default=[40.0, 1.0, 1.0])
    cli.add_argument("--real", action="store_true", help="the widened reference pair, not an emulated one")
    cli.add_argument("--widen", type=float, default=1450.0, help="MB of the widened FP32 target; 0: as it is")
    cli.add_argument("--scenarios", nargs="+", choices=(LINK, TEXT), default=[LINK, TEXT])
    cli.add_argument("--rtt-ms", type=float, nargs=NUM_PHASES, default=[10.0, 150.0, 10.0], help="of the link's phases")
    cli.add_argument("--steady-rtt-ms", type=float, default=25.0, help="while the text changes")
    cli.add_argument("--acceptance", type=float, default=0.2, help="of the draft's own pick in the hard phase")
    cli.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    cli.add_argument("--widths", type=int, nargs="+", default=[1, 4])
    cli.add_argument("--phase-tokens", type=int, default=120)
    cli.add_argument("--rounds", dest="prompts", type=int, default=2, help="texts, each in every setting")
    cli.add_argument("--temperature", type=float, default=0.8)
    cli.add_argument("--json", type=Path)
    options = cli.parse_args()
    options.max_tokens = NUM_PHASES * options.phase_tokens
    scenarios = {
        LINK: Scenario(LINK, tuple(options.rtt_ms), is_hard=False),
        TEXT: Scenario(TEXT, (options.steady_rtt_ms,) * NUM_PHASES, is_hard=True),
    }
    chosen = [scenarios[name] for name in dict.fromkeys(options.scenarios)]
    settings, requests = settings_of(options), make_requests(options)
    console = Console(width=None if sys.stdout.isatty() else 150)
    with open_subject(options) as subject, Progress(console=console, transient=True, refresh_per_second=1) as progress:
        task = progress.add_task("texts", total=len(chosen) * len(settings) * len(requests))
        every = asyncio.run(
            measure(subject, chosen, settings, requests, options.acceptance, lambda: progress.advance(task))
        )
    for found in every:
        show(console, found)
    missed = [miss for found in every for miss in misses(found, options.acceptance)]
    for miss in missed:
        console.print(miss, style="red", highlight=False)
    facts = {"emulated": None if options.real else options.emulate, "widen_mb": options.widen}
    facts |= {"temperature": options.temperature, "phase_tokens": options.phase_tokens}
    write_json(options.json, {**facts, "misses": missed, "scenarios": [as_json(found) for found in every]})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
