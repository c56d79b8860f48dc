"""What a model is tried with for `--exact bitwise` when it is loaded, over the made-up language: exact, then broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.fake_runtime import FakeBatchRuntime

from outrider.models.runtimes.base import SequenceSlice
from outrider.models.runtimes.bitwise_check import blocks_needed, other_rows

VOCAB = 64
BROKEN: dict[str, Callable[[Sequence[SequenceSlice]], bool]] = {
    "in one step with all before": lambda batch: len(batch[0].tokens) > 32,
    "beside another text": lambda batch: len(batch) > 1 and batch[1].mask is None and batch[0].mask is None,
    "in a tree": lambda batch: batch[0].mask is not None,
}


@pytest.mark.parametrize("name", [None, *BROKEN])
def test_rows_that_depend_on_their_company_are_found(name: str | None) -> None:
    """By the last bit of one logit."""
    runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=16, num_blocks=blocks_needed(40, 16))

    def forward(batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        rows = runtime.forward(batch)
        if name is not None and BROKEN[name](batch):
            rows[:, 3] = np.nextafter(rows[:, 3], np.float32(9.0))
        return rows

    assert other_rows(forward, VOCAB, 16, before=40, has_trees=True) == name
    assert other_rows(forward, VOCAB, 16, before=40, has_trees=False) == (None if name == "in a tree" else name)
