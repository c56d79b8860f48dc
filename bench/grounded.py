"""Measures what documents are worth as a source of drafts, on texts that quote them.

The target first writes each text alone. Passages of it, every other `--span` tokens, become a document, as text that is
tokenized again; so half of each answer is a quotation, and where it begins and ends is not known. Then the same texts
are generated with the same seeds, in turn, by each of

  model          the draft model and prompt lookup, as without documents
  model + docs   the same, and the documents
  lookup         prompt lookup alone, as `--runtime ngram` without documents
  lookup + docs  the same, and the documents

The prompts have no passages, so prompts and texts are the same in every mode. The verifier makes no guesses of its own.
Exits 1 where a text differs, or documents take more than 3 % of the speed.

    python -m bench.grounded [--widen 1450] [--runs 3] [--rtt-ms 10 50] [--span 24] [--json PATH]

The pair, real or emulated, is chosen as in `bench.never_slower`; an emulated text's tokens spell no words, so there the
document has the tokens themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from bench.pairs import add_options, make_requests, open_pair
from bench.report import write_json
from bench.round_trips import Subject
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.edge.drafting.calibration import QUOTE_RANK
from outrider.edge.drafting.drafter import Drafter, NgramDrafter
from outrider.edge.lab.laboratory import CLOUD_ONLY, connected, interleave
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent, make_agent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, OnTokens
from outrider.models.runtimes.ngram import QuotedText
from outrider.models.text.tokenizer import Tokenizer
from outrider.reference import target_dir

LEAST: Final = 0.97
"""Of the speed without documents."""
PAIRS: Final = {"model + docs": "model", "lookup + docs": "lookup"}
MODES: Final = ("model", "model + docs", "lookup", "lookup + docs")


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one round trip: medians over runs. quoted: tokens of the text that a document had guessed."""

    rtt_ms: float
    mode: str
    tokens_per_s: float
    speed_up: float
    acceptance: float
    tokens_per_pass: float
    quoted: float
    num_different: int


class Quoting:
    """Generates each text with its own document."""

    def __init__(self, endpoints: Endpoints, drafter: Drafter, quoted: dict[tuple[int, ...], QuotedText]) -> None:
        self._endpoints = endpoints
        self._drafter = drafter
        self._quoted = quoted

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> GenerationResult:
        """As `Agent`."""
        quoted = [self._quoted[request.prompt]] if request.prompt in self._quoted else []
        agent = make_agent(Mode.STREAM, self._endpoints, self._drafter, quoted=quoted)
        return await agent.generate(request, on_tokens)


def make_document(tokens: Sequence[int], span: int, tokenizer: Tokenizer | None) -> QuotedText:
    """Every other span of a text, as a document. tokenizer: None takes the tokens as they are."""
    spans = [list(tokens[start : start + span]) for start in range(0, len(tokens), 2 * span)]
    if tokenizer is None:
        return QuotedText([token for each in spans for token in each])
    text = "\n\n".join(tokenizer.decode(each) for each in spans)
    return QuotedText(tokenizer.encode(text, add_special_tokens=False))


async def measure(
    subject: Subject,
    rtts_ms: Sequence[float],
    requests: Sequence[GenerationRequest],
    span: int,
    tokenizer: Tokenizer | None,
    runs: int,
    on_run: Callable[[], None],
) -> list[Row]:
    """All round trips."""
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(connected(subject.url, subject.cores))
        alone = make_agent(Mode.CLOUD_ONLY, near, None)
        texts = {request.prompt: (await alone.generate(request)).tokens for request in requests}
    documents = {prompt: make_document(tokens, span, tokenizer) for prompt, tokens in texts.items()}
    rows: list[Row] = []
    for rtt_ms in rtts_ms:
        async with connected(subject.url, subject.cores, rtt_ms) as endpoints:
            agents: dict[str, Agent] = {
                CLOUD_ONLY: make_agent(Mode.CLOUD_ONLY, endpoints, None),
                "model": Quoting(endpoints, subject.drafter, {}),
                "model + docs": Quoting(endpoints, subject.drafter, documents),
                "lookup": Quoting(endpoints, NgramDrafter(), {}),
                "lookup + docs": Quoting(endpoints, NgramDrafter(), documents),
            }
            results: dict[str, list[GenerationResult]] = {name: [] for name in agents}
            for _ in range(runs):
                for name, found in (await interleave(agents, requests)).items():
                    results[name] += found
                on_run()
        rows += [summarize(rtt_ms, name, results, requests, texts) for name in MODES]
    return rows


