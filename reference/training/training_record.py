"""Collects `training.json`, the record of a training run from which the model card is rendered."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from outrider.export.check.timing import processor
from outrider.export.distill.trainer.optim import Rates
from outrider.export.distill.trainer.pool import Pool
from outrider.export.distill.trainer.rollout import PoolPlan
from training import recipe
from training.corpus import Corpus, SourceFile
from training.pretrain import Plan
from training.vocabulary import VOCABULARY_SIZE


def collect(
    work: Path,
    corpus: Corpus,
    streams: tuple[NDArray[np.uint16], NDArray[np.uint16]],
    plans: recipe.Recipe,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything that `card.render` needs: plain values, from the checkpoints in `work` where they were measured.

    Of a run that started from a stored pair, the earlier stages are as in that pair's record.
    """
    if start_path(work).exists():
        record: dict[str, Any] = json.loads(start_path(work).read_text(encoding="utf-8"))
    else:
        record = _from_the_beginning(work, corpus, streams, plans)
    record["notes"] += notes
    if (work / "long_distill.pt").exists():
        record["stages"] += _long_distillation(plans, work)
        record["seeds"]["long"] = recipe.LONG_SEED
        record["long_distillation"] = {
            "pools": [asdict(pool) for pool in plans.long_pools],
            "rope_theta": recipe.LONG_ROPE_THETA,
            "written": list(recipe.LONG_WRITTEN),
            **asdict(plans.long_distillation),
        }
    return record


def start_path(work: Path) -> Path:
    """Where the record of the pair is kept that a run started from."""
    return work / "start.json"


def long_pool_folder(work: Path, plan: PoolPlan, rank: int, size: int) -> Path:
    """The part of a long pool that one of `size` processes samples."""
    return work / f"pool{plan.row_length}-{rank}-of-{size}"


def _from_the_beginning(
    work: Path, corpus: Corpus, streams: tuple[NDArray[np.uint16], NDArray[np.uint16]], plans: recipe.Recipe
) -> dict[str, Any]:
    stages = [_pretraining(name, plan, work, len(streams[0])) for name, plan in _pretrained(plans)]
    if (work / "distill.pt").exists():
        stages += _distillation(plans, work)
    return {
        "stages": stages,
        "notes": [],
        "hardware": f"{os.cpu_count()} cores of {processor()}, shared with other work",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vocabulary": VOCABULARY_SIZE,
        "contexts": " and ".join(str(length) for _, length in plans.target.phases),
        "draft_contexts": " and ".join(str(length) for _, length in plans.draft.phases),
        "seeds": {
            "data": recipe.DATA_SEED,
            "target": recipe.TARGET_SEED,
            "draft": recipe.DRAFT_SEED,
            "distillation": recipe.DISTILL_SEED,
        },
        "distillation": asdict(plans.pool) | asdict(plans.distillation),
        "corpus": {
            "python": platform.python_version(),
            "fingerprint": corpus.fingerprint(),
            "train_files": len(corpus.train),
            "train_chars": sum(len(file.text) for file in corpus.train),
            "train_tokens": len(streams[0]),
            "heldout": [file.path for file in corpus.heldout],
            "heldout_lines_in_training": shared_lines(corpus),
        },
    }


def shared_lines(corpus: Corpus, min_chars: int = 20) -> float:
    """Share of the held-out lines of at least `min_chars` characters that are also in a training file."""

    def lines(files: Sequence[SourceFile]) -> list[str]:
        stripped = (line.strip() for file in files for line in file.text.split("\n"))
        return [line for line in stripped if len(line) >= min_chars]

    known, heldout = set(lines(corpus.train)), lines(corpus.heldout)
    return sum(line in known for line in heldout) / len(heldout)


def _pretrained(plans: recipe.Recipe) -> list[tuple[str, Plan]]:
    return [("target", plans.target), ("draft", plans.draft)]


def _pretraining(name: str, plan: Plan, work: Path, stream_tokens: int) -> str:
    state = _facts(work / f"{name}.pt")
    contexts = " and ".join(str(length) for _, length in plan.phases)
    return (
        f"{name}, next-token training: {state['used_s'] / 60:.0f} minutes, {state['step']:,.0f} steps of "
        f"{plan.tokens_per_step:,} tokens at context {contexts}, {state['tokens'] / stream_tokens:.1f} epochs; "
        f"{_rates(plan.rates)}"
    )


def _distillation(plans: recipe.Recipe, work: Path) -> list[str]:
    pool, plan = plans.pool, plans.distillation
    state = _facts(work / "distill.pt")
    rows, steps = state["pool_rows"], state["step"]
    return [
        f"pool: {pool.minutes:g} minutes, {rows:,.0f} rows of {pool.row_length} tokens sampled from the target",
        f"distillation: {state['used_s'] / 60:.0f} minutes, {steps:,.0f} steps of {plan.rows_per_step} rows, "
        f"{steps * plan.rows_per_step / rows:.1f} times over the pool; {_rates(plan.rates)}",
    ]


def _long_distillation(plans: recipe.Recipe, work: Path) -> list[str]:
    plan, state = plans.long_distillation, _facts(work / "long_distill.pt")
    lengths = [f"{pool.row_length:,}" for pool in plans.long_pools]
    rows = [_pool_rows(work, pool) for pool in plans.long_pools]
    epochs = [state["step"] * size / count for size, count in zip(plan.pool_rows, rows, strict=True)]
    return [
        f"long pools: {_listed(f'{pool.minutes:g}' for pool in plans.long_pools)} minutes, "
        f"{_listed(f'{count:,} rows of {length}' for count, length in zip(rows, lengths, strict=True))} tokens",
        f"long distillation: {state['used_s'] / 60:.0f} minutes, {state['step']:,.0f} steps of "
        f"{_listed(f'{size} rows of {length}' for size, length in zip(plan.pool_rows, lengths, strict=True))} tokens, "
        f"{_listed(f'{times:.1f}' for times in epochs)} times over the pools; {_rates(plan.rates)}",
    ]


def _pool_rows(work: Path, plan: PoolPlan) -> int:
    """Rows of a long pool, over all processes that sampled it."""
    folders = work.glob(f"pool{plan.row_length}-*-of-*")
    return sum(Pool(folder).made.rows for folder in folders)


def _listed(items: Iterable[str]) -> str:
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def _rates(rates: Rates) -> str:
    return f"peak rates Muon {rates.muon}, AdamW {rates.adamw}; weight decay {rates.weight_decay}"


def _facts(checkpoint: Path) -> dict[str, float]:
    state = torch.load(checkpoint, weights_only=True)
    return {name: float(value) for name, value in state.items() if isinstance(value, int | float)}
