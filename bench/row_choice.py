"""Times the way from logits to picks, on CUDA where it is there, without a model: what requests ask for, over plain.

A step of 32 requests with two rows each of 152,000 ids, and one of 160 rows with top-p. The rows are as a language
model's: the log-probability falls with the rank's logarithm, in a third of them slowly (a flat row), in a third fast.
All kinds take turns in one run. Columns: medians in ms, of what is prepared before the logits are there (on a GPU the
model runs then) and of what follows, up to the picks on the host; and the sum over plain's.

  plain            temperature 0.8
  greedy           temperature 0
  top-p            temperature 0.8, top-p 0.9
  json             plain, half of the rows within a string, half between the tokens of the structure. The masks are made
                   beforehand: what a grammar's matcher takes is not in it
  every processor  each at its bound: 1,024 biases, 256 bad words of 32 tokens, 8,192 allowed ids, penalties over a text
                   of 1,024 tokens, typical-p, XTC; top-k, top-p and min-p
  logprobs         plain, with the 20 likeliest tokens

    python -m bench.row_choice [--threads 2] [--runs 15] [--json PATH]

Exits 1 where json, every processor or logprobs take more than 1.5 times plain.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Final

import numpy as np
import torch
from bench.report import TO_JSON, figures_table, option, parser, verdict
from rich.console import Console
from tests.pick_twins import zipf

from outrider.cloud.vllm.terms import Terms
from outrider.cloud.vllm.worker_choosers import Asked, RequestChoosers, WorkerChoices, WorkerGrammars
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.processor_plan import NO_PLAN
from outrider.models.processors.text_rows import TextPath, TextRows
from outrider.models.wire.fields import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_TOP_LOGPROBS,
)
from outrider.reference import target_dir

NUM_IDS: Final = 152_000
NUM_REQUESTS: Final = 32
ROWS_EACH: Final = 2
MANY_ROWS: Final = 160
TEXT: Final = 1024
DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_OVER_PLAIN: Final = 1.5
EXPONENTS: Final = (1.2, 1.6, 2.5)
"""Of the rows, in turns: how steep they fall."""
BOUNDED: Final = ("json", "every processor", "logprobs")
PLAIN: Final = SamplingParams(0.8)
TOP_P: Final = SamplingParams(0.8, top_p=0.9)
MANY: Final = {"160 rows, plain": PLAIN, "160 rows, top-p": TOP_P}


@dataclass(frozen=True, slots=True)
class Kind:
    """What all requests of a step ask for. prepare: everything that does not need the logits."""

    name: str
    num_rows: int
    prepare: Callable[[], WorkerChoices]


def asked_for(terms: Terms, num_requests: int = NUM_REQUESTS, rows_each: int = ROWS_EACH) -> list[Asked]:
    """The same of each request, with a seed of its own."""
    prompt = list(range(5000, 5000 + TEXT))
    return [
        Asked(str(index), replace(terms, params=replace(terms.params, seed=index)), TEXT, [7] * (rows_each - 1), prompt)
        for index in range(num_requests)
    ]


def every_processor() -> Terms:
    """Each at its bound."""
    rng = np.random.default_rng(0)
    allowed = rng.choice(NUM_IDS, MAX_ALLOWED_IDS, replace=False).tolist()
    words = rng.integers(0, NUM_IDS, (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)).tolist()
    options = ProcessorOptions(
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias=tuple((token, 1.0) for token in allowed[:MAX_BIASES]),
        bad_words=tuple(map(tuple, words)),
        min_tokens=1 << 16,
        allowed_ids=tuple(allowed),
        typical_p=0.95,
        xtc_probability=1.0,
    )
    params = SamplingParams(0.8, top_k=1000, top_p=0.95, min_p=0.001)
    return Terms(0, params, 1, processors=options, num_generated=TEXT, stop_ids=frozenset({3}))


def masked_paths(asked: Sequence[Asked]) -> dict[int, TextPath]:
    """As a grammar of JSON masks rows: nearly all ids within a string, few elsewhere."""
    rng = np.random.default_rng(1)
    paths = {}
    for index, each in enumerate(asked):
        path = TextRows(NO_PLAN, (), NUM_IDS).walk(each.drafted)
        share = (0.95, 0.002)[index % 2]
        path.rows = {
            place: replace(row, mask=np.packbits(rng.random(NUM_IDS) < share, bitorder="little"))
            for place, row in path.rows.items()
        }
        paths[index] = path
    return paths


def kinds(choosers: RequestChoosers) -> list[Kind]:
    """All of them."""

    def prepared(asked: Sequence[Asked]) -> Callable[[], WorkerChoices]:
        def prepare() -> WorkerChoices:
            choosers.steps.clear()
            return choosers.prepare(asked, NUM_IDS, DEVICE)

        return prepare

    few = NUM_REQUESTS * ROWS_EACH
    masked = asked_for(Terms(0, PLAIN, 1))
    paths = masked_paths(masked)
    return [
        Kind("plain", few, prepared(asked_for(Terms(0, PLAIN, 1)))),
        Kind("greedy", few, prepared(asked_for(Terms(0, SamplingParams(), 1)))),
        Kind("top-p", few, prepared(asked_for(Terms(0, TOP_P, 1)))),
        Kind("json", few, lambda: WorkerChoices(masked, paths, NUM_IDS, DEVICE)),
        Kind("every processor", few, prepared(asked_for(every_processor()))),
        Kind("logprobs", few, prepared(asked_for(Terms(0, PLAIN, 1, num_logprobs=MAX_TOP_LOGPROBS)))),
        *(Kind(name, MANY_ROWS, prepared(asked_for(Terms(0, own, 1), MANY_ROWS, 1))) for name, own in MANY.items()),
    ]


@dataclass(slots=True)
class Times:
    """Of one kind, in seconds."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def all_s(self) -> float:
        """The median of both parts together."""
        return median(a + b for a, b in zip(self.before, self.after, strict=True))


