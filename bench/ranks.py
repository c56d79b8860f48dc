"""Measures where a target's picks stand among a draft's guesses, and what the gaps between these say beforehand.

    python -m bench.ranks [--draft DIR] [--target DIR] [--out bench/data]

The target continues held-out prompts; the draft reads the text and ranks its guesses by their noisy scores, with the
same noise. Writes ranks_0.8.json and ranks_0.0.json: per text, per token [rank of the target's pick (99: none of the
first 16), [gap of the best score to the 2nd .. 8th]]. `bench.simulate_trees` and the tests of the tree simulation read
these files; make them again when the draft changes. Prints per temperature: the share of picks at each rank, acceptance
by gap, and how well the gap predicts acceptance compared with the softmax probability of the pick (AUC; log loss of a
predictor calibrated on the other half of the texts).

DIR: a Hugging Face directory; left out, the reference pair's. Both are exported in FP32 and run in our runtimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from bench.rank_files import write_ranks
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider.export.check.acceptance import Continuation, continue_prompts, read_along
from outrider.export.check.runner import model_file, open_draft, open_target
from outrider.export.make.pair import PairPaths, reference_directories
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.recipes import ExportOptions
from outrider.export.report.simulation.ranks import EDGES, MOST_GUESSES, Picked, Ranks, bucket
from outrider.models.bundle.bundle import Bundle
from outrider.models.picks.sampling import candidates
from outrider.models.runtimes.base import SequenceRuntime
from outrider.reference import load_prompts

DATA: Final = Path(__file__).parent / "data"
TEMPERATURES: Final = (0.8, 0.0)
GUESSES: Final = 16
LONGEST_PROMPT: Final = 150
NUM_BINS: Final = 10
console = Console()


@dataclass(frozen=True, slots=True)
class Measured:
    """Ranks at one temperature. probabilities: per text and token, the softmax probability of the draft's own pick."""

    ranks: Ranks
    probabilities: tuple[tuple[float, ...], ...]


def measure(draft: SequenceRuntime, texts: Sequence[Continuation], num_ids: int) -> Measured:
    """Ranks and probabilities along texts of one temperature."""
    rows, probabilities = [], []
    for text in texts:
        picked, sure = [], []
        for position, token, logits in read_along(draft, text, num_ids):
            guesses = candidates(logits, text.params, position, GUESSES)
            picked.append(Picked.among(guesses, token))
            weights = np.exp((logits.astype(np.float64) - logits.max()) / (text.params.temperature or 1.0))
            sure.append(float(weights[guesses.tokens[0]] / weights.sum()))
        rows.append(tuple(picked))
        probabilities.append(tuple(sure))
    return Measured(Ranks(tuple(rows)), tuple(probabilities))


