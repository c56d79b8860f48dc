"""Picks from rows on a CPU without looking at most of their logits a second time. Exact.

One pass over a row takes the maximum of each group of logits. A group whose maximum is under a floor holds no token
that matters. What is left is gathered, and all further work is on that. The floor is

* of a plain row: what no ordinary variate lifts over a score that is known to be reached. Tokens with a variate that is
  not ordinary are found without hashing the vocabulary: the hash is run backwards from its highest words.
* of a truncated row: the k-th highest group, min-p's own, or a falling one, until what is above it has the mass that
  top-p and typical-p want.

A row of which too much is left is worked on as a whole, by the operations that GPUs have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from outrider.models.picks.narrowing_torch import LOWEST, Sums, relative, survivors, top_choices
from outrider.models.picks.noise_torch import gumbel_of, noise_words, signed, tokens_of_highest
from outrider.models.picks.row_terms import RowPart, Way

_SMALL: Final = 8192
"""Ids that are scored all, without pruning."""
_GROUP: Final = 8
_RUN: Final = 128
"""Neighbouring logits of which a greedy pick takes the maximum first."""
_PROBED: Final = 16
"""Groups, the highest, whose tokens are scored for the score that is known to be reached."""
_MOST_GROUPS: Final = 0.25
"""Share of a row's groups over the floor; with more, the row is worked on as a whole."""
_MOST_WHOLE: Final = 4
"""Rows that are truncated as a whole at a time."""
_STRIP: Final = 1 << 14
"""Ids per row that are worked on at a time, where that is all of them: what is made on the way stays in the cache."""
_FLOORS: Final = (1e-2, 1e-4, 1e-7)
"""Weights, relative to the row's maximum, over which the mass is searched."""
_SLACK: Final = 1e-3
"""In a score, and in a weight's logarithm: far more than the rounding of what is compared."""
_RARE_GUMBEL: Final = 6.0
_RARE_WORD: Final = math.floor(math.exp(-math.exp(-_RARE_GUMBEL)) * 2.0**32) - 1
"""One word in 404 is as high: its variate exceeds `_RARE_GUMBEL`. The others need no logarithm under the floor."""


class Picked(NamedTuple):
    """tokens: int64 [rows]; any where the maximum is not finite. highest: float32 [rows], each row's maximum."""

    tokens: torch.Tensor
    highest: torch.Tensor


def first_maximum(logits: torch.Tensor) -> Picked:
    """The lowest id with each row's maximum; logits: float32 [rows, V]."""
    num = logits.shape[1] // _RUN
    if not num:
        tokens = logits.argmax(1, keepdim=True)
    else:  # ten times as fast as an argmax of the row
        run = torch.unflatten(logits[:, : num * _RUN], 1, (num, _RUN)).amax(2).argmax(1, keepdim=True)
        last = torch.arange(num * _RUN, logits.shape[1]).expand(len(logits), -1)
        ids = torch.cat([run * _RUN + torch.arange(_RUN), last], dim=1)
        tokens = ids.gather(1, logits.gather(1, ids).argmax(1, keepdim=True))
    return Picked(tokens.squeeze(1), logits.gather(1, tokens).squeeze(1))


def best_scores(logits: torch.Tensor, part: RowPart) -> Picked:
    """The picks of rows that are not greedy; logits: float32 [rows, V], whole rows."""
    if logits.shape[1] <= _SMALL:
        is_plain = part.way is Way.PLAIN
        values = logits if is_plain else logits.masked_fill(~survivors(logits, part).is_kept, -torch.inf)
        return Picked(best_of_all(values, part), logits.amax(1))
    rows = _Rows.of(logits)
    return Picked(_PICKS[part.way](rows, part), rows.highest.squeeze(1))


def best_of_all(values: torch.Tensor, part: RowPart) -> torch.Tensor:
    """The token with the best score, int64 [rows], with no pruning; values: float32 [rows, V], -inf stands for none."""
    ids = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    return _scores(values, ids, part).argmax(1)


