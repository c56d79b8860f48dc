"""Measures how many more clients a verifier serves when their drafts come from devices: 1 + gamma t_d / t_v.

That is the claim of arXiv 2606.25091: with the draft beside the target a round of gamma drafted tokens costs the server
gamma t_d + t_v, with drafts from devices t_v. Both are measured on one core with one thread, at saturation, one
sequence per step, with the same texts, the same paths of gamma tokens and the same sampling:

  beside    both models in one process, in turn, no HTTP (`bench.beside`)
  devices   `outrider-cloud serve --max-running 1`, and clients that always have the next block ready for /v1/verify;
            their drafts were made beforehand (`bench.load_devices`), as devices would make them elsewhere

Clients at a fixed rate are tokens/s over that rate, so their ratio is that of the tokens/s. t_d and t_v are the times
beside. The difference between measured and computed is what engine and HTTP cost. `batched` is the second with all
clients in each step, which a verifier does: not part of the claim.

    python -m bench.capacity [--widen 1200] [--widen-draft 400] [--gamma 4] [--runs 3] [--json PATH]

The reference draft takes 0.3 ms of a step's 70, so it is widened, too. Exits 1 where a text differs, or measured is
under 0.9 of computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from bench.bare_http import Wire
from bench.beside import RealPair, Stop, Written, open_beside
from bench.emulated import open_draft
from bench.load import Figures, make_orders
from bench.load_devices import Recorded, Session, body_of
from bench.pairs import BUNDLE_OPTIONS, pair_of
from bench.processes import Remote
from bench.report import TO_JSON, option, parser, verdict
from bench.round_trips import rate_of
from rich.console import Console
from rich.table import Table

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.edge.lab.laboratory import ALONE, cloud_process
from outrider.edge.results import GenerationRequest
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.export.source.widen import widen
from outrider.reference import draft_dir

LEAST_SHARE: Final = 0.9
BESIDE, DEVICES, BATCHED = "beside", "devices", "batched"


@dataclass(frozen=True, slots=True)
class Costs:
    """Server time beside: of a drafted token, and of a round's verification, in seconds; gamma as it came out."""

    draft_s: float
    verify_s: float
    gamma: float

    @classmethod
    def of(cls, texts: Sequence[Written]) -> Costs:
        """Of all rounds but each text's first, which reads the prompt and drafts nothing."""
        num_rounds = sum(text.num_passes - 1 for text in texts)
        num_drafted = sum(text.num_drafted for text in texts)
        draft_s = sum(text.draft_s for text in texts)
        total_s = sum(text.arrival_s[-1] - text.arrival_s[0] for text in texts)
        return cls(draft_s / num_drafted, (total_s - draft_s) / num_rounds, num_drafted / num_rounds)

    @property
    def gain(self) -> float:
        """1 + gamma t_d / t_v."""
        return 1.0 + self.gamma * self.draft_s / self.verify_s


def block(recorded: Recorded, num_known: int, gamma: int) -> list[int]:
    """The draft's path of `gamma` tokens."""
    path: list[int] = []
    while len(path) < gamma and (guesses := recorded.guess(num_known, path)):
        path.append(guesses[0].token)
    return path


async def verify_all(
    url: str, orders: Sequence[GenerationRequest], drafts: Sequence[Recorded], gamma: int
) -> list[Session]:
    """All texts at once, each block after block."""
    return list(await asyncio.gather(*(_verify(url, o, d, gamma) for o, d in zip(orders, drafts, strict=True))))


async def _verify(url: str, order: GenerationRequest, drafts: Recorded, gamma: int) -> Session:
    text, known, prefix_hash = Session(), list[int](), None
    async with Wire(url) as wire:
        while (left := order.max_tokens - len(known)) > 0:
            drafted = block(drafts, len(known), min(gamma, left - 1)) if known else []
            item = {**body_of(order), "max_tokens": left, "draft": drafted}
            del item["prompt"]
            item |= {"prefix_hash": prefix_hash} if prefix_hash else {"prefix": [*order.prompt, *known]}
            await wire.post("/v1/verify", {"items": [item]})
            _, answer = await wire.answer()
            (result,) = json.loads(answer).get("results", [{"error": answer.decode()}])
            if result.get("error"):
                raise RuntimeError(f"/v1/verify refused an item: {result['error']}")
            text.commits.append((time.perf_counter(), tuple(result["tokens"])))
            known += result["tokens"]
            prefix_hash = result.get("prefix_hash")
    return text


@dataclass(frozen=True, slots=True)
class Subject:
    """Both ways to serve, and the draft for the recording."""

    beside: Remote
    one: str
    batched: str
    drafter: ModelDrafter


def widened_draft(megabytes: float, root: Path) -> Path:
    """The reference draft at this size in FP32, exported to INT8 below `root`; its bundle."""
    widen(draft_dir(), root / "source", megabytes)
    return export_model(root / "source", root / "bundle", ExportOptions("draft", "int8", "openvino")).path


