"""The made-up language of `fake_runtime`, from a runtime that picks as the torch runtime does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tests.fake_runtime import FakeBatchRuntime

from outrider.models.processors.chooser import PickedRow
from outrider.models.processors.step_choices import StepChoices
from outrider.models.runtimes.base import Ask, Beside, SequenceSlice


class PickingRuntime(FakeBatchRuntime):
    """Picks tokens itself, as a runtime on a GPU does. is_over: whether its device is done, once it has its orders."""

    is_over: Callable[[], bool] = staticmethod(lambda: False)

    def forward_picks(self, batch: Sequence[SequenceSlice], ask: Ask, beside: Beside) -> list[PickedRow]:
        """As `runtimes.base.PickingRuntime.forward_picks`."""
        rows = torch.tensor(self.forward(batch))
        choices = StepChoices(ask(), rows.shape[1], rows.device)
        return choices.found(rows, lambda: beside(self.is_over)) if len(rows) else []
