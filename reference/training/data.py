"""Encodes files as token streams, and cuts windows from them for training and scoring. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus import SourceFile

SEPARATOR_ID = 0
"""The id of `vocabulary.END_OF_TEXT`."""


def encode_files(tokenizer: Tokenizer, files: Iterable[SourceFile], seed: int | None = None) -> NDArray[np.uint16]:
    """All files as one stream of ids `[num_tokens]` uint16, each file preceded by the separator.

    With a `seed` the files are shuffled; without one they keep their order.
    """
    files = list(files)
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(files))
        files = [files[index] for index in order]
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([file.text for file in files]):
        stream.append(SEPARATOR_ID)
        stream.extend(encoding.ids)
    return np.asarray(stream, dtype=np.uint16)


class Windows:
    """Windows of `length + 1` tokens over a stream: each epoch shifts the cuts and reshuffles the windows.

    A batch is a pure function of its index, so a resumed run continues with new data.
    """

    def __init__(self, stream: NDArray[np.uint16], length: int, seed: int) -> None:
        if len(stream) < 2 * length + 2:
            raise ValueError(f"a stream of {len(stream)} tokens is too short for windows of {length}")
        self._stream = stream
        self._length = length
        self._seed = seed
        self._per_epoch = (len(stream) - length - 1) // length
        self._epoch = -1
        self._starts: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def batch(self, index: int, size: int) -> Tensor:
        """The `index`-th batch: ids `[size, length + 1]` int64. Inputs are `[:, :-1]`, labels `[:, 1:]`."""
        rows = [self._row(index * size + offset) for offset in range(size)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _row(self, number: int) -> NDArray[np.uint16]:
        epoch, position = divmod(number, self._per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, epoch])
            shift = int(random.integers(self._length))
            self._starts = random.permutation(self._per_epoch) * self._length + shift
            self._epoch = epoch
        start = int(self._starts[position])
        return self._stream[start : start + self._length + 1]


def scoring_windows(stream: NDArray[np.uint16], length: int) -> Tensor:
    """The stream cut into consecutive windows, ids `[num_windows, length + 1]` int64; the remainder is dropped."""
    count = (len(stream) - 1) // length
    rows = np.stack([stream[start * length : (start + 1) * length + 1] for start in range(count)])
    return torch.from_numpy(rows.astype(np.int64))