@contextmanager
def open_subject(options: argparse.Namespace) -> Iterator[Subject]:
    """Everything that serves is on one core; this process stays on another."""
    cores, pair = plan_cores(options.cores), pair_of(options)
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        draft = widened_draft(options.widen_draft, place) if options.widen_draft else pair.draft
        beside = stack.enter_context(open_beside(RealPair(pair.target, draft), cores.cloud))
        one, all_at_once = (
            stack.enter_context(cloud_process(pair.target, cores.cloud, (*ALONE, "--max-running", str(count))))
            for count in (1, options.clients)
        )
        runtime, num_ids = open_draft(draft)
        stack.callback(runtime.close)
        stack.enter_context(running_on(cores.agent))
        drafter = ModelDrafter(runtime, num_ids)
        yield Subject(beside, one, all_at_once, drafter)


@dataclass(slots=True)
class Found:
    """Tokens/s of each run by way to serve, and what a round costs beside. recorded: the drafts along the texts."""

    rates: dict[str, list[float]]
    costs: list[Costs]
    num_different: int = 0
    recorded: list[Recorded] = field(default_factory=list)
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def over_beside(self, name: str) -> float:
        """Median of the runs' ratios."""
        return median(a / b for a, b in zip(self.rates[name], self.rates[BESIDE], strict=True))

    @property
    def computed(self) -> float:
        """Median of the runs' 1 + gamma t_d / t_v."""
        return median(costs.gain for costs in self.costs)

    @property
    def misses(self) -> list[str]:
        """The bounds that it misses, in words."""
        told = [f"{self.num_different} texts differ; run bench.invariant"] if self.num_different else []
        measured = self.over_beside(DEVICES)
        if measured < LEAST_SHARE * self.computed:
            told.append(
                f"devices serve {measured:.3f}x the clients, expected at least {LEAST_SHARE} of {self.computed:.3f}x"
            )
        return told


def measure(subject: Subject, orders: Sequence[GenerationRequest], gamma: int, num_runs: int) -> Found:
    """Each way in turn, after a run that warms up and records the drafts."""
    found = Found({BESIDE: [], DEVICES: [], BATCHED: []}, [])
    recorded = found.recorded
    for index in range(num_runs + 1):
        written = [subject.beside.generate(o.prompt, o.params, o.max_tokens, Stop(depth=gamma)) for o in orders]
        if not recorded:
            for order, text in zip(orders, written, strict=True):
                found.texts.append(text.tokens)
                recorded.append(Recorded(subject.drafter, order, text.tokens, 1))
                for num_known in range(1, len(text.tokens)):
                    block(recorded[-1], num_known, gamma)
        for name, url in ((DEVICES, subject.one), (BATCHED, subject.batched)):
            texts = asyncio.run(verify_all(url, orders, recorded, gamma))
            found.num_different += sum(a.text != b.tokens for a, b in zip(texts, written, strict=True))
            if index:
                found.rates[name].append(Figures.of(texts).tokens_per_s)
        if index:
            found.rates[BESIDE].append(rate_of([text.arrival_s for text in written]))
            found.costs.append(Costs.of(written))
    return found


def as_table(found: Found, client_rate: float) -> Table:
    """Medians of the runs."""
    table = Table("drafts", "tokens/s", f"clients at {client_rate:g} tokens/s", "over beside", title_justify="left")
    for name, rates in found.rates.items():
        rate = median(rates)
        table.add_row(name, f"{rate:.1f}", f"{rate / client_rate:.1f}", f"{found.over_beside(name):.3f}x")
    return table


def options_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    return parser(
        __doc__,
        {
            "--widen": option(1200.0, "MB of the widened FP32 target; 0: as it is"),
            "--widen-draft": option(400.0, "MB of the draft in FP32; 0: as it is"),
            **BUNDLE_OPTIONS,
            "--gamma": option(4, "drafted tokens of a round"),
            "--clients": option(4),
            "--client-rate": option(5.0, "tokens/s of one client"),
            "--runs": option(3),
            "--max-tokens": option(64),
            "--temperature": option(0.8),
            **TO_JSON,
        },
    ).parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(given)
    console = Console(width=100)
    orders = make_orders(options, options.clients)
    with open_subject(options) as subject:
        found = measure(subject, orders, options.gamma, options.runs)
    console.print(as_table(found, options.client_rate))
    costs = found.costs[-1]
    console.print(
        f"gamma {costs.gamma:.2f}, t_d {1e3 * costs.draft_s:.2f} ms, t_v {1e3 * costs.verify_s:.1f} ms: computed "
        f"{found.computed:.3f}x, measured {found.over_beside(DEVICES):.3f}x",
        highlight=False,
    )
    return verdict(
        console,
        found.misses,
        options.json,
        {
            "widen_mb": None if options.target else options.widen,
            "widen_draft_mb": options.widen_draft,
            "clients": options.clients,
            "tokens_per_s": found.rates,
            "costs": [asdict(costs) for costs in found.costs],
            "computed": found.computed,
            "measured": found.over_beside(DEVICES),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
