"""What an engine meets when its runtime or a sink fails."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine_harness import VOCAB, Collector

from outrider.cloud.seam import Event
from outrider.models.runtimes.base import SequenceSlice

TIMEOUT_S = 60.0
BAD = 63
"""A prompt that ends in this token makes `forward` raise in the tests that say so."""
PROMPTS = [[(7 * i + j * j) % (VOCAB - 1) for j in range(3 + 5 * i)] for i in range(8)]


class Panic(BaseException):
    """As a Rust panic reaches Python: no Exception."""


def raises_on_bad(batch: Sequence[SequenceSlice]) -> None:
    """Raises for a batch with a slice that ends in BAD."""
    if any(item.tokens[-1] == BAD for item in batch):
        raise Panic("cannot run this token")


class Breaking(Collector):
    """Raises at its first commit."""

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if self.end is None:
            raise Panic("a sink that raises")
