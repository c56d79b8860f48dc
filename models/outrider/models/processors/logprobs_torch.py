"""Computes the log-probabilities that requests report, of many rows at once on their device: `logprobs_of` in torch.

No row is sorted. The likeliest tokens lie in the blocks with the highest maxima: as many blocks as tokens hold them
all. Ties go to lower ids, blocks included, so what is found is the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.processors.rows_torch import parts_of, rows_at

_BLOCK: Final = 128
_LOW: Final = 0xFFFFFFFF
_LOG2_E: Final = math.log2(math.e)


class RowLogprobs:
    """Of some rows of a step. Reads them before processors change them, and once more for the picks."""

    def __init__(self, logits: torch.Tensor, rows: torch.Tensor, count: int) -> None:
        """logits: float32 [rows, V], contiguous. rows: int64 [n], which of them, ascending; one at least. count: of
        likeliest tokens.
        """
        size, device = logits.shape[1], logits.device
        count = min(count, size)
        parts = [_summaries(rows_at(logits, index)) for _, index in parts_of(logits, rows)]
        highest, sums = (torch.cat(each) for each in zip(*parts, strict=True))
        self._norms = highest.amax(1).to(torch.float64) + sums.to(torch.float64).log()
        firsts = _BLOCK * _best(highest, torch.arange(highest.shape[1], device=device).expand_as(highest), count)
        # A last block that is not whole is read from further left.
        width = min(_BLOCK, size)
        starts = firsts.clamp(max=size - width).unsqueeze(2)
        runs = logits.view(-1).unfold(0, width, 1)
        values = runs.index_select(0, (rows[:, None, None] * size + starts).flatten()).view(*firsts.shape, width)
        ids = starts + torch.arange(width, device=device)
        values = values.masked_fill_(ids < firsts.unsqueeze(2), -torch.inf).flatten(1)
        self._ids = _best(values, ids.flatten(1), count)
        self._values = logits.view(-1).index_select(0, (rows.unsqueeze(1) * size + self._ids).flatten())

    def of(self, own: torch.Tensor) -> torch.Tensor:
        """float64 [n, 1 + 2 count]: the logprob of each row's pick, those of the likeliest tokens, and their ids.

        own: the model's own logits of the picks, [n]. The error is under 1e-5.
        """
        values = torch.cat([own.unsqueeze(1), self._values.view(self._ids.shape)], 1).to(
            torch.float64
        ) - self._norms.unsqueeze(1)
        return torch.cat([values, self._ids.to(torch.float64)], 1)


def token_logprobs(token: int, row: Sequence[float], count: int) -> TokenLogprobs:
    """Of a token that was picked, from a row of `RowLogprobs.of`. count: of likeliest tokens, at most those there."""
    most = len(row) // 2
    pairs = zip(row[1 + most : 1 + most + count], row[1 : 1 + most], strict=False)
    return TokenLogprobs(token, row[0], tuple((int(each), value) for each, value in pairs))


def _summaries(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each block, float32 [n, blocks], and of each row the sum of exp(logit - maximum), [n]."""
    whole = rows.shape[1] // _BLOCK * _BLOCK
    highest = rows[:, :whole].view(len(rows), whole // _BLOCK, _BLOCK).amax(2)
    if whole < rows.shape[1]:
        highest = torch.cat([highest, rows[:, whole:].amax(1, keepdim=True)], 1)
    # Powers of 2: on a CPU torch's exp takes three times as long, and forty times where the result underflows.
    return highest, (rows - highest.amax(1, keepdim=True)).mul_(_LOG2_E).exp2_().sum(1)


def _best(values: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the `count` highest values of each row, best first, the lower id first of two that are equal."""
    bits = (values + 0.0).view(torch.int32)  # both zeros are equal
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of the floats, as integers
    keys = (order.to(torch.int64) << 32) | (_LOW - ids)
    return _LOW - (keys.topk(min(count, keys.shape[1]), 1).values & _LOW)
