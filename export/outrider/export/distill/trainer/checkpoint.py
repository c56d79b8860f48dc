"""Stores the state of a training run: all that is needed to continue, and the best weights so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.export.distill.trainer import parallel
from outrider.export.distill.trainer.files import load_tensors, save_tensors
from outrider.export.distill.trainer.optim import Budget
from outrider.export.distill.trainer.training import Trainer
from outrider.export.distill.trainer.validation import Agreement


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of the average of the weights on the validation rows, after `step` steps."""

    step: int
    agreement: Agreement


class Checkpoint:
    """Saves and restores a `Trainer`, its budget, and the results on validation rows.

    Without a path nothing is written and the best weights are kept in memory.
    """

    def __init__(self, path: Path | None, trainer: Trainer, budget: Budget) -> None:
        self.judged: list[Judged] = []
        self._path = path
        self._trainer = trainer
        self._budget = budget
        self._best_weights: dict[str, Tensor] | None = None

    @property
    def best(self) -> Judged | None:
        """The trained weights with the highest match bound, the earliest of equals; the start does not count."""
        trained = [found for found in self.judged if found.step]
        return max(trained, key=lambda found: found.agreement.mean_match, default=None)

    def resume(self) -> bool:
        """Restores the state on the disk, if there is one; returns whether that run was finished."""
        if self._path is None or not self._path.exists():
            return False
        state = load_tensors(self._path)
        self._trainer.student.load_state_dict(state["model"])
        self._trainer.step, self._budget.used_s = state["step"], state["used_s"]
        self.judged = [Judged(found["step"], Agreement(**found["agreement"])) for found in state["judged"]]
        if not state["is_final"]:
            self._trainer.optimizer.load_state_dict(state["optimizer"])
            self._trainer.average.load_state_dict(state["average"])
        return bool(state["is_final"])

    def add(self, found: Judged) -> bool:
        """Adds a result, while the student has the average's weights; returns whether it is the best so far."""
        self.judged.append(found)
        if self.best is not found:
            return False
        weights = self._trainer.student.state_dict()
        if self._path is None:
            self._best_weights = {name: tensor.clone() for name, tensor in weights.items()}
        elif parallel.rank() == 0:
            save_tensors(weights, self._best_path(found))
        return True

    def save(self) -> None:
        """Writes the state of an unfinished run."""
        self._write(
            {
                "optimizer": self._trainer.optimizer.state_dict(),
                "average": self._trainer.average.state_dict(),
                "is_final": False,
            }
        )

    def finish(self) -> None:
        """Gives the student the best judged weights, or else the average's, and writes them."""
        if self.best is None:
            self._trainer.average.copy_to(self._trainer.student)
        else:
            self._trainer.student.load_state_dict(self._best_weights or load_tensors(self._best_path(self.best)))
        self._write({"is_final": True})

    def _write(self, more: dict[str, Any]) -> None:
        if self._path is None or parallel.rank() != 0:
            return
        state = {
            "model": self._trainer.student.state_dict(),
            "step": self._trainer.step,
            "used_s": self._budget.elapsed_s(),
            "pool_rows": self._trainer.pool_rows * parallel.size(),
            "judged": [{"step": found.step, "agreement": asdict(found.agreement)} for found in self.judged],
        }
        save_tensors(state | more, self._path)
        kept = None if self.best is None or more["is_final"] else self._best_path(self.best)
        for path in self._path.parent.glob(f"{self._path.stem}.best-*.pt"):
            if path != kept:
                path.unlink()

    def _best_path(self, found: Judged) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.stem}.best-{found.step}.pt")
