"""Runs a `SequenceRuntime` on OpenVINO paged attention: the device's draft on CPU or Intel GPU.

The sequence always has the blocks 0, 1, 2, ..., so rollback is a smaller past length. A draft is so small that the call
costs as much as the model: the tensors are bound once, over numpy memory that changes in place, and are bound again
only when the number of new tokens changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import RuntimeOptions, telling_of_memory
from outrider.models.runtimes.one_sequence import OneSequence
from outrider.models.runtimes.openvino_graph import load_paged_model, shared_tensor


class OpenVinoSequenceRuntime(OneSequence):
    """One sequence of at most `limits.max_positions` tokens."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the IR at `path` (directory or .xml); raises as `load_paged_model` does.

        The cache is sized for the longest sequence; pages that no token has reached take no memory on CPU.
        """
        model = load_paged_model(path, options, tree_masks=False)
        super().__init__(model.limits)
        self._gathers_rows = model.gathers_rows
        self._request: Any = model.request
        longest = model.limits.max_positions
        num_blocks = -(-longest // model.block_size)
        self._num_bound = (0, 0)  # new tokens and rows of the bound tensors
        with telling_of_memory(longest):
            self._caches: list[Any] = model.bind_cache(num_blocks)
            self._ids, self._positions, self._rows = (np.zeros(longest, np.int64) for _ in range(3))
        self._past = np.zeros(1, np.int32)
        self._begins = np.zeros(2, np.int32)
        self._context = np.zeros((), np.int32)
        # Kept alive here: the request uses their memory but does not own the arrays.
        self._table = np.arange(num_blocks, dtype=np.int32), np.array([0, num_blocks], np.int32)
        for name, array in (
            ("past_lens", self._past),
            ("subsequence_begins", self._begins),
            ("max_context_len", self._context),
            ("block_indices", self._table[0]),
            ("block_indices_begins", self._table[1]),
        ):
            self._request.set_tensor(name, shared_tensor(array))

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the next call.

        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than `limits.max_positions`.
        """
        row: NDArray[np.float32] = self._run(tokens, 1)[0]
        return row

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32."""
        return self._run(tokens, len(tokens))

    def _run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        self._check_new(tokens)
        num_new = len(tokens)
        past, end = self._length, self._length + num_new
        if self._num_bound != (num_new, num_rows):
            self._bind(num_new, num_rows)
        self._ids[:num_new] = tokens
        self._positions[:num_new] = range(past, end)
        self._rows[:num_rows] = range(num_new - num_rows, num_new)
        self._past[0] = past
        self._begins[1] = num_new
        self._context[...] = end
        self._request.infer(share_outputs=True)
        self._length = end
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        return logits.reshape(-1, self._limits.vocab_size)[-num_rows:]

    def _bind(self, num_new: int, num_rows: int) -> None:
        self._request.set_tensor("input_ids", shared_tensor(self._ids[:num_new]))
        self._request.set_tensor("position_ids", shared_tensor(self._positions[:num_new]))
        if self._gathers_rows:
            self._request.set_tensor("logit_rows", shared_tensor(self._rows[:num_rows]))
        self._num_bound = (num_new, num_rows)

    def close(self) -> None:
        """Releases model and cache; safe to call twice."""
        self._request = None
        self._caches = []