def _scores(values: torch.Tensor, ids: torch.Tensor, part: RowPart) -> torch.Tensor:
    """What the pick is the maximum of: float64, of the values' shape."""
    return (values.double() / part.temperature).add_(gumbel_of(noise_words(part.low, part.high, ids)))


class _Above(NamedTuple):
    """Tokens of some rows, ids ascending: all that are over a floor, but none of a row where these are too many.

    ids: int64 [rows, most]. values: float32, -inf where a row has fewer. is_whole: bool [rows]: too many.
    """

    ids: torch.Tensor
    values: torch.Tensor
    is_whole: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of logits, with the maxima of their groups. Group g of n holds the ids g, g + n, g + 2n and so on, so that
    maxima are taken element by element.

    logits: float32 [all rows, V]. peaks: float32 [rows, n]. last: int64 [rows, less than _GROUP], the ids in no group,
    which are always taken along. highest: float32 [rows, 1]. which: int64 [rows, 1], their places in `logits`; None:
    they are all of these. barred: a logit from which on tokens count as -inf, and the id that is spared, [rows, 1].
    """

    logits: torch.Tensor
    peaks: torch.Tensor
    last: torch.Tensor
    highest: torch.Tensor
    which: torch.Tensor | None = None
    barred: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, logits: torch.Tensor) -> _Rows:
        """All rows of `logits`."""
        num = logits.shape[1] // _GROUP
        peaks = torch.unflatten(logits[:, : num * _GROUP], 1, (_GROUP, num)).amax(1)
        last = torch.arange(num * _GROUP, logits.shape[1]).expand(len(logits), -1)
        highest = torch.cat([peaks.amax(1, keepdim=True), logits.gather(1, last)], dim=1).amax(1, keepdim=True)
        return cls(logits, peaks, last, highest)

    def among(self, chosen: torch.Tensor) -> _Rows:
        """Some of them; chosen: int64, their places."""
        barred = None if self.barred is None else (self.barred[0][chosen], self.barred[1][chosen])
        which = chosen.unsqueeze(1) if self.which is None else self.which[chosen]
        return _Rows(self.logits, self.peaks[chosen], self.last[chosen], self.highest[chosen], which, barred)

    def ids_of(self, groups: torch.Tensor) -> torch.Tensor:
        """The ids of some groups, [rows, n], and of what is in no group; ascending where the groups are."""
        return torch.cat([(groups.unsqueeze(1) + _steps(self.peaks.shape[1])).flatten(1), self.last], dim=1)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of ids, [rows, n]."""
        values = self.logits.gather(1, ids) if self.which is None else self.logits[self.which, ids]
        if self.barred is not None:
            least, spared = self.barred
            values.masked_fill_((values >= least) & (ids != spared), -torch.inf)
        return values

    def above(self, floor: torch.Tensor) -> _Above:
        """All tokens of at least `floor`, float32 [rows, 1], but none of -inf."""
        floor = floor.clamp(min=torch.finfo(torch.float32).min)
        groups, is_there, is_whole = _packed(self.peaks >= floor, int(self.peaks.shape[1] * _MOST_GROUPS))
        ids = self.ids_of(groups)
        is_there = torch.cat([is_there.repeat(1, _GROUP), torch.ones_like(self.last, dtype=torch.bool)], dim=1)
        values = self.take(ids)
        places, is_there, _ = _packed((values >= floor).logical_and_(is_there))
        values = values.gather(1, places).masked_fill_(is_there.logical_not_(), -torch.inf)
        return _Above(ids.gather(1, places), values, is_whole)


def _steps(num: int) -> torch.Tensor:
    return torch.arange(0, _GROUP * num, num).unsqueeze(1)


