"""Collects `training.json`, the record of a training run from which the model card is rendered."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from outrider.export.check.timing import processor
from outrider.export.distill.trainer.optim import Rates
from outrider.export.reference_training import recipe
from outrider.export.reference_training.corpus import Corpus, SourceFile
from outrider.export.reference_training.pretrain import Plan
from outrider.export.reference_training.vocabulary import VOCABULARY_SIZE


def collect(
    work: Path,
    corpus: Corpus,
    streams: tuple[NDArray[np.uint16], NDArray[np.uint16]],
    plans: recipe.Recipe,
    notes: Sequence[str] = (),
) -> dict[str, object]:
    """Everything `card.render` needs: plain values, from the checkpoints in `work` where they were measured."""
    stages = [_pretraining(name, plan, work, len(streams[0])) for name, plan in _pretrained(plans)]
    if (work / "distill.pt").exists():
        stages += _distillation(plans, work)
    return {
        "stages": stages,
        "notes": list(notes),
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


def _rates(rates: Rates) -> str:
    return f"peak rates Muon {rates.muon}, AdamW {rates.adamw}; weight decay {rates.weight_decay}"


def _facts(checkpoint: Path) -> dict[str, float]:
    state = torch.load(checkpoint, weights_only=True)
    return {name: float(value) for name, value in state.items() if isinstance(value, int | float)}