def summarize(
    rtt_ms: float,
    name: str,
    results: dict[str, list[GenerationResult]],
    requests: Sequence[GenerationRequest],
    texts: dict[tuple[int, ...], tuple[int, ...]],
) -> Row:
    """One mode's figures."""
    own, alone = results[name], results[CLOUD_ONLY]
    ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(own, alone, strict=True)]
    num_tested = sum(each.num_tested for each in own)
    return Row(
        rtt_ms,
        name,
        median(each.tokens_per_s for each in own),
        median(ratios),
        sum(each.num_accepted for each in own) / max(1, num_tested),
        median(each.tokens_per_pass for each in own),
        sum(each.hits.get(QUOTE_RANK, 0) for each in own) / sum(len(each.tokens) for each in own),
        sum(each.tokens != texts[requests[index % len(requests)].prompt] for index, each in enumerate(own)),
    )


def misses(rows: Sequence[Row]) -> list[str]:
    """What a bound says against these figures."""
    found = [
        f"RTT {row.rtt_ms:g} ms, {row.mode}: {row.num_different} texts differ" for row in rows if row.num_different
    ]
    speeds = {(row.rtt_ms, row.mode): row.speed_up for row in rows}
    for (rtt_ms, mode), speed_up in speeds.items():
        if mode in PAIRS and speed_up < LEAST * speeds[rtt_ms, PAIRS[mode]]:
            found.append(
                f"RTT {rtt_ms:g} ms, {mode}: {speed_up:.2f}x; without documents {speeds[rtt_ms, PAIRS[mode]]:.2f}x"
            )
    return found


def show(console: Console, rows: Sequence[Row]) -> None:
    """One line per round trip and mode."""
    table = Table(title="documents as a source of drafts", title_justify="left", box=None)
    for name in ("RTT ms", "drafts", "tokens/s", "over cloud-only", "accepted", "tokens/pass", "from documents"):
        table.add_column(name, justify="left" if name == "drafts" else "right")
    for row in rows:
        table.add_row(
            f"{row.rtt_ms:g}",
            row.mode,
            f"{row.tokens_per_s:.1f}",
            f"{row.speed_up:.2f}x",
            f"{row.acceptance:.2f}",
            f"{row.tokens_per_pass:.2f}",
            f"{row.quoted:.2f}",
        )
    console.print(table)


def main() -> int:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(cli)
    cli.add_argument("--rtt-ms", type=float, nargs="+", default=[10.0, 50.0])
    cli.add_argument("--span", type=int, default=24, help="tokens of a quotation, and of what stands between two")
    cli.add_argument("--runs", type=int, default=3)
    cli.add_argument("--json", type=Path)
    o = cli.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    tokenizer = None if o.emulate else Tokenizer.from_dir(target_dir())
    requests = make_requests(o)
    with open_pair(o, beside=False, lookup=False) as subject, Progress(console=console, transient=True) as progress:
        task = progress.add_task("runs", total=o.runs * len(o.rtt_ms))
        rows = asyncio.run(
            measure(subject, o.rtt_ms, requests, o.span, tokenizer, o.runs, lambda: progress.advance(task))
        )
    show(console, rows)
    found = misses(rows)
    for miss in found:
        console.print(miss, style="red", highlight=False)
    about = {"widen_mb": o.widen, "emulated": o.emulate, "temperature": o.temperature, "span": o.span}
    write_json(o.json, {**about, "misses": found, "rows": [asdict(row) for row in rows]})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
