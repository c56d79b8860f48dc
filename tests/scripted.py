"""A target that writes what a test says: the made-up language, but for the positions of a script."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import EOS_ID, fake_tokenizer

from outrider.models.runtimes.base import SequenceSlice


class ScriptedRuntime(FakeBatchRuntime):
    """Writes `text` and the end token after any prompt that ends in `after`."""

    def __init__(self, text: str, after: str) -> None:
        super().__init__(vocab_size=fake_tokenizer().size)
        self._script = [*fake_tokenizer().encode(text), EOS_ID]
        self._after = fake_tokenizer().encode(after)

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """As the made-up language's, with the script's token far ahead of all others."""
        rows = super().forward(batch)
        at = 0
        for item in batch:
            begin = self._begin_of(item)
            for row in range(item.num_rows):
                index = len(item.tokens) - item.num_rows + row
                position = item.past + index if item.positions is None else item.positions[index]
                written = min(max(0, position + 1 - begin), len(self._script) - 1)
                rows[at + row][self._script[written]] = 1e4
            at += item.num_rows
        return rows

    def _begin_of(self, item: SequenceSlice) -> int:
        """Where the script begins: behind the last `after` in what the cache holds, and in the new tokens."""
        slots = self._slots.reshape(-1, self.block_size)[list(item.blocks)].reshape(-1)
        tokens = [*(slots[: item.past] >> np.uint64(32)).tolist(), *item.tokens]
        size = len(self._after)
        return next((end for end in range(len(tokens), 0, -1) if tokens[end - size : end] == self._after), 0)
