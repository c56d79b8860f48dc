"""Trains the reference pair from scratch: `python -m outrider.export.reference_training.train --work FOLDER`.

Stages, each resumed from its checkpoint in the work folder or skipped when it is complete: `target`, `draft` (both
next-token training), `pool` (text sampled from the target), `distill`, `package`. A stage is given minutes of wall
clock (see `recipe`), so a slower machine trains a weaker pair. On a machine shared with other work, two processes of
one thread are faster than one of two: `OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m
outrider.export.reference_training.train`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.distill import distill
from outrider.export.distill.trainer.files import save_json
from outrider.export.distill.trainer.pool import Pool, is_complete, sample_pool
from outrider.export.distill.trainer.progress import Event
from outrider.export.reference_training import recipe, training_record
from outrider.export.reference_training.corpus import Corpus, load_corpus
from outrider.export.reference_training.data import encode_files
from outrider.export.reference_training.package import save_model
from outrider.export.reference_training.pretrain import Plan, pretrain
from outrider.export.reference_training.prompts import cut_prompts
from outrider.export.reference_training.vocabulary import train_tokenizer
from outrider.reference import pair_dir

STAGES = ("target", "draft", "pool", "distill", "package")
PASSAGE_TOKENS = 64
PASSAGES_PER_FUNCTION = 0.5


def say(line: str) -> None:
    """Prints a progress line without buffering."""
    print(line, flush=True)


def report(event: Event) -> None:
    """Prints a distillation's events that are news."""
    if event.is_news:
        say(f"{event.stage} {event.share:4.0%}  {event.text}")


@dataclass
class Workshop:
    """The stages, their shared folder, and data that is computed on first use."""

    work: Path
    output: Path
    recipe: recipe.Recipe
    notes: tuple[str, ...] = ()

    @cached_property
    def corpus(self) -> Corpus:
        return load_corpus()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return train_tokenizer(file.text for file in self.corpus.train)

    @cached_property
    def streams(self) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        return (
            encode_files(self.tokenizer, self.corpus.train, seed=recipe.DATA_SEED),
            encode_files(self.tokenizer, self.corpus.heldout),
        )

    def target(self) -> None:
        self._pretrain(recipe.new_target(), self.recipe.target, self.work / "target.pt")

    def draft(self) -> None:
        self._pretrain(recipe.new_draft(), self.recipe.draft, self.work / "draft.pt")

    def _pretrain(self, model: PreTrainedModel, plan: Plan, checkpoint: Path) -> None:
        pretrain(model, *self.streams, plan, checkpoint, say)

    def pool(self) -> None:
        folder = self.pool_folder()
        if not is_complete(folder):
            teacher = load_weights(recipe.new_target(), self.work / "target.pt").to(torch.bfloat16)
            sample_pool(teacher, self.rollout_prompts(), self.recipe.pool, folder, report)

    def pool_folder(self) -> Path:
        """Each process of several has its own part of the pool."""
        return self.work / f"pool-{parallel.rank()}-of-{parallel.size()}"

    def rollout_prompts(self) -> list[list[int]]:
        """Beginnings of training functions, and half as many random passages of the training stream."""
        prompts = [
            list(self.tokenizer.encode(prompt.text).ids)
            for prompt in cut_prompts(self.corpus.train, lambda text: len(self.tokenizer.encode(text).ids))
        ]
        stream, _ = self.streams
        random = np.random.default_rng(recipe.DISTILL_SEED)
        count = int(PASSAGES_PER_FUNCTION * len(prompts))
        for start in random.integers(len(stream) - PASSAGE_TOKENS, size=count):
            prompts.append([int(token) for token in stream[start : start + PASSAGE_TOKENS]])
        return prompts

    def distill(self) -> None:
        student = load_weights(recipe.new_draft(), self.work / "draft.pt")
        plans = self.recipe
        pool = Pool(self.pool_folder())
        distill(student, pool, plans.pool.temperatures, plans.distillation, self.work / "distill.pt", report=report)

    def package(self) -> None:
        if parallel.rank() != 0:
            return
        distilled = self.work / "distill.pt"
        draft = distilled if distilled.exists() else self.work / "draft.pt"
        save_model(load_weights(recipe.new_target(), self.work / "target.pt"), self.tokenizer, self.output / "target")
        save_model(load_weights(recipe.new_draft(), draft), self.tokenizer, self.output / "draft")
        prompts = cut_prompts(self.corpus.heldout, lambda text: len(self.tokenizer.encode(text).ids))
        save_json([asdict(prompt) for prompt in prompts], self.output / "prompts.json")
        save_json([asdict(file) for file in self.corpus.heldout], self.output / "heldout.json")
        record = training_record.collect(self.work, self.corpus, self.streams, self.recipe, self.notes)
        save_json(record, self.output / "training.json")


def load_weights(model: PreTrainedModel, checkpoint: Path) -> PreTrainedModel:
    """`model` with the weights of a stage's `checkpoint`."""
    if not checkpoint.exists():
        raise SystemExit(f"{checkpoint} is missing; run the stage {checkpoint.stem!r} first")
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model.eval()


def main() -> None:
    """Runs the chosen stages, in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", choices=[*STAGES, []], help="default: all, in order")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints (2 GB)")
    parser.add_argument("--output", type=Path, default=pair_dir(), help="where the pair is written")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply every stage's minutes by this")
    parser.add_argument("--note", action="append", default=[], help="a remark on the run, kept in the model card")
    arguments = parser.parse_args()
    parallel.start()
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(
        arguments.work, arguments.output, recipe.REFERENCE_RECIPE.scaled(arguments.scale), tuple(arguments.note)
    )
    runs: dict[str, Callable[[], None]] = {name: getattr(workshop, name) for name in STAGES}
    for name in arguments.stages or STAGES:
        say(f"== {name}")
        runs[name]()


if __name__ == "__main__":
    main()
