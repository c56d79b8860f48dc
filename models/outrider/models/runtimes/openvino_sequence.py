"""`SequenceRuntime` on OpenVINO paged attention: the device's draft on CPU or Intel GPU.

One sequence whose blocks are 0, 1, 2, ... for good, so rollback is a smaller past length. Drafts are small
enough that the call costs as much as the model: the tensors are bound once, over numpy memory that is changed
in place, and only the number of new tokens, when it changes, binds new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import ModelLimits, RuntimeOptions, telling_of_memory
from outrider.models.runtimes.openvino_graph import load_paged_model, shared_tensor


class OpenVinoSequenceRuntime:
    """One sequence of at most `limits.max_positions` tokens."""

    def __init__(self, path: Path, options: RuntimeOptions) -> None:
        """Loads the IR at `path` (directory or .xml); raises as `load_paged_model` does.

        The cache is sized for the longest sequence; pages that no token reached take no memory on CPU.
        """
        model = load_paged_model(path, options, tree_masks=False)
        self._limits = model.limits
        self._gathers_rows = model.gathers_rows
        self._request: Any = model.request
        longest = model.limits.max_positions
        num_blocks = -(-longest // model.block_size)
        self._length = 0
        self._num_bound = (0, 0)  # new tokens and rows that the bound tensors have room for
        with telling_of_memory(longest):
            self._caches: list[Any] = model.bind_cache(num_blocks)
            self._ids, self._positions, self._rows = (np.zeros(longest, np.int64) for _ in range(3))
        self._past = np.zeros(1, np.int32)
        self._begins = np.zeros(2, np.int32)
        self._context = np.zeros((), np.int32)
        # Kept, although nothing here reads them: the request holds their memory, not the arrays themselves.
        self._table = np.arange(num_blocks, dtype=np.int32), np.array([0, num_blocks], np.int32)
        for name, array in (
            ("past_lens", self._past),
            ("subsequence_begins", self._begins),
            ("max_context_len", self._context),
            ("block_indices", self._table[0]),
            ("block_indices_begins", self._table[1]),
        ):
            self._request.set_tensor(name, shared_tensor(array))

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary size and longest sequence."""
        return self._limits

    @property
    def length(self) -> int:
        """Tokens now in the cache."""
        return self._length

    def extend(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends at least one token; returns the logits after the last, [vocab_size] float32, reused by the
        next call.

        Blocking, without the GIL. Raises ConfigError when the sequence would be longer than
        `limits.max_positions`.
        """
        row: NDArray[np.float32] = self._run(tokens, 1)[0]
        return row

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`, with the logits after every new token: [len(tokens), vocab_size] float32."""
        return self._run(tokens, len(tokens))

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` at most the present one. Touches no tensor."""
        assert 0 <= length <= self._length, f"truncate to {length} of {self._length} tokens"
        self._length = length

    def _run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        num_new = len(tokens)
        past, end = self._length, self._length + num_new
        assert num_new and min(tokens) >= 0 and max(tokens) < self._limits.vocab_size, f"token ids {tokens}"
        if end > self._limits.max_positions:
            raise ConfigError(
                f"{end} tokens do not fit the {self._limits.max_positions} positions of this runtime; "
                "stop earlier or raise max_positions"
            )
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
