"""Writes all text that a distillation needs of the target, so that the target is freed before the training.

That is the pool to train on, rows to choose the checkpoint by, rows and texts to measure with. Everything is stored in
a folder part by part, and a stored part is not written again.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedModel

from outrider.export.distill.options import DistillOptions
from outrider.export.distill.prompts import Split
from outrider.export.distill.trainer.acceptance import Passage, continue_prompts
from outrider.export.distill.trainer.files import save_json
from outrider.export.distill.trainer.memory import rollout_rows
from outrider.export.distill.trainer.pool import Pool, PoolPlan, is_complete, sample_pool
from outrider.export.distill.trainer.progress import Event, Report, Stop
from outrider.export.source.model_source import SourceModel
from outrider.export.source.torch_source import load_source_model

MEASURED_AT: Final = (0.0, 0.5, 0.8)
MAX_MEASURED_TOKENS: Final = 64
DTYPES: Final = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}
PLAIN_FAMILIES: Final = ("llama", "qwen2", "qwen3")
"""Families whose attention is scaled dot products and nothing more: torch's fused kernel computes it exactly."""
_TEXTS: Final = "texts.json"


@dataclass(frozen=True, slots=True)
class TargetText:
    """pool: to train on. validation: to choose the checkpoint by. test: to measure divergence with.

    passages: the target's text after each held-out prompt, by temperature in the order of MEASURED_AT.
    """

    pool: Pool
    validation: Pool
    test: Pool
    passages: tuple[list[Passage], ...]


def new_tokens(options: DistillOptions) -> int:
    """How many of the target's tokens are measured after each held-out prompt."""
    return min(MAX_MEASURED_TOKENS, options.row_length // 2)


def load_for_torch(source: SourceModel, dtype: str, device: str) -> PreTrainedModel:
    """The model on `device` in evaluation mode, with fused attention where that is known to be exact."""
    attention = "sdpa" if source.config.get("model_type") in PLAIN_FAMILIES else "eager"
    model: PreTrainedModel = load_source_model(source.path, dtype, attention)
    return model.to(device)


def write_target_text(
    source: SourceModel,
    split: Split,
    options: DistillOptions,
    device: str,
    folder: Path,
    report: Report,
    stop: Stop,
) -> TargetText | None:
    """The target's text, from `folder` or written now; None if it was stopped before the end."""
    places = {name: folder / name for name in ("pool", "validation", "test")}
    passages = _read_texts(folder)
    if len(passages) < len(MEASURED_AT) or not all(is_complete(place) for place in places.values()):
        dtype, size = DTYPES[options.target_dtype]
        report(Event("target", 0.0, f"loading {source.name} in {options.target_dtype}"))
        target = load_for_torch(source, dtype, device)
        rows = rollout_rows(target.config, options.row_length, size)
        is_done = _sample_all(target, source, split, options, rows, places, report, stop) and _write_texts(
            target, source, split, options, rows, folder, report, stop
        )
        del target
        gc.collect()
        if not is_done:
            return None
        passages = _read_texts(folder)
    pools = {name: Pool(place) for name, place in places.items()}
    return TargetText(**pools, passages=tuple(passages[f"{temperature:g}"] for temperature in MEASURED_AT))


def _sample_all(
    target: PreTrainedModel,
    source: SourceModel,
    split: Split,
    options: DistillOptions,
    rows: int,
    places: dict[str, Path],
    report: Report,
    stop: Stop,
) -> bool:
    """Samples the three pools. Validation and test use each prompt once, or as many as fit one batch."""
    common: dict[str, Any] = {
        "row_length": options.row_length,
        "sample_between": (min(options.temperatures), max(options.temperatures)),
        "temperatures": options.temperatures,
        "num_ids": source.tokenizer.size,
        "stop_ids": source.tokenizer.eos_token_ids,
    }
    # At least half of a row is the target's: no more rows at once than the chosen tokens need.
    at_once = max(1, min(rows, 2 * options.tokens // options.row_length))
    plans = {
        "pool": (split.train, PoolPlan(options.seed, tokens=options.tokens, rows=at_once, **common)),
        "validation": (split.validation, _one_batch(split.validation, options.seed + 1, rows, common)),
        "test": (split.test, _one_batch(split.test, options.seed + 2, rows, common)),
    }
    return all(
        sample_pool(target, prompts, plan, places[name], report, stop, stage=name)
        for name, (prompts, plan) in plans.items()
    )


def _one_batch(prompts: tuple[tuple[int, ...], ...], seed: int, rows: int, common: dict[str, Any]) -> PoolPlan:
    return PoolPlan(seed, batches=1, rows=min(rows, len(prompts)), **common)


def _write_texts(
    target: PreTrainedModel,
    source: SourceModel,
    split: Split,
    options: DistillOptions,
    rows: int,
    folder: Path,
    report: Report,
    stop: Stop,
) -> bool:
    found = _read_texts(folder)
    for index, temperature in enumerate(MEASURED_AT):
        if f"{temperature:g}" in found:
            continue
        report(Event("texts", index / len(MEASURED_AT), f"text to measure with, temperature {temperature:g}", True))
        passages = continue_prompts(
            target,
            split.test,
            temperature,
            new_tokens(options),
            stop_ids=source.tokenizer.eos_token_ids,
            num_ids=source.tokenizer.size,
            rows=rows,
            stop=stop,
        )
        if passages is None:
            return False
        found[f"{temperature:g}"] = passages
        stored = {name: [asdict(passage) for passage in those] for name, those in found.items()}
        save_json(stored, folder / _TEXTS)
    return True


def _read_texts(folder: Path) -> dict[str, list[Passage]]:
    path = folder / _TEXTS
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        name: [Passage(tuple(one["ids"]), one["start"], one["seed"]) for one in those] for name, those in stored.items()
    }
