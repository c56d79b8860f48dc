"""Chooses the tokens of a step's rows on the device that holds them, those that processors change and the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from outrider.models.picks.narrowing_torch import survivors
from outrider.models.picks.noise_torch import gumbel_of, noise_words
from outrider.models.picks.row_terms import RowPart, RowTerms, Way
from outrider.models.picks.sampling import MAX_GUMBEL, SamplingParams
from outrider.models.picks.sampling_torch import choose_rows
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.rows_torch import RowChanges

_NONE: Final = -1
_SLACK: Final = 1e-3
_TOGETHER: Final = 1 << 21
"""Listed logits that are picked from at a time."""


class RowChoices:
    """What decides the tokens of a step's rows, before their logits are there."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        narrowings: Sequence[ProcessorOptions | None],
        changes: RowChanges | None,
        device: torch.device,
    ) -> None:
        """One entry a row in each list, as of `RowTerms.of`. changes: of the same rows."""
        self._changes = changes
        self._lists = [] if changes is None else changes.lists

        def terms(rows: Sequence[int]) -> RowTerms:
            own = [params[row] for row in rows], [positions[row] for row in rows], [narrowings[row] for row in rows]
            return RowTerms.of(*own, device)

        listed = [each.rows.tolist() for each in self._lists]  # on a CPU, so nothing waits
        self._of_lists = [terms(rows) for rows in listed]
        if listed:
            others = sorted(set(range(len(params))).difference(*listed))
            index = torch.tensor(others, dtype=torch.int64)
            parts = (replace(part, rows=_run(index[part.rows])) for part in terms(others).parts)
            self._terms = RowTerms(len(params), tuple(parts))
        else:
            self._terms = RowTerms.of(params, positions, narrowings, device)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """As `choose_rows`, after the changes: int64 [rows]. logits: float32 [rows, V], contiguous; changed."""
        is_finite = None if self._changes is None else self._changes.apply(logits)
        tokens = choose_rows(logits, self._terms, is_finite)
        found = [] if self._changes is None else self._changes.listed(logits)
        for each, terms, values in zip(self._lists, self._of_lists, found, strict=True):
            picks = torch.empty(len(values), dtype=torch.int64)
            for part in terms.parts:
                for piece in part.pieces(max(1, _TOGETHER // values.shape[1])):
                    picks[piece.rows] = _best(values[piece.rows], each.ids[piece.rows], piece)
            is_fine = values.amax(1).isfinite()
            if is_finite is not None:
                is_fine &= is_finite[each.rows]
            tokens.index_copy_(0, each.rows, picks.where(is_fine, _NONE))
        return tokens


def _run(rows: torch.Tensor) -> slice | torch.Tensor:
    """The same rows, ascending, as a slice where they are one."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows


def _best(values: torch.Tensor, ids: torch.Tensor, part: RowPart) -> torch.Tensor:
    """The picks of rows of which few ids are left, int64 [n]; values, ids: [n, K], ids ascending. On a CPU."""
    if part.way not in (Way.GREEDY, Way.PLAIN):
        values = values.masked_fill(survivors(values, part).is_kept.logical_not_(), -torch.inf)
    leader = values.argmax(1, keepdim=True)  # the first of equal ones
    if part.way is Way.GREEDY:
        return ids.gather(1, leader).squeeze(1)
    # As `sampling.pick`: no token can win that is so far under the leader's own score.
    lead = gumbel_of(noise_words(part.low, part.high, ids.gather(1, leader)))
    floor = values.gather(1, leader) - (MAX_GUMBEL + _SLACK - lead) * part.temperature
    row, place = (values >= floor).nonzero().unbind(1)
    own = ids[row, place]
    scores = values[row, place].double() / part.temperature.squeeze(1)[row]
    scores += gumbel_of(noise_words(part.low.squeeze(1)[row], part.high.squeeze(1)[row], own))
    best = torch.full((len(values),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, row, scores, "amax")
    is_best = scores == best[row]
    found = torch.full((len(values),), torch.iinfo(torch.int64).max)
    return found.scatter_reduce_(0, row[is_best], own[is_best], "amin")
