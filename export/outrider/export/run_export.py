"""Opens what was exported in the runtime that will run it.

Drafts run behind `SequenceRuntime`, targets behind `BatchRuntime`; both are shown here as steps on one
sequence, which is what the parity check drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from outrider.export.parity import ParityReference, check_parity
from outrider.models.manifest import Parity, Precision, Role
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceRuntime, SequenceSlice


class RowsRuntime(SequenceRuntime, Protocol):
    """A `SequenceRuntime` that can give the logits after every new token, as a check needs them."""

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`: [len(tokens), vocab_size] float32."""
        ...


def open_draft(path: Path, options: RuntimeOptions) -> RowsRuntime:
    """The draft of directory `path`. Raises as `open_sequence_runtime` does."""
    return cast(RowsRuntime, open_sequence_runtime("openvino", path, options))


def open_target(path: Path, kind: str, options: RuntimeOptions) -> BatchRuntime:
    """The target of directory `path`, in the runtime named `kind`. Raises as `open_batch_runtime` does."""
    return open_batch_runtime(kind, path, options)


def check_export(
    path: Path,
    *,
    role: Role,
    runtime: str,
    precision: Precision,
    reference: ParityReference,
    options: RuntimeOptions,
) -> Parity:
    """The parity check of the files in `path`. Raises ExportError if they fail it."""
    if role == "draft":
        with closing(open_draft(path, options)) as draft:
            return check_parity(SequenceSteps(draft), reference, precision, type(draft).__name__)
    with closing(open_target(path, runtime, options)) as target:
        return check_parity(BatchSteps(target), reference, precision, type(target).__name__)


class SequenceSteps:
    """Steps on a `SequenceRuntime` that can give every row."""

    def __init__(self, runtime: RowsRuntime) -> None:
        self._runtime = runtime

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens; the logits after each, [len(tokens), vocab_size]."""
        return self._runtime.extend_rows(tokens)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        self._runtime.truncate(length)


class BatchSteps:
    """Steps on a `BatchRuntime`, whose blocks are used from the last to the first: order must not matter."""

    def __init__(self, runtime: BatchRuntime) -> None:
        self._runtime = runtime
        self._length = 0

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens; the logits after each, [len(tokens), vocab_size]."""
        past, self._length = self._length, self._length + len(tokens)
        num_blocks = -(-self._length // self._runtime.block_size)
        last = self._runtime.num_blocks - 1
        blocks = range(last, last - num_blocks, -1)
        return self._runtime.forward([SequenceSlice(tokens, past, blocks, len(tokens))])

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        self._length = length
