"""Opens what was exported in the runtime that will run it.

Drafts run behind `SequenceRuntime`, targets behind `BatchRuntime`; both are shown here as steps on one
sequence, which is what the parity check drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.export.parity import ParityReference, check_parity
from outrider.models.manifest import Format, Parity, Precision, Role
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceRuntime, SequenceSlice
from outrider.models.telemetry import disable_openvino_telemetry


class _RowsRuntime(SequenceRuntime, Protocol):
    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]: ...


def open_draft(path: Path, options: RuntimeOptions) -> _RowsRuntime:
    """The draft of directory `path`, in OpenVINO."""
    disable_openvino_telemetry()
    from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime

    return OpenVinoSequenceRuntime(path, options)


def open_target(path: Path, format: Format, options: RuntimeOptions) -> BatchRuntime:
    """The target of directory `path`, in OpenVINO or torch as its format says."""
    if format == "safetensors":
        from outrider.models.runtimes.torch_paged import TorchPagedRuntime

        return TorchPagedRuntime(path, options)
    disable_openvino_telemetry()
    from outrider.models.runtimes.openvino_paged import OpenVinoPagedRuntime

    return OpenVinoPagedRuntime(path, options)


def check_export(
    path: Path,
    *,
    role: Role,
    format: Format,
    precision: Precision,
    reference: ParityReference,
    options: RuntimeOptions,
) -> Parity:
    """The parity check of the files in `path`. Raises ExportError if they fail it."""
    if role == "draft":
        with closing(open_draft(path, options)) as draft:
            return check_parity(SequenceSteps(draft), reference, precision, _class_name(draft))
    with closing(open_target(path, format, options)) as target:
        return check_parity(BatchSteps(target), reference, precision, _class_name(target))


def _class_name(runtime: object) -> str:
    return type(runtime).__name__


class SequenceSteps:
    """Steps on a `SequenceRuntime` that can give every row."""

    def __init__(self, runtime: _RowsRuntime) -> None:
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
