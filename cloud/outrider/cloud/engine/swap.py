"""Moves the blocks of parked prefixes between the KV cache and the disk, and knows whose are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.cache import ParkedPrefix
from outrider.cloud.engine.config import SpillConfig
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.engine.spill import SpillStore
from outrider.cloud.engine.spill_file import Spilled, SpillTarget
from outrider.cloud.seam import Totals
from outrider.models.errors import ConfigError
from outrider.models.faults import log_fault
from outrider.models.runtimes.base import BatchRuntime, BlockRuntime

Blocks = NDArray[np.uint8]

_LOAD_S: Final = 5.0
"""For blocks to come from disk; then their tokens run."""


class BlockSwap:
    """Of one engine, on its thread. store: None where nothing is kept on disk.

    loading: sequences whose blocks are read, and until when at most.
    """

    def __init__(
        self, runtime: BatchRuntime, config: SpillConfig | None, totals: Totals, clock: Callable[[], float]
    ) -> None:
        """Raises ConfigError for a runtime whose blocks cannot be read, or a directory that cannot be used."""
        self.store = None if config is None else _open_store(runtime, config, totals)
        self._runtime: Any = runtime  # a BlockRuntime where there is a store
        self._totals = totals
        self._clock = clock
        self.loading: dict[int, tuple[SequenceState, float]] = {}

    def put(self, prefix: ParkedPrefix) -> None:
        """Copies the full blocks of a parked prefix for the thread that writes them.

        The last block is left out where it is not full: its other slots may hold another owner's.
        """
        num_blocks = prefix.computed // self._runtime.block_size
        if self.store is None or num_blocks == 0 or not self.store.has_room(num_blocks):
            return
        try:
            data = self._runtime.read_blocks(prefix.blocks[:num_blocks])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a runtime may raise anything
            self._totals.faults += 1
            log_fault(error)
            return
        self.store.put(prefix.owner, prefix.name, prefix.tokens, data, self._clock() - prefix.since)

    def load(self, sequence: SequenceState, spilled: Spilled, done: Callable[[Blocks | None], None]) -> None:
        """Has the blocks of a spilled prefix read; `done` gets them on the store's thread."""
        assert self.store is not None, "it has found the prefix"
        self.loading[sequence.id] = sequence, self._clock() + _LOAD_S
        self.store.load(sequence.owner, spilled, done)

    def take(self, sequence: SequenceState, data: Blocks | None) -> bool:
        """Keeps the blocks for `restore`; False where they come too late, or after the sequence's end."""
        if self.loading.pop(sequence.id, None) is None:
            return False
        sequence.stored = data
        return True

    def late(self, now: float) -> list[SequenceState]:
        """The sequences whose blocks have not come in time."""
        late = [sequence for sequence, until in self.loading.values() if until <= now]
        if late and self.store is not None:
            self.store.gave_up(len(late))
        return late

    def seconds_to_late(self, now: float) -> float | None:
        """Seconds until `late` has a sequence, at most."""
        return max(0.0, min(until for _, until in self.loading.values()) - now) if self.loading else None

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has ended."""
        self.loading.pop(sequence.id, None)
        sequence.stored = None

    def restore(self, sequence: SequenceState) -> None:
        """Writes the blocks that were read for a sequence into those that it has just got."""
        data, sequence.stored = sequence.stored, None
        if data is None or self.store is None:
            return
        size = self._runtime.block_size
        first, end = sequence.computed // size, min(len(data), (len(sequence.tokens) - 1) // size)
        if first >= end:
            return
        try:
            self._runtime.write_blocks(sequence.blocks[first:end], data[first:end])
            sequence.computed = end * size
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # what these blocks hold is not known: their tokens run
            self._totals.faults += 1
            log_fault(error)


def _open_store(runtime: BatchRuntime, config: SpillConfig, totals: Totals) -> SpillStore:
    reason = runtime.why_no_blocks if isinstance(runtime, BlockRuntime) else "the runtime's KV cache cannot be read"
    if reason is not None or not isinstance(runtime, BlockRuntime):
        raise ConfigError(f"--spill-dir keeps the KV cache, and {reason}; leave it out")
    limits = runtime.limits
    target = SpillTarget(
        config.target,
        runtime.block_layout,
        runtime.block_size,
        runtime.block_bytes,
        limits.vocab_size,
        limits.max_positions,
    )
    return SpillStore(config, target, totals)