def _packed(mask: torch.Tensor, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The places of each row's True entries, ascending, but none of a row with more than `most`.

    Returns int64 [rows, n] with 0 in what is not used; bool [rows, n], what is; and bool [rows], which have too many.
    """
    counts = mask.sum(1, keepdim=True)
    is_over = counts > (mask.shape[1] if most is None else most)
    if is_over.any():
        counts = counts.masked_fill(is_over, 0)
        mask = mask & ~is_over
    is_there = torch.arange(max(1, int(counts.max()))) < counts
    place = mask.nonzero()[:, 1]
    return torch.zeros(is_there.shape, dtype=torch.int64).masked_scatter_(is_there, place), is_there, is_over.squeeze(1)


def _best(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The id with each row's best score, the lowest of equal ones: int64 [rows]; both are [rows, n]."""
    return ids.where(scores == scores.amax(1, keepdim=True), torch.iinfo(torch.int64).max).amin(1)


# -- plain rows --------------------------------------------------------------------------------------------------------


def _plain(rows: _Rows, part: RowPart) -> torch.Tensor:
    """The tokens with the best scores among all: int64 [rows]."""
    num = rows.peaks.shape[1]
    probed = rows.ids_of(rows.peaks.topk(_PROBED, dim=1, sorted=False).indices)
    scores = [_scores(rows.take(probed), probed, part)]
    reached = scores[0].amax(1, keepdim=True)
    # Of these highest words' ids far less than one per row is in the vocabulary. More would lower the floor, and take
    # longer than the tokens over the floor.
    tokens = tokens_of_highest(part.low, part.high, num // 2)
    ordinary = float(gumbel_of(torch.tensor(-(num // 2) - 1, dtype=torch.int32)))
    places, is_there, _ = _packed((tokens >= 0).logical_and_(tokens < rows.logits.shape[1]))
    rare = tokens.gather(1, places).long().where(is_there, 0)
    scores.append(_scores(rows.take(rare), rare, part))  # a place that is not used stands for token 0: as good as any
    above = rows.above((reached - (ordinary + _SLACK)).mul_(part.temperature).float())
    scores.append(_scores(above.values, above.ids, part))
    picks = _best(torch.cat([probed, rare, above.ids], dim=1), torch.cat(scores, dim=1))
    if above.is_whole.any():
        flat = above.is_whole.nonzero().squeeze(1)
        picks[flat] = _hashed(rows.among(flat), part.among(flat), reached[flat])
    return picks


def _hashed(rows: _Rows, part: RowPart, reached: torch.Tensor) -> torch.Tensor:
    """As `_plain`, for flat rows: the whole vocabulary is hashed, and few variates are made of it."""
    words = _word_peaks(part, rows.peaks.shape[1])
    probed = rows.ids_of(words.topk(_PROBED, dim=1, sorted=False).indices)
    reached = torch.maximum(reached, _scores(rows.take(probed), probed, part).amax(1, keepdim=True))
    is_able = words >= signed(_RARE_WORD ^ 1 << 31)
    is_able |= rows.peaks >= (reached - (_RARE_GUMBEL + _SLACK)).mul_(part.temperature).float()
    able = rows.ids_of(_packed(is_able)[0])  # group 0 stands in the places that are not used
    return _best(able, _scores(rows.take(able), able, part))


def _word_peaks(part: RowPart, num: int) -> torch.Tensor:
    """The highest word of each group, int32 [rows, num]: signed, but in the order of the unsigned words."""
    peaks = torch.empty((len(part.low), num), dtype=torch.int32)
    for start in range(0, num, _STRIP // _GROUP):
        own = slice(start, min(start + _STRIP // _GROUP, num))
        ids = _steps(num) + torch.arange(own.start, own.stop)
        words = noise_words(part.low.unsqueeze(2), part.high.unsqueeze(2), ids)
        torch.amax(words.bitwise_xor_(signed(1 << 31)), 1, out=peaks[:, own])
    return peaks


# -- truncated rows ----------------------------------------------------------------------------------------------------


def _bounded(rows: _Rows, part: RowPart) -> torch.Tensor:
    """The picks of `Way.BOUNDED`."""
    floor = torch.full_like(rows.highest, -torch.inf)
    if part.most_top_k:
        most = min(part.most_top_k, int(rows.peaks.shape[1] * _MOST_GROUPS))
        peaks = rows.peaks.topk(most, dim=1).values
        # The k-th highest group is no higher than the k-th highest token.
        kth = peaks.gather(1, (part.top_k - 1).clamp(0, most - 1))
        floor = kth.where((part.top_k > 0) & (part.top_k <= most), floor)
    if part.has_min_p:  # with top-p, the mass of what min-p drops counts too
        floor = torch.maximum(floor, _floor(rows, part, part.min_p.log()).where(part.top_p == 1.0, -torch.inf))
    above = rows.above(floor)
    return _completed(_among(above, survivors(above.values, part).is_kept, part), ~above.is_whole, rows, part)


def _by_mass(rows: _Rows, part: RowPart) -> torch.Tensor:
    """The picks of `Way.MASS`."""
    sums = _sums(rows, part)
    picks = torch.empty(len(rows.highest), dtype=torch.int64)
    left = torch.arange(len(picks))
    for least in _FLOORS:
        own, own_part = (rows, part) if len(left) == len(picks) else (rows.among(left), part.among(left))
        above = own.above(_floor(own, own_part, math.log(least)))
        is_kept, lightest = survivors(above.values, own_part, Sums(sums.total[left], sums.moment[left]))
        picks[left] = _among(above, is_kept, own_part)
        left = left[~((lightest.squeeze(1) > least) & ~above.is_whole)]
        if not len(left):
            break
    is_done = torch.ones(len(picks), dtype=torch.bool).index_fill_(0, left, False)
    return _completed(picks, is_done, rows, part)


def _without_top(rows: _Rows, part: RowPart) -> torch.Tensor:
    """The picks of `Way.WHOLE`."""
    threshold = part.xtc_threshold * _sums(rows, part).total
    above = rows.above(_floor(rows, part, threshold.log()))
    is_top, least = top_choices(relative(above.values, part).exp_(), above.values > -torch.inf, threshold)
    lowest = above.values.masked_fill(~is_top, torch.inf).amin(1, keepdim=True)
    picks = _plain(replace(rows, barred=(lowest, above.ids.gather(1, least))), part)
    return _completed(picks, ~above.is_whole, rows, part)


def _completed(picks: torch.Tensor, is_done: torch.Tensor, rows: _Rows, part: RowPart) -> torch.Tensor:
    """The picks, with those of rows that are not done: truncated as a whole, a few at a time."""
    if is_done.all():
        return picks
    for left in torch.split((~is_done).nonzero().squeeze(1), _MOST_WHOLE):
        own, own_part = rows.logits[left], part.among(left)
        is_kept = survivors(own, own_part).is_kept
        picks[left] = _plain(_Rows.of(own.masked_fill_(is_kept.logical_not_(), -torch.inf)), own_part)
    return picks


def _among(above: _Above, is_kept: torch.Tensor, part: RowPart) -> torch.Tensor:
    """The picks among tokens, of which some are not kept."""
    values = above.values.masked_fill(is_kept.logical_not(), -torch.inf)
    return _best(above.ids, _scores(values, above.ids, part))


def _floor(rows: _Rows, part: RowPart, log: torch.Tensor | float) -> torch.Tensor:
    """A logit under all whose weight has this logarithm or more: float32 [rows, 1]."""
    return (rows.highest + part.temperature * (log - _SLACK)).float()


def _sums(rows: _Rows, part: RowPart) -> Sums:
    """Of whole rows; the moment only where it is needed. Powers of 2: torch's exp takes four times as long on a CPU."""
    temperature = part.temperature.float()
    total = torch.zeros(rows.highest.shape, dtype=torch.float64)
    moment = torch.zeros_like(total)
    for strip in torch.split(rows.logits, _STRIP, dim=1):
        logs = (strip - rows.highest).div_(temperature).mul_(math.log2(math.e))
        if part.has_typical_p:
            weights = logs.clamp_(min=LOWEST).exp2()
            moment += logs.mul_(weights).sum(1, keepdim=True)
        else:
            weights = logs.exp2_()
        total += weights.sum(1, keepdim=True)
    return Sums(total, moment.mul_(math.log(2.0)))


_PICKS: Final = {Way.PLAIN: _plain, Way.BOUNDED: _bounded, Way.MASS: _by_mass, Way.WHOLE: _without_top}