def auc(scores: NDArray[np.float64], hits: NDArray[np.bool_]) -> float:
    """How often a hit has a higher score than a miss; ties count half. [positions] each; both outcomes must occur."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = (np.cumsum(counts) - (counts - 1) / 2)[places]  # ranks from 1, ties at their mean
    num_hits = int(hits.sum())
    num_pairs = num_hits * (hits.size - num_hits)
    return float((middle[hits].sum() - num_hits * (num_hits + 1) / 2) / num_pairs)


def log_loss(scores: NDArray[np.float64], hits: NDArray[np.bool_], halves: NDArray[np.int64]) -> float:
    """Mean log loss in nats of the share of hits per bin of scores; bins and shares are those of the other half."""
    total = 0.0
    for half in (0, 1):
        known, tested = halves != half, halves == half
        edges = np.quantile(scores[known], np.linspace(0, 1, NUM_BINS + 1)[1:-1])
        bins = np.searchsorted(edges, scores[known], side="right")
        seen = np.bincount(bins, minlength=NUM_BINS)
        shares = (np.bincount(bins, hits[known], NUM_BINS) + 0.5) / (seen + 1.0)
        found = shares[np.searchsorted(edges, scores[tested], side="right")]
        total -= float(np.log(np.where(hits[tested], found, 1.0 - found)).sum())
    return total / hits.size


def show(temperature: float, measured: Measured) -> None:
    """Prints the tables of one temperature."""
    ranks = measured.ranks
    within = ", ".join(f"{width}: {ranks.hits(width):.3f}" for width in (1, 2, 3, 4, 8))
    title = f"T {temperature:g}, {len(ranks.picked)} tokens; the target's pick is among the draft's best {within}"
    table = Table(title=title, title_justify="left")
    for name in ("gap", "share of tokens", *(f"rank {guess}" for guess in range(4))):
        table.add_column(name, justify="right")
    gaps = np.array([bucket(token.gap(0)) for token in ranks.picked])
    found = np.array([token.rank for token in ranks.picked])
    names = [f"{low:g} to {high:g}" for low, high in zip((0.0, *EDGES), EDGES, strict=False)] + [f"over {EDGES[-1]:g}"]
    for place, name in enumerate(names):
        inside = found[gaps == place]
        shares = [f"{(inside == guess).mean():.3f}" if inside.size else "-" for guess in range(4)]
        table.add_row(name, f"{inside.size / found.size:.3f}", *shares)
    console.print(table)
    by_rank = ", ".join(f"{(found == guess).mean():.3f}" for guess in range(MOST_GUESSES))
    console.print(f"  share of picks at rank 0 to {MOST_GUESSES - 1}: {by_rank}")
    halves = np.array([index % 2 for index, text in enumerate(ranks.texts) for _ in text])
    hits = found == 0
    if not 0 < hits.sum() < hits.size:
        return
    by_gap = np.array([token.gap(0) for token in ranks.picked])
    by_softmax = np.array([one for text in measured.probabilities for one in text])
    for name, scores in (("gap", by_gap), ("softmax probability", by_softmax)):
        console.print(
            f"  {name} as a predictor of acceptance: AUC {auc(scores, hits):.3f}, "
            f"log loss {log_loss(scores, hits, halves):.3f}"
        )


def main(
    draft: Annotated[Path | None, typer.Option(help="The draft's Hugging Face directory.")] = None,
    target: Annotated[Path | None, typer.Option(help="The target's Hugging Face directory.")] = None,
    out: Annotated[Path, typer.Option(help="Where the files go.")] = DATA,
    texts: Annotated[int, typer.Option(min=1)] = 24,
    tokens: Annotated[int, typer.Option(min=1, help="Per text.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="Prompts to leave out: the exporter judges with the first.")] = 200,
) -> None:
    """Measures, prints and writes."""
    own = reference_directories()
    source = PairPaths(draft or own.draft, target or own.target)
    pair = export_reference_pair(
        source=source, draft=ExportOptions("draft", "fp32"), progress=lambda event: console.print(str(event))
    )
    tokenizer = Bundle.open(pair.target).tokenizer()
    prompts = [tokenizer.encode(prompt.text)[-LONGEST_PROMPT:] for prompt in load_prompts(first + texts)[first:]]
    options = ExportOptions("target", "fp32")
    with closing(open_target(model_file(pair.target, options), options)) as runtime:
        written = continue_prompts(
            runtime, prompts, TEMPERATURES, num_ids=tokenizer.size, stop_ids=(), num_tokens=tokens
        )
    options = ExportOptions("draft", "fp32")
    out.mkdir(parents=True, exist_ok=True)
    with closing(open_draft(model_file(pair.draft, options), options)) as runtime:
        for temperature in TEMPERATURES:
            chosen = [text for text in written if text.params.temperature == temperature]
            measured = measure(runtime, chosen, tokenizer.size)
            write_ranks(measured.ranks, out / f"ranks_{temperature}.json")
            show(temperature, measured)


if __name__ == "__main__":
    typer.run(main)
