"""Trains draft heads for a target bundle, for `outrider-export heads`, and puts them beside the model.

The bundle is written again as a whole, at its own place or at another: its files, the heads, and the manifest with
what was measured. The model's files do not change, nor does the target's identity: heads are hints.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import save_file

from outrider.export.disk import telling_of_full_disks
from outrider.export.distill.options import TrainingOptions
from outrider.export.distill.prompts import Split, split_prompts
from outrider.export.distill.target import load_target, sample_pools
from outrider.export.distill.trainer.heads import Heads as TrainedHeads
from outrider.export.distill.trainer.heads import HiddenStates, measure_heads, train_heads
from outrider.export.distill.trainer.optim import Budget
from outrider.export.distill.trainer.pool import Pool
from outrider.export.progress import Report, Stop, never, silent
from outrider.export.source.model_source import SourceModel, read_source
from outrider.export.source.prompts import encode_prompts
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.draft_heads import FORMAT, HEADS_FILE
from outrider.models.bundle.manifest import HeadAcceptance, Heads, Manifest
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.text.tokenizer import require_same_tokenizer

MAX_HEADS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions(TrainingOptions):
    """How heads are trained. count: of heads. heldout: share of the prompts. device: as torch names it.

    Raises ConfigError for invalid values, RuntimeUnavailable for a device that torch does not have.
    """

    count: int = 3
    tokens: int = 200_000
    rate: float = 1e-3
    heldout: float = 0.1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_HEADS:
            raise ConfigError(f"{self.count} heads were asked for; expected 1 to {MAX_HEADS}")
        if (self.minutes is None) == (self.steps is None):
            raise ConfigError("the training has no budget, or two; give --minutes or --steps")
        TrainingOptions.__post_init__(self)
        if self.row_length < 2 * self.count + 8:
            raise ConfigError(f"rows have {self.row_length} tokens; expected at least {2 * self.count + 8}")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise RuntimeUnavailable(
                f"torch cannot use {self.device!r} here ({next(iter(str(error).splitlines()), '')}); use --device cpu"
            ) from None


def add_heads(
    bundle: Path,
    model: str | Path,
    prompts: Sequence[Any],
    options: HeadOptions,
    *,
    out: Path | None = None,
    report: Report = silent,
    stop: Stop = never,
) -> Bundle | None:
    """Trains heads on `model` and writes `bundle` with them, at its place or at `out`; None if it was stopped before.

    model: the directory or hub id that the bundle was made from. Raises ConfigError for another model, and what
    `read_source`, `Bundle.open` and `BundleWriter` raise; nothing is written then.
    """
    opened, source = Bundle.open(bundle), read_source(model)
    _require_source(opened, source)
    split = split_prompts(
        encode_prompts(prompts, source.tokenizer, is_chat=options.is_chat),
        options.heldout,
        seed=options.seed,
        max_tokens=options.row_length // 2,
    )
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    place = out if out is not None else bundle
    with (
        TemporaryDirectory(prefix="outrider-heads-") as temporary,
        BundleWriter(place, overwrite=out is None) as writer,
        telling_of_full_disks(place.parent),
    ):
        found = _train(source, split, options, Path(temporary), report, stop)
        if found is None:
            return None
        trained, entry = found
        for file in opened.manifest.files:
            if file.path != HEADS_FILE:
                (writer.directory / file.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(opened.path / file.path, writer.directory / file.path)
        (writer.directory / HEADS_FILE).parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {
                "weights": trained.weight.detach().cpu().contiguous(),
                "biases": trained.bias.detach().cpu().contiguous(),
                "unembedding": trained.unembedding.half().cpu().contiguous(),
                "bias": trained.unembedding_bias.half().cpu().contiguous(),
            },
            writer.directory / HEADS_FILE,
            metadata={"format": FORMAT},
        )
        files = writer.list_files()
        size = sum(file.size for file in files)
        changed = {
            **opened.manifest.model_dump(),
            "draft_heads": entry,
            "files": files,
            "report": opened.manifest.report.model_copy(update={"size_bytes": size}),
        }
        return writer.commit(Manifest.model_validate(changed))


def _require_source(bundle: Bundle, source: SourceModel) -> None:
    manifest = bundle.manifest
    if manifest.role != "target":
        raise ConfigError(f"{bundle.path} is a {manifest.role} bundle; expected a target")
    require_same_tokenizer(bundle.tokenizer(), source.tokenizer)
    own, others = manifest.source.weights_sha256, source.describe().weights_sha256
    if own != others:
        raise ConfigError(
            f"{bundle.path} was made from weights {own[:12]}, and {source.path} has {others[:12]}; give the model that "
            "it was exported from"
        )


def _train(
    source: SourceModel, split: Split, options: HeadOptions, work: Path, report: Report, stop: Stop
) -> tuple[TrainedHeads, Heads] | None:
    """The trained heads and their entry in the manifest; None if it was stopped."""
    target, kind = load_target(source, options, options.device, report, is_news=True)
    kind = replace(kind, top_k=1, temperatures=(1.0,))
    if not sample_pools(target, {"pool": split.train, "test": split.test}, kind, options.tokens, work, report, stop):
        return None
    states = HiddenStates(target, source.tokenizer.size)
    heads = states.make_heads(options.count)
    budget = Budget(options.minutes, options.steps)
    _, num_tokens = train_heads(states, heads, Pool(work / "pool"), budget, options.rate, options.seed, report, stop)
    if stop():
        return None
    tested, rates = measure_heads(states, heads, Pool(work / "test"))
    return heads, Heads(
        file=HEADS_FILE,
        hidden_size=heads.bias.shape[1],
        trained_tokens=num_tokens,
        tested_tokens=tested,
        acceptance=tuple(HeadAcceptance(rate=one, in_chain=chain, top5=five) for one, chain, five in rates),
    )
