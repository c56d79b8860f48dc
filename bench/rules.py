"""Compares the acceptance rules by round trip: coupled noise beside rejection beside tolerance.

Cloud and agent have a core and a thread each; the target is widened, which changes no logit. Every rule writes the same
prompts with the same seeds; the order is reversed from one prompt to the next. Rejection and tolerance go block by
block, as published: compare them with stop-and-wait's coupled noise.

  cloud-only         no drafts: the target's text, and the yardstick of speed
  tree               coupled noise, a tree of guesses: the default
  path               coupled noise, one path
  blocks             coupled noise, stop-and-wait
  rejection          blocks, each token drawn from its distribution of 8 ids, which is sent
  tolerance          blocks with log q; accepts while log p >= log q - delta (--delta)
  tolerance at 0.70  delta calibrated to that acceptance (--acceptance)

Tables: tokens/s over cloud-only's, medians of the runs; acceptance (accepted over tested drafted tokens); bytes of
bodies per token, less what cloud-only takes to open the session. Quality, over all texts of a rule: perplexity under
the target at temperature 1 (of cloud-only's own texts first), the share of texts equal to the target's, and the share
of each text before its first other token. Rejection writes other texts than coupled noise does, as likely ones: its
perplexity is the target's, its texts are not.

Exits 1 when a text by coupled noise differs from cloud-only's.

    python -m bench.rules [--widen 1450] [--rtt-ms 0 25 50] [--prompts 3] [--runs 3] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.round_trips import Cell
from rich.console import Console

from outrider.edge.lab.laboratory import ALIKE, CLOUD_ONLY, Lab, connected, interleave, open_lab
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent, make_agent, make_options
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.results import GenerationRequest, Mode
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.reference_export import export_reference_pair
from outrider.models.picks.acceptance import PLAIN_TERMS, Rule, RuleTerms, log_probability
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceSlice
from outrider.reference import load_prompts

COUPLED: Final = ("tree", "path", "blocks")
SERVER: Final = (*ALIKE, "--no-lookup", "--allow-tolerance")


def acceptance_of(cell: Cell) -> float | None:
    """Accepted over tested drafted tokens; None where nothing was drafted."""
    return cell.acceptance if any(text.num_tested for text in cell.texts) else None


def bytes_up(cell: Cell, alone: Cell) -> float:
    """Of drafts, per token."""
    return max(0.0, cell.traffic["bytes_up"] - alone.traffic["bytes_up"])


def as_json(cell: Cell, alone: Cell) -> dict[str, Any]:
    """A rule at one round trip as plain data."""
    return {
        "speed": cell.ratio,
        "ratios": cell.ratios,
        "acceptance": acceptance_of(cell),
        "passes_per_token": cell.passes_per_token,
        "bytes_up_per_token": bytes_up(cell, alone),
    }


@dataclass(frozen=True, slots=True)
class Quality:
    """How far the texts of a rule are from the target's."""

    perplexity: float
    num_equal: int
    num_texts: int
    shared: float


def terms_of(options: argparse.Namespace) -> dict[str, RuleTerms]:
    """The rules that need evidence, by the table's names."""
    return {
        "rejection": RuleTerms(Rule.REJECTION),
        f"tolerance {options.delta:g}": RuleTerms(Rule.TOLERANCE, delta=options.delta),
        f"tolerance at {options.acceptance:.2f}": RuleTerms(Rule.TOLERANCE, acceptance=options.acceptance),
    }


def agents_of(options: argparse.Namespace, endpoints: Endpoints, lab: Lab) -> dict[str, Agent]:
    """An agent for each row, with estimates of its own."""
    tree, path = make_options(is_looked_up=False), make_options("1", is_looked_up=False)
    agents = {CLOUD_ONLY: make_agent(Mode.CLOUD_ONLY, endpoints, None)}
    for name, each in (("tree", tree), ("path", path)):
        agents[name] = make_agent(Mode.STREAM, endpoints, lab.drafter, options=each)
    for name, terms in ({"blocks": PLAIN_TERMS} | terms_of(options)).items():
        agents[name] = make_agent(Mode.STOP_AND_WAIT, endpoints, lab.drafter, options=AgentOptions(terms=terms))
    return agents


async def measure(options: argparse.Namespace, lab: Lab, requests: Sequence[GenerationRequest]) -> dict[float, Any]:
    """Cells by round trip and rule. The first run warms up and calibrates."""
    found: dict[float, dict[str, Cell]] = {}
    for rtt_ms in options.rtt_ms:
        async with AsyncExitStack() as stack:
            endpoints = await stack.enter_async_context(connected(lab.url, lab.cores, rtt_ms))
            agents = agents_of(options, endpoints, lab)
            cells = found.setdefault(rtt_ms, {name: Cell() for name in agents})
            await interleave(agents, requests)
            for _ in range(options.runs):
                results = await interleave(agents, requests)
                alone = median(text.tokens_per_s for text in results[CLOUD_ONLY])
                for name, texts in results.items():
                    cells[name].texts += texts
                    cells[name].ratios.append(median(text.tokens_per_s for text in texts) / alone)
    return found


