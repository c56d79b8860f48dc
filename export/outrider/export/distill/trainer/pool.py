"""Samples and reads the pool: the target's text in a folder, in parts that appear whole or not at all.

A part is a pure function of the model, the prompts, the plan and its number, so a killed run continues where it was.
Parts are mapped into memory when they are read, so a pool may be larger than the memory. The orders in which prompts
and rows are taken are endless shuffles, pure functions of a place in them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.files import load_tensors, save_json, save_tensors
from outrider.export.distill.trainer.rollout import PoolPlan, Rollout, concatenate, sample_rows
from outrider.export.progress import Event, Report, Stop, never, silent
from outrider.models.errors import ModelFault

PROGRESS_FILE = "pool.json"
BATCHES_SORTED = 16


@dataclass(slots=True)
class _Made:
    """The present content of a folder."""

    parts: int = 0
    rows: int = 0
    tokens: int = 0
    used_s: float = 0.0
    is_complete: bool = False


def is_complete(folder: Path) -> bool:
    """Whether the pool in `folder` is finished."""
    return _read(folder).is_complete


def sample_pool(
    teacher: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    plan: PoolPlan,
    folder: Path,
    report: Report = silent,
    stop: Stop = never,
    stage: str = "pool",
) -> bool:
    """Fills `folder` with rows that the teacher writes, after the parts that are there; `stage` names it in reports.

    Prompts of `plan.row_length` tokens or more are left out. Returns False if it was stopped before the end; the
    finished parts stay. Under `torchrun` each process needs a folder of its own. Raises `ValueError` when no prompt
    is usable or the plan names not exactly one budget, ModelFault when the teacher's logits are not finite.
    """
    if sum(budget is not None for budget in (plan.minutes, plan.tokens, plan.batches)) != 1:
        raise ValueError(f"{plan} has no budget or several; expected exactly one of minutes, tokens, batches")
    usable = [prompt for prompt in prompts if 0 < len(prompt) < plan.row_length]
    lengths = [len(prompt) for prompt in usable]
    seed = plan.seed + 1000 * parallel.rank()
    made = _read(folder)
    began = time.monotonic() - made.used_s
    while not made.is_complete:
        chosen = batch_by_length(lengths, plan.rows, seed, made.parts, _sort_over(plan))
        generator = torch.Generator(teacher.device).manual_seed(seed * 1_000_003 + made.parts)
        temperatures = torch.linspace(*plan.sample_between, plan.rows)
        rows = sample_rows(teacher, [usable[index] for index in chosen], temperatures, plan, generator, stop)
        if rows is None:
            return False
        if not bool(torch.isfinite(rows.log_norms).all() & torch.isfinite(rows.top_logits).all()):
            raise ModelFault("the target's logits are not finite; try --target-dtype fp32")
        save_tensors(asdict(rows), _part(folder, made.parts))
        made = _Made(
            parts=made.parts + 1,
            rows=made.rows + len(rows),
            tokens=made.tokens + int((rows.ends - rows.starts).sum()),
            used_s=time.monotonic() - began,
        )
        share = _share(made, plan)
        made = replace(made, is_complete=share >= 1.0)
        save_json(asdict(made), folder / PROGRESS_FILE)
        text = f"{made.rows:,} rows with {made.tokens:,} tokens from the target, {made.used_s / 60:.1f} min"
        report(Event(stage, min(1.0, share), text, is_news=True))
    return True


def rewrite_pool(
    pool: Pool,
    rewrite: Callable[[Rollout], Rollout],
    folder: Path,
    report: Report = silent,
    stop: Stop = never,
) -> bool:
    """Fills `folder` with every part of a pool as `rewrite` makes it, after the parts that are there.

    Returns False if it was stopped before the end; the finished parts stay.
    """
    made = _read(folder)
    for number, part in enumerate(pool.parts[made.parts :], start=made.parts):
        if stop():
            return False
        rows = rewrite(part)
        save_tensors(asdict(rows), _part(folder, number))
        made = _Made(
            parts=number + 1,
            rows=made.rows + len(rows),
            tokens=made.tokens + int((rows.ends - rows.starts).sum()),
            is_complete=number + 1 == pool.made.parts,
        )
        save_json(asdict(made), folder / PROGRESS_FILE)
        report(Event(folder.name, made.parts / pool.made.parts, f"{made.rows:,} rows with {made.tokens:,} tokens"))
    return True


class Pool:
    """The rows of a folder that `sample_pool` or `rewrite_pool` filled. Reads from the disk; changes nothing."""

    def __init__(self, folder: Path) -> None:
        self.made = _read(folder)
        if not self.made.is_complete:
            raise ValueError(f"the pool in {folder} is not finished; sample it first")
        names = [_part(folder, number) for number in range(self.made.parts)]
        self._parts = [Rollout(**load_tensors(path, is_mapped=True)) for path in names]
        self._firsts = np.cumsum([0, *(len(part) for part in self._parts)])

    def __len__(self) -> int:
        return self.made.rows

    @property
    def row_length(self) -> int:
        """Tokens of a row, with what follows its end."""
        return self._parts[0].ids.shape[1]

    @property
    def parts(self) -> tuple[Rollout, ...]:
        """The rows as they were stored; pages are read when used."""
        return tuple(self._parts)

    def take(self, rows: NDArray[np.int64]) -> Rollout:
        """The rows of those numbers, in that order, in memory of their own."""
        where = np.searchsorted(self._firsts, rows, side="right") - 1
        offsets = rows - self._firsts[where]
        pieces = [
            self._parts[part].take(torch.tensor([offset]))
            for part, offset in zip(where.tolist(), offsets.tolist(), strict=True)
        ]
        return concatenate(pieces)


def _share(made: _Made, plan: PoolPlan) -> float:
    """The share of the budget that is used; it may exceed 1."""
    budgets = ((made.tokens, plan.tokens), (made.parts, plan.batches), (made.used_s / 60.0, plan.minutes))
    return next(used / budget for used, budget in budgets if budget is not None)


def _sort_over(plan: PoolPlan) -> int:
    """Batches that are sorted together: no more than the pool will have, or a small pool would lack some lengths."""
    if plan.batches is not None:
        return min(BATCHES_SORTED, plan.batches)
    if plan.tokens is None:
        return BATCHES_SORTED
    return max(1, min(BATCHES_SORTED, plan.tokens // (plan.rows * plan.row_length)))


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.pt"


def _read(folder: Path) -> _Made:
    path = folder / PROGRESS_FILE
    return _Made(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else _Made()


def shuffled(count: int, seed: int, first: int, size: int) -> NDArray[np.int64]:
    """Places `first` to `first + size` of an endless row of shuffles of `range(count)`: int64 `[size]`.

    Raises `ValueError` when there is nothing to shuffle.
    """
    if count < 1:
        raise ValueError(f"there are {count} things to shuffle; expected at least one")
    parts: list[NDArray[np.int64]] = []
    place = first
    while place < first + size:
        epoch, offset = divmod(place, count)
        order = np.random.default_rng([seed, epoch]).permutation(count)
        parts.append(order[offset : offset + first + size - place])
        place += len(parts[-1])
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def batch_by_length(
    lengths: Sequence[int], rows: int, seed: int, number: int, sort_over: int = BATCHES_SORTED
) -> NDArray[np.int64]:
    """Which prompts batch `number` holds, int64 `[rows]`: prompts of like length, each drawn as often as the others.

    `sort_over` batches are filled from the shuffled prompts, sorted by length, cut and shuffled again: there is
    little padding, and every prompt comes once before one comes twice.
    """
    block, place = divmod(number, sort_over)
    drawn = shuffled(len(lengths), seed, block * sort_over * rows, sort_over * rows)
    drawn = drawn[np.argsort(np.asarray(lengths)[drawn], kind="stable")]
    turn = np.random.default_rng([seed, 1, block]).permutation(sort_over)[place]
    batch = drawn.reshape(sort_over, rows)[turn]
    return np.random.default_rng([seed, 2, number]).permutation(batch)
