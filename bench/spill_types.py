"""Measures files of parked prefixes by type: their size, the time to round, the errors, and the text that follows.

Each prompt of the reference pair is repeated to `--tokens` and run by the reference target. Its full blocks are rounded
as `--spill-type` does it, written to a file, read, and put into other blocks, where the text goes on. Reported are the
largest error over its bound, the largest difference of the first logits, and the greedy tokens before the first
difference. Exact files must give equal logits.

    python -m bench.spill_types [--prompts 8] [--tokens 716] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from bench.report import option, parser
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider.cloud.engine.config import SpillType
from outrider.cloud.engine.spill_codec import BOUNDS
from outrider.cloud.engine.spill_file import SpillTarget, read_blocks, read_head, write
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle.bundle import Bundle
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, BlockRuntime, RuntimeOptions, SequenceSlice
from outrider.reference import load_prompts

_STEP = 256


@dataclass(slots=True)
class Sum:
    """Of the prefixes of one type."""

    num_bytes: int = 0
    num_beyond: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    of_bound: float = 0.0
    of_logits: float = 0.0
    equal: list[int] = field(default_factory=list)


def text(
    runtime: BatchRuntime, last: int, past: int, blocks: Sequence[int], count: int
) -> tuple[NDArray[np.float32], list[int]]:
    """The first logits, and the greedy tokens that follow."""
    tokens, first = [last], None
    while len(tokens) <= count:
        row = runtime.forward([SequenceSlice(tokens[-1:], past + len(tokens) - 1, blocks, 1)])[0].copy()
        first = row if first is None else first
        tokens.append(int(row.argmax()))
    assert first is not None
    return first, tokens[1:]


def over_bound(before: NDArray[np.uint8], after: NDArray[np.uint8], row: int, kind: SpillType) -> float:
    """The largest error, as a part of what its bound allows. For a float32 cache."""
    values, rounded = (each.view(np.float32).astype(np.float64).reshape(-1, row) for each in (before, after))
    limit = BOUNDS[kind].relative * np.abs(values) + BOUNDS[kind].floor * np.abs(values).max(axis=1, keepdims=True)
    return float((np.abs(rounded - values) / np.maximum(limit, np.finfo(np.float64).tiny)).max())


def measure(options: argparse.Namespace, place: Path) -> dict[SpillType, Sum]:
    """All prompts, each with every type."""
    bundle = Bundle.open(export_reference_pair(widen_mb=None).target)
    tokenizer, found = bundle.tokenizer(), {kind: Sum() for kind in SpillType}
    loading = RuntimeOptions(num_threads=1)
    with closing(open_batch_runtime(bundle.manifest.runtime, bundle.model_file, loading)) as runtime:
        assert isinstance(runtime, BlockRuntime)
        size = runtime.block_size
        row = int(runtime.block_layout[0].rstrip("]").rpartition(", ")[2])
        num_blocks = -(-(options.tokens + options.max_tokens) // size)
        blocks, others = range(num_blocks), range(num_blocks, 2 * num_blocks)
        for index, prompt in enumerate(load_prompts(options.prompts)):
            tokens = list(islice(cycle(tokenizer.encode(prompt.text)), options.tokens))
            num_full = (len(tokens) - 1) // size
            past = num_full * size
            for start in range(0, past, _STEP):
                runtime.forward([SequenceSlice(tokens[start : min(start + _STEP, past)], start, blocks, 0)])
            data = runtime.read_blocks(blocks[:num_full])
            rest = tokens[past:-1]
            expected = None
            for kind, total in found.items():
                target = SpillTarget(
                    "t", runtime.block_layout, size, runtime.block_bytes, runtime.limits.vocab_size, len(tokens), kind
                )
                path = place / target.place(b"", str(index))
                began = time.perf_counter()
                num_bytes, num_beyond = write(path, target, tokens, data, time.time())
                middle = time.perf_counter()
                back = read_blocks(read_head(path, target, time.time(), 3600.0), target)
                total.read_s += time.perf_counter() - middle
                total.write_s += middle - began
                total.num_bytes += num_bytes
                total.num_beyond += num_beyond
                runtime.write_blocks(others[:num_full], back)
                if rest:
                    runtime.forward([SequenceSlice(rest, past, others, 0)])
                logits, ids = text(runtime, tokens[-1], len(tokens) - 1, others, options.max_tokens)
                if expected is None:
                    if not np.array_equal(back, data):
                        raise SystemExit("an exact file changed a bit")
                    expected = logits, ids
                else:
                    total.of_bound = max(total.of_bound, over_bound(data, back, row, kind))
                total.of_logits = max(total.of_logits, float(np.abs(logits - expected[0]).max()))
                pairs = enumerate(zip(ids, expected[1], strict=True))
                total.equal.append(next((i for i, (one, other) in pairs if one != other), len(ids)))
    return found


def main() -> int:
    """The command."""
    options = parser(
        __doc__, {"--prompts": option(8), "--tokens": option(716), "--max-tokens": option(64)}
    ).parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measure(options, Path(place))
    table = Table(
        "type",
        "MB a prefix",
        "write ms",
        "read ms",
        "blocks beyond",
        "error / bound",
        "logits",
        "equal tokens",
        box=None,
    )
    for kind, total in found.items():
        n = len(total.equal)
        table.add_row(
            kind,
            f"{total.num_bytes / n / 1e6:.2f}",
            f"{total.write_s / n * 1e3:.1f}",
            f"{total.read_s / n * 1e3:.1f}",
            str(total.num_beyond),
            f"{total.of_bound:.2f}",
            f"{total.of_logits:.2g}",
            f"{sum(total.equal)} of {n * options.max_tokens}, {total.equal.count(options.max_tokens)} texts of {n}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    is_met = all(total.of_bound <= 1.0 for total in found.values()) and found[SpillType.EXACT].of_logits == 0.0
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
