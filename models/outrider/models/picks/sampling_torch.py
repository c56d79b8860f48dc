"""Samples from torch tensors: the hash of `sampling` bit for bit, the same picks, many rows at a time.

Logits on a CPU are pruned (`pruning_torch`). On a GPU, Triton's kernels hash, add the noise and take the maximum in one
pass (`sampling_triton`); without Triton, and on other devices, torch's operations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from outrider.models.picks.narrowing_torch import kernels, survivors
from outrider.models.picks.noise_torch import noise_bits
from outrider.models.picks.pruning_torch import Picked, best_of_all, best_scores, first_maximum
from outrider.models.picks.row_terms import RowPart, RowTerms, Way
from outrider.models.picks.sampling import SamplingParams

__all__ = ["RowTerms", "choose_rows", "noise_bits", "pick_rows"]

_CHUNK: Final = 1 << 21
"""Logits that a CPU works on at a time: where rows are truncated as a whole some 30 bytes of temporaries each, so
60 MB. Other devices have four times as many."""
_GPU_CHUNK: Final = 1 << 23
_NONE: Final = -1


def choose_rows(logits: torch.Tensor, rows: RowTerms, is_finite: torch.Tensor | None = None) -> torch.Tensor:
    """The token of each row as `sampling.pick` gives it: int64 [rows] on the logits' device, -1 for a faulty row.

    logits: float32 [rows, V]; read only. is_finite: bool [rows], for logits that processors have changed: whether the
    maximum of the model's own row is finite. A row is faulty where that is False, or where the maximum of `logits`
    itself is not finite. Does not wait for the device: no host synchronisation on CUDA. Memory for temporaries does not
    grow with the number of rows.
    """
    tokens = torch.empty(rows.num_rows, dtype=torch.int64, device=logits.device)
    highest = torch.empty(rows.num_rows, dtype=torch.float32, device=logits.device)
    choose = _choose_on_cpu if logits.device.type == "cpu" else _choose_on_device
    for part in rows.parts:
        for piece in part.pieces(_rows_together(logits, part)):
            tokens[piece.rows], highest[piece.rows] = choose(logits[piece.rows], piece)
    is_fine = highest.isfinite()  # a NaN counts as the maximum
    if is_finite is not None:
        is_fine &= is_finite
    return tokens.where(is_fine, _NONE)


def _rows_together(logits: torch.Tensor, part: RowPart) -> int:
    if isinstance(part.rows, slice) and part.way in (Way.GREEDY, Way.PLAIN) and kernels(logits.device) is not None:
        return len(logits)  # nothing is made that is as wide as they are
    chunk = _CHUNK if logits.device.type == "cpu" else _GPU_CHUNK
    if part.is_common and kernels(logits.device) is not None:
        chunk *= 4  # 8 bytes of temporaries each
    return max(1, chunk // logits.shape[1])


def _choose_on_cpu(logits: torch.Tensor, part: RowPart) -> Picked:
    return first_maximum(logits) if part.way is Way.GREEDY else best_scores(logits, part)


def _choose_on_device(logits: torch.Tensor, part: RowPart) -> Picked:
    is_whole = part.way in (Way.GREEDY, Way.PLAIN)
    fast = kernels(logits.device)
    if fast is not None and not is_whole and part.is_common:
        values, highest = fast.truncated(logits, part)
        return Picked(fast.best_scores(values, part)[0], highest)
    values = logits if is_whole else logits.masked_fill(~survivors(logits, part).is_kept, -torch.inf)
    if fast is not None:
        tokens, highest = fast.best_scores(values, part)
        return Picked(tokens, highest if is_whole else logits.amax(1))
    if part.way is Way.GREEDY:
        tokens = logits.argmax(1)
        return Picked(tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1))
    return Picked(best_of_all(values, part), logits.amax(1))


def pick_rows(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """The token at each row's absolute position, as `sampling.pick` gives it; logits float32 [rows, V].

    None for a row whose maximum is not finite. Waits for the device.
    """
    tokens = choose_rows(logits, RowTerms.of(params, positions, None, logits.device)).tolist()
    return [None if token == _NONE else token for token in tokens]
