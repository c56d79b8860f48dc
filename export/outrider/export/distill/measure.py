"""Measures a draft on held-out prompts, compares two drafts on them, and composes `distillation.json` of it.

The record has prompts as counts and a hash, never as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from outrider.export.distill.options import DistillOptions
from outrider.export.distill.prompts import Split
from outrider.export.distill.target import MEASURED_AT, TargetText, new_tokens
from outrider.export.distill.trainer.acceptance import (
    Acceptance,
    Change,
    Passage,
    Score,
    TorchSequence,
    compare,
    score,
    score_sequence,
    summarize,
)
from outrider.export.distill.trainer.distill import TrainingResult
from outrider.export.distill.trainer.losses import Agreement, measure_agreement, training_rows
from outrider.models.bundle.bundle import hash_file
from outrider.models.runtimes.mapped_sequence import MappedSequence
from outrider.models.text.vocabulary_map import VocabularyMap
from outrider.models.version import outrider_version


@dataclass(frozen=True, slots=True)
class Heldout:
    """Acceptance at each of MEASURED_AT, with the scores behind it, and divergence on held-out rows."""

    acceptance: tuple[Acceptance, ...]
    scores: tuple[tuple[Score, ...], ...]
    agreement: Agreement

    def describe(self) -> dict[str, Any]:
        """For the record: JSON-able, without the single scores."""
        rows = [asdict(row) for row in self.acceptance]
        return {"acceptance": rows, **{name: list(values) for name, values in asdict(self.agreement).items()}}


@dataclass(frozen=True, slots=True)
class OtherTokenizer:
    """Of a draft whose tokenizer is not the target's: the map to the target's ids, and the draft's positions."""

    mapping: VocabularyMap
    longest: int


def measure_heldout(
    draft: PreTrainedModel,
    text: TargetText,
    temperatures: Sequence[float],
    num_ids: int,
    skip: int,
    other: OtherTokenizer | None,
) -> Heldout:
    """Scores the draft in its present dtype. Changes nothing.

    num_ids: of the draft's tokenizer, whose tokens the rows of `text` hold. skip: as in `measure_agreement`.
    """
    if other is None:

        def scored(passage: Passage, temperature: float) -> Score:
            return score(draft, passage, temperature, num_ids=num_ids)[0]
    else:
        mapped = MappedSequence(TorchSequence(draft, other.longest), other.mapping)

        def scored(passage: Passage, temperature: float) -> Score:
            return score_sequence(mapped, passage, temperature, num_ids=other.mapping.num_ids)

    scores = tuple(
        tuple(scored(passage, temperature) for passage in passages)
        for temperature, passages in zip(MEASURED_AT, text.passages, strict=True)
    )
    rows = training_rows(text.test.row_length, draft.config.get_text_config().vocab_size, 16)
    return Heldout(
        acceptance=tuple(summarize(temperature, those) for temperature, those in zip(MEASURED_AT, scores, strict=True)),
        scores=scores,
        agreement=measure_agreement(draft, text.test, temperatures, num_ids, rows, skip),
    )


_SENTENCES: Final = {
    "better": "held-out acceptance rose",
    "no clear difference": "held-out acceptance did not rise by more than chance explains",
    "worse": "held-out acceptance FELL",
}


def _verdict(mean: Change) -> str:
    """Better beyond two standard errors; worse if the mean fell at all."""
    if mean.rise < 0.0:
        return "worse"
    return "better" if mean.rise > 2.0 * mean.error else "no clear difference"


SCHEMA: Final = 1


def make_record(
    models: Mapping[str, Any],
    split: Split,
    options: DistillOptions,
    device: str,
    text: TargetText,
    outcome: TrainingResult,
    heldout: tuple[Heldout, Heldout],
    weights: Path,
) -> dict[str, Any]:
    """The record as plain values.

    models: entries that describe draft and target. heldout: before and after, of the same text. weights: the directory
    of the new ones.
    """
    before, after = heldout
    mean = compare(before.scores, after.scores)
    verdict = _verdict(mean)
    changes = {
        f"{temperature:g}": asdict(compare([was], [is_now]))
        for temperature, was, is_now in zip(MEASURED_AT, before.scores, after.scores, strict=True)
    }
    return {
        "schema": SCHEMA,
        **models,
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
            "change": changes | {"mean": asdict(mean)},
        },
        "verdict": verdict,
        "summary": f"{_SENTENCES[verdict]}: {mean.rise:+.3f} ± {mean.error:.3f} on average over temperatures",
        "weights": {path.name: hash_file(path) for path in sorted(weights.glob("*.safetensors"))},
        "versions": {
            "outrider": outrider_version(),
            "torch": torch.__version__,
            "transformers": str(transformers.__version__),
        },
    }
