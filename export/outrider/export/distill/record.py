"""Composes `distillation.json`: a distilled draft's sources, options and results.

It has prompts as counts and a hash, never as text.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from outrider.export.distill.measure import Heldout, HeldoutChange
from outrider.export.distill.options import DistillOptions
from outrider.export.distill.prompts import Split
from outrider.export.distill.target import MEASURED_AT, TargetText, new_tokens
from outrider.export.distill.trainer.distill import TrainingResult
from outrider.models.bundle.bundle import hash_file
from outrider.models.bundle.manifest import Source
from outrider.models.version import outrider_version

SCHEMA: Final = 1


def make_record(
    *,
    draft: Source,
    target: Source,
    tokenizer_fingerprint: str,
    split: Split,
    options: DistillOptions,
    device: str,
    text: TargetText,
    outcome: TrainingResult,
    before: Heldout,
    after: Heldout,
    weights: Path,
) -> dict[str, Any]:
    """The record as plain values; `weights` is the directory of the new weights."""
    overall = HeldoutChange.of(before, after)
    changes = {
        f"{temperature:g}": asdict(change) for temperature, change in zip(MEASURED_AT, overall.changes, strict=True)
    }
    return {
        "schema": SCHEMA,
        "draft": draft.model_dump(),
        "target": target.model_dump(),
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "prompts": {
            "sha256": split.fingerprint,
            "train": len(split.train),
            "validation": len(split.validation),
            "test": len(split.test),
            "cut": split.num_cut,
            "dropped": split.num_dropped,
        },
        "options": options.of_the_result() | {"compiled": options.is_compiled, "device": device},
        "pool": {
            "rows": text.pool.made.rows,
            "target_tokens": text.pool.made.tokens,
            "seconds": round(text.pool.made.used_s, 1),
        },
        "training": {
            "steps": outcome.steps,
            "seconds": round(outcome.used_s, 1),
            "best_step": outcome.best_step,
            "validation": [
                {"step": one.step, "kl": one.agreement.mean_kl, "match": one.agreement.mean_match}
                for one in outcome.judged
            ],
        },
        "heldout": {
            "prompts": len(split.test),
            "new_tokens": new_tokens(options),
            "before": before.describe(),
            "after": after.describe(),
            "change": changes | {"mean": asdict(overall.mean)},
        },
        "verdict": overall.verdict,
        "summary": overall.sentence(),
        "weights": {path.name: hash_file(path) for path in sorted(weights.glob("*.safetensors"))},
        "versions": {"outrider": outrider_version(), "torch": torch.__version__, "transformers": _transformers()},
    }


def _transformers() -> str:
    version: str = transformers.__version__
    return version
