"""Trains the reference pair from scratch: `cd reference; python -m training.train --work FOLDER`.

Stages, each resumed from its checkpoint in the work folder or skipped when it is complete: `target`, `draft` (both
next-token training), `pool` (text sampled from the target), `distill`, `long_pools`, `long_distill` (the same on rows
of up to 1,024 tokens), `package`. With `--from-pair` only the last three run, from the models of a stored pair. A stage
is given minutes of wall clock (see `recipe`), so a slower machine trains a weaker pair. On a machine shared with other
work, two processes of one thread are faster than one of two: `OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m
training.train`.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.distill import distill
from outrider.export.distill.trainer.files import save_json, save_tensors
from outrider.export.distill.trainer.pool import Pool, is_complete, sample_pool
from outrider.export.distill.trainer.rollout import PoolPlan
from outrider.export.progress import Event
from outrider.reference import pair_dir
from training import recipe, training_record
from training.corpus import Corpus, load_corpus
from training.data import encode_files
from training.package import save_model
from training.pretrain import Plan, pretrain
from training.prompts import cut_prompts
from training.vocabulary import train_tokenizer

STAGES = ("target", "draft", "pool", "distill", "long_pools", "long_distill", "package")
LONG_STAGES = STAGES[-3:]
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

    def start_from(self, pair: Path) -> None:
        """Makes the checkpoints that `LONG_STAGES` begin with from a stored pair, unless they are there."""
        for stage, name in (("target", "target"), ("distill", "draft")):
            if not (self.work / f"{stage}.pt").exists():
                model = AutoModelForCausalLM.from_pretrained(pair / name, dtype=torch.float32)
                save_tensors({"model": model.state_dict()}, self.work / f"{stage}.pt")
        if not training_record.start_path(self.work).exists():
            shutil.copyfile(pair / "training.json", training_record.start_path(self.work))

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

    def long_pools(self) -> None:
        teacher = load_weights(recipe.new_target(), self.work / "target.pt").to(torch.bfloat16)
        for plan in self.recipe.long_pools:
            prompts = self.rollout_prompts()
            if plan.row_length > self.recipe.pool.row_length:
                prompts = prompts[:: len(prompts) // recipe.LONG_BEGINNINGS] + self.long_passages(plan)
            sample_pool(teacher, prompts, plan, self.long_pool_folder(plan), report, stage=f"pool {plan.row_length}")

    def long_pool_folder(self, plan: PoolPlan) -> Path:
        """Each process of several has its own part of every pool."""
        return training_record.long_pool_folder(self.work, plan, parallel.rank(), parallel.size())

    def long_passages(self, plan: PoolPlan) -> list[list[int]]:
        """Random passages of the training stream that fill a row but for its last 64 to 192 tokens.

        The target's distribution is recorded over them too: reading covers far positions for less time than writing.
        """
        stream, _ = self.streams
        random = np.random.default_rng([plan.seed, plan.row_length])
        lengths = plan.row_length - random.integers(*recipe.LONG_WRITTEN, size=recipe.LONG_PASSAGES)
        starts = random.integers(len(stream) - plan.row_length, size=recipe.LONG_PASSAGES)
        return [
            [int(token) for token in stream[start : start + length]]
            for start, length in zip(starts, lengths, strict=True)
        ]

    def distill(self) -> None:
        student = load_weights(recipe.new_draft(), self.work / "draft.pt")
        plans = self.recipe
        pool = Pool(self.pool_folder())
        distill(student, pool, plans.distillation, self.work / "distill.pt", report=report)

    def long_distill(self) -> None:
        student = load_weights(recipe.new_draft(is_long=True), self.work / "distill.pt")
        plans = self.recipe
        pools = [Pool(self.long_pool_folder(plan)) for plan in plans.long_pools]
        distill(student, pools, plans.long_distillation, self.work / "long_distill.pt", report=report)

    def package(self) -> None:
        if parallel.rank() != 0:
            return
        stages = [self.work / f"{name}.pt" for name in ("long_distill", "distill", "draft")]
        checkpoint = next((path for path in stages if path.exists()), stages[-1])
        draft = load_weights(recipe.new_draft(is_long=checkpoint == stages[0]), checkpoint)
        save_model(draft, self.tokenizer, self.output / "draft")
        if not training_record.start_path(self.work).exists():
            target = load_weights(recipe.new_target(), self.work / "target.pt")
            save_model(target, self.tokenizer, self.output / "target")
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
    parser.add_argument(
        "--from-pair",
        type=Path,
        help="run only the long stages and the packaging, from this pair; it may be the output",
    )
    parser.add_argument("--note", action="append", default=[], help="a remark on the run, kept in the model card")
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # `torchrun` started this process among several
        torch.distributed.init_process_group("gloo")
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(
        arguments.work, arguments.output, recipe.REFERENCE_RECIPE.scaled(arguments.scale), tuple(arguments.note)
    )
    runs: dict[str, Callable[[], None]] = {name: getattr(workshop, name) for name in STAGES}
    if arguments.from_pair:
        workshop.start_from(arguments.from_pair)
    for name in arguments.stages or (LONG_STAGES if arguments.from_pair else STAGES):
        say(f"== {name}")
        runs[name]()


if __name__ == "__main__":
    main()