def measure(every: Sequence[Kind], logits: torch.Tensor, num_runs: int) -> dict[str, Times]:
    """All kinds in turns, after a turn that does not count."""
    found = {kind.name: Times() for kind in every}
    scratch = torch.empty_like(logits)
    for run in range(num_runs + 1):
        for kind in every:
            rows = scratch[: kind.num_rows].copy_(logits[: kind.num_rows])
            rows[0, 0].item()  # a GPU has copied them by now
            began_s = time.perf_counter()
            step = kind.prepare()
            prepared_s = time.perf_counter()
            step.picks(rows).tolist()
            picked_s = time.perf_counter()
            if run:
                found[kind.name].before.append(prepared_s - began_s)
                found[kind.name].after.append(picked_s - prepared_s)
    return found


def main() -> int:
    """The command."""
    given = parser(
        __doc__,
        {
            "--threads": option(torch.get_num_threads(), "torch's"),
            "--runs": option(15, "turns that count"),
            **TO_JSON,
        },
    ).parse_args()
    torch.set_num_threads(given.threads)
    console, rng, num = Console(), np.random.default_rng(0), len(EXPONENTS)
    rows = np.empty((MANY_ROWS, NUM_IDS), np.float32)
    for place, exponent in enumerate(EXPONENTS):
        rows[place::num] = zipf(rng, len(rows[place::num]), NUM_IDS, exponent)
    with closing(WorkerGrammars(str(target_dir()), NUM_IDS)) as grammars:
        found = measure(kinds(RequestChoosers(grammars)), torch.from_numpy(rows).to(DEVICE), given.runs)
    table = figures_table(
        f"From logits to picks, ms: {NUM_IDS} ids, {DEVICE}, {given.threads} threads",
        *("kind", "before logits", "after", "over plain"),
        left=("kind",),
    )
    over = {name: times.all_s / found["plain"].all_s for name, times in found.items() if name not in MANY}
    for name, times in found.items():
        parts = (f"{1e3 * median(each):.2f}" for each in (times.before, times.after))
        table.add_row(name, *parts, f"{over[name]:.2f}" if name in over else "")
    console.print(table)
    missed = [
        f"{name} takes {over[name]:.2f} times plain; expected at most {MAX_OVER_PLAIN}"
        for name in BOUNDED
        if over[name] > MAX_OVER_PLAIN
    ]
    document = {
        "device": str(DEVICE),
        "threads": given.threads,
        "runs": given.runs,
        "times_s": {name: asdict(times) for name, times in found.items()},
    }
    return verdict(console, missed, given.json, document)


if __name__ == "__main__":
    sys.exit(main())
