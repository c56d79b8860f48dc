"""Writes all text that a distillation needs of the target, so that the target is freed before the training.

That is the pool to train on, rows to choose the checkpoint by, rows and texts to measure with. Everything is stored in
a folder part by part, and a stored part is not written again.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from transformers import PreTrainedModel

from outrider.export.distill.options import DistillOptions, TrainingOptions
from outrider.export.distill.prompts import Split
from outrider.export.distill.trainer.acceptance import Passage, continue_prompts
from outrider.export.distill.trainer.files import save_json
from outrider.export.distill.trainer.pool import Pool, is_complete, sample_pool
from outrider.export.distill.trainer.rollout import PoolPlan, rollout_rows
from outrider.export.progress import Event, Report, Stop
from outrider.export.source.model_source import SourceModel
from outrider.export.source.prompts import Ids
from outrider.export.source.torch_source import load_source_model

MEASURED_AT: Final = (0.0, 0.5, 0.8)
MAX_MEASURED_TOKENS: Final = 64
_DTYPES: Final = {"bf16": ("bfloat16", 2), "fp32": ("float32", 4)}
PLAIN_FAMILIES: Final = ("llama", "qwen2", "qwen3")
"""Families whose attention is scaled dot products and nothing more: torch's fused kernel computes it exactly."""
_SEEDS: Final = {"validation": 1, "test": 2}
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


def load_target(
    source: SourceModel, options: TrainingOptions, device: str, report: Report, *, is_news: bool = False
) -> tuple[PreTrainedModel, PoolPlan]:
    """The model that writes, in the chosen precision, and how: as many rows at once as fit, of no number yet."""
    report(Event("target", 0.0, f"loading {source.name} in {options.target_dtype}", is_news))
    dtype, size = _DTYPES[options.target_dtype]
    target = load_for_torch(source, dtype, device)
    return target, PoolPlan(
        options.seed,
        row_length=options.row_length,
        rows=rollout_rows(target.config, options.row_length, size),
        num_ids=source.tokenizer.size,
        stop_ids=source.tokenizer.eos_token_ids,
    )


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
        target, kind = load_target(source, options, device, report)
        between = (min(options.temperatures), max(options.temperatures))
        kind = replace(kind, sample_between=between, temperatures=options.temperatures)
        parts = {"pool": split.train, "validation": split.validation, "test": split.test}
        is_done = sample_pools(target, parts, kind, options.tokens, folder, report, stop) and _write_texts(
            target, split, options, kind, folder, report, stop
        )
        del target
        gc.collect()
        if not is_done:
            return None
        passages = _read_texts(folder)
    pools = {name: Pool(place) for name, place in places.items()}
    return TargetText(**pools, passages=tuple(passages[f"{temperature:g}"] for temperature in MEASURED_AT))


def sample_pools(
    target: PreTrainedModel,
    parts: Mapping[str, tuple[Ids, ...]],
    kind: PoolPlan,
    tokens: int,
    folder: Path,
    report: Report,
    stop: Stop,
) -> bool:
    """Samples the part "pool" until the target has written `tokens`; of any other each prompt once, or as many as fit
    one batch. Returns False if it was stopped.
    """
    # At least half of a row is the target's: no more rows at once than the chosen tokens need.
    at_once = max(1, min(kind.rows, 2 * tokens // kind.row_length))
    for name, prompts in parts.items():
        plan = replace(kind, tokens=tokens, rows=at_once)
        if name in _SEEDS:
            plan = replace(kind, seed=kind.seed + _SEEDS[name], batches=1, rows=min(kind.rows, len(prompts)))
        if not sample_pool(target, prompts, plan, folder / name, report, stop, stage=name):
            return False
    return True


def _write_texts(
    target: PreTrainedModel,
    split: Split,
    options: DistillOptions,
    kind: PoolPlan,
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
            stop_ids=kind.stop_ids,
            num_ids=kind.num_ids,
            rows=kind.rows,
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