def nats_of(target: BatchRuntime, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Sum of -log p of the text's tokens under the target, temperature 1."""
    tokens = [*prompt, *text[:-1]]
    blocks = range(-(-len(tokens) // target.block_size))
    rows = target.forward([SequenceSlice(tokens, 0, list(blocks), len(text))])
    params = SamplingParams(temperature=1.0)
    return -sum(log_probability(row, params, token) for row, token in zip(rows, text, strict=True))


def shared_part(text: Sequence[int], truth: Sequence[int]) -> float:
    """The share of a text before its first other token."""
    same = next((i for i, (a, b) in enumerate(zip(text, truth, strict=False)) if a != b), len(truth))
    return same / len(truth)


def judge(
    target: BatchRuntime, requests: Sequence[GenerationRequest], cells: Sequence[Mapping[str, Cell]]
) -> dict[str, Quality]:
    """The quality of each rule's texts, over all round trips."""
    truth = [text.tokens for text in cells[0][CLOUD_ONLY].texts[: len(requests)]]
    found: dict[str, Quality] = {}
    for name in cells[0]:
        texts = [(i % len(requests), text.tokens) for each in cells for i, text in enumerate(each[name].texts)]
        nats = sum(nats_of(target, requests[index].prompt, tokens) for index, tokens in texts)
        shares = [shared_part(tokens, truth[index]) for index, tokens in texts]
        perplexity = math.exp(nats / sum(len(tokens) for _, tokens in texts))
        found[name] = Quality(perplexity, shares.count(1.0), len(texts), sum(shares) / len(texts))
    return found


def show(console: Console, found: Mapping[float, Mapping[str, Cell]], quality: Mapping[str, Quality]) -> None:
    """Prints the tables."""
    names = ("RTT ms", "rule", "speed (lowest run)", "acceptance", "passes/token", "B up/token")
    table = figures_table("tokens/s over cloud-only's, by round trip", *names, left=("rule",))
    for rtt_ms, cells in found.items():
        for name, cell in cells.items():
            accepted = acceptance_of(cell)
            table.add_row(
                f"{rtt_ms:g}",
                name,
                f"{cell.ratio:.2f}x ({min(cell.ratios):.2f})",
                "-" if accepted is None else f"{accepted:.3f}",
                f"{cell.passes_per_token:.3f}",
                f"{bytes_up(cell, cells[CLOUD_ONLY]):.0f}",
            )
    console.print(table)
    table = figures_table("quality", "rule", "perplexity", "texts equal", "shared beginning", left=("rule",))
    for name, each in quality.items():
        table.add_row(name, f"{each.perplexity:.3f}", f"{each.num_equal}/{each.num_texts}", f"{each.shared:.2f}")
    console.print(table)


def main() -> int:
    """Runs the comparison."""
    options = parser(
        __doc__,
        {
            "--widen": option(1450.0, "MB of the widened FP32 target; 0: as it is"),
            "--rtt-ms": option([0.0, 25.0, 50.0]),
            "--prompts": option(3, "texts of a run"),
            "--max-tokens": option(100),
            "--temperature": option(0.8),
            "--runs": option(3, "after one that warms up"),
            "--delta": option(0.5),
            "--acceptance": option(0.7),
            **TO_JSON,
        },
    ).parse_args()
    console = Console()
    pair = export_reference_pair(widen_mb=options.widen)
    same = Bundle.open(export_reference_pair(widen_mb=0.0).target)  # the same function, sooner
    with open_lab(pair.target, pair.draft, cloud_options=SERVER) as lab:
        requests = [
            GenerationRequest(
                prompt=lab.encode(prompt.text),
                params=SamplingParams(temperature=options.temperature, seed=seed),
                max_tokens=options.max_tokens,
                stop_ids=frozenset(),
                ignore_eos=True,
            )
            for seed, prompt in enumerate(load_prompts(options.prompts))
        ]
        found = asyncio.run(measure(options, lab, requests))
    target = open_batch_runtime(same.manifest.runtime, same.model_file, RuntimeOptions(num_threads=1))
    try:
        quality = judge(target, requests, list(found.values()))
    finally:
        target.close()
    show(console, found, quality)
    document = {
        "rules": {
            f"{rtt_ms:g}": {name: as_json(cell, cells[CLOUD_ONLY]) for name, cell in cells.items()}
            for rtt_ms, cells in found.items()
        },
        "quality": {name: asdict(each) for name, each in quality.items()},
    }
    missed = [
        f"texts by coupled noise ({name}) differ from cloud-only's; run bench.invariant"
        for name in COUPLED
        if quality[name].num_equal < quality[name].num_texts
    ]
    return verdict(console, missed, options.json, document)


if __name__ == "__main__":
    sys.exit(main())
