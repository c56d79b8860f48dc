"""The made-up language of `fake_runtime`, from a runtime that picks as the torch runtime does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tests.fake_runtime import FakeBatchRuntime

from outrider.models.processors.chooser import PickedRow
from outrider.models.processors.step_choices import StepChoices
from outrider.models.processors.text_rows import AskedRows
from outrider.models.runtimes.base import SequenceSlice


class PickingRuntime(FakeBatchRuntime):
    """Picks tokens itself, as a runtime on a GPU does."""

    def forward_picks(self, batch: Sequence[SequenceSlice], ask: Callable[[], Sequence[AskedRows]]) -> list[PickedRow]:
        """As `runtimes.base.PickingRuntime.forward_picks`."""
        rows = torch.tensor(self.forward(batch))
        return StepChoices(ask(), rows.shape[1], rows.device).found(rows) if len(rows) else []
