"""Truncates rows of logits on the device that they are on: top-k, top-p, min-p, typical-p, XTC.

The twin of `sampling.survivors` and of `processors.narrowing`, many rows at a time. Nothing waits for the device, and
no large row is sorted: a threshold is the least key within which enough mass lies, and is searched in the bits of the
keys. These are 32-bit integers in the order of the floats that they are made of.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final, NamedTuple

import torch

from outrider.models.picks.row_terms import RowPart

_FEW: Final = 4096
"""Keys per row that are sorted on a CPU: faster than to search their bits."""
_STRIP: Final = 1 << 14
"""Of numbers that are summed in float32."""
_DIGITS: Final = ((20, 12), (8, 12), (0, 8))
"""A key's bits in three parts: where each begins, and how many they are."""
_LEAST: Final = -(1 << 31)
_MOST: Final = (1 << 31) - 1
LOWEST: Final = -200.0
"""A float32 weight underflows to 0 long before; the product of the two has to be 0, not NaN."""


def kernels(device: torch.device) -> ModuleType | None:
    """`sampling_triton` for a GPU; None elsewhere, and where there is no Triton."""
    return _triton_kernels() if device.type == "cuda" else None


@cache
def _triton_kernels() -> ModuleType | None:
    return import_module("outrider.models.picks.sampling_triton") if find_spec("triton") else None


class Sums(NamedTuple):
    """Of a row's weights, exp((logit - maximum) / temperature). total: their sum. moment: of weight times its log.

    Both float64, [rows, 1].
    """

    total: torch.Tensor
    moment: torch.Tensor


class Survivors(NamedTuple):
    """is_kept: bool [rows, n]. lightest: float32 [rows, 1], the weight down to which the mass was searched; infinite
    where it was not.
    """

    is_kept: torch.Tensor
    lightest: torch.Tensor


def relative(values: torch.Tensor, part: RowPart) -> torch.Tensor:
    """(value - maximum) / temperature, at least `LOWEST`: float32, of the values' shape [rows, n]."""
    return (values - values.amax(1, keepdim=True)).div_(part.temperature.float()).clamp_(min=LOWEST)


def survivors(values: torch.Tensor, part: RowPart, whole: Sums | None = None) -> Survivors:
    """What truncation leaves of each row: at least one token where the maximum is finite.

    values: float32 [rows, n], whole rows, or of each all that exceeds some floor, ids ascending; -inf stands for none.
    whole: of whole rows, where `values` are less (`Way.MASS`).
    """
    is_kept = values > -torch.inf
    if part.most_top_k:
        wanted = torch.where(part.top_k > 0, part.top_k.double(), torch.inf)
        keys = ~_ordered(values)
        is_kept &= keys <= _reach(keys, is_kept.float(), wanted)
    logs = relative(values, part)
    weights = logs.exp().mul_(is_kept)
    lightest = torch.full_like(weights[:, :1], torch.inf)
    if part.has_top_p:
        total = _sum(weights) if whole is None else whole.total
        inside, lightest = _nucleus(weights, part.top_p, total)
        is_kept &= inside
    if part.has_min_p:
        is_kept &= weights >= part.min_p.float()
        lightest = torch.maximum(lightest, part.min_p.float())
    if part.has_typical_p:
        weights.mul_(is_kept)
        sums = Sums(_sum(weights), _sum(weights * logs))
        if whole is not None:  # nothing was dropped from rows without top-p and min-p, so the sums are the row's
            is_first = (part.top_p == 1.0) & (part.min_p == 0.0)
            sums = Sums(*(torch.where(is_first, row, own) for row, own in zip(whole, sums, strict=True)))
        inside, farthest = _typical(weights, logs, is_kept, part.typical_p, sums)
        is_kept &= inside
        if whole is not None:
            lightest = torch.where(is_first, farthest, lightest)
    if part.has_xtc:
        weights.mul_(is_kept)
        is_top, least = top_choices(weights, is_kept, part.xtc_threshold * _sum(weights))
        is_kept &= is_top.logical_not_().scatter_(1, least, True)
    return Survivors(is_kept, lightest)


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """Of each row: float64 [rows, 1]."""
    if weights.device.type != "cpu" or weights.shape[1] <= _FEW:
        return weights.sum(1, keepdim=True, dtype=torch.float64)
    # A CPU would make a copy in float64 of all that it sums.
    strips = torch.split(weights, _STRIP, dim=1)
    return torch.cat([strip.sum(1, keepdim=True) for strip in strips], dim=1).sum(1, keepdim=True, dtype=torch.float64)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """int32 in the order of float32 values."""
    bits = (values + 0.0).view(torch.int32)  # both zeros are equal
    return bits ^ (bits >> 31 & _MOST)


def _reach(keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The least key of each row up to which its weights sum up to `wanted`; no key is higher where they never do.

    keys: int32 [rows, n]. weights: float32 [rows, n], not negative. wanted: float64 [rows, 1]. Returns int32 [rows, 1].
    """
    fast = kernels(keys.device)
    if fast is not None:
        found: torch.Tensor = fast.reach(keys, weights, wanted)
        return found
    if keys.device.type != "cpu":
        return reach_by_bisection(keys, weights, wanted)
    if keys.shape[1] <= _FEW:
        return reach_by_sorting(keys, weights, wanted)
    return _reach_by_digits(keys, weights, wanted)


def reach_by_bisection(keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """See `_reach`: 32 rounds, whatever the keys."""
    low = torch.full_like(keys[:, :1], _LEAST, dtype=torch.int64)
    high = torch.full_like(low, _MOST)
    for _ in range(32):
        middle = (low + high) >> 1
        is_enough = _sum(weights.masked_fill(keys > middle.int(), 0.0)) >= wanted
        high = torch.where(is_enough, middle, high)
        low = torch.where(is_enough, low, middle + 1)
    return high.int()


def reach_by_sorting(keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """See `_reach`, for few keys."""
    in_order, order = keys.sort(dim=1)
    mass_to = weights.gather(1, order).cumsum(1, dtype=torch.float64)
    place = (mass_to < wanted).sum(1, keepdim=True)
    found = in_order.gather(1, place.clamp(max=keys.shape[1] - 1))
    return torch.where(place < keys.shape[1], found, _MOST)


def _reach_by_digits(keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """See `_reach`, for many keys, on a CPU: finds a key's bits from above, among ever fewer keys."""
    count = len(keys)
    row = torch.arange(count).repeat_interleave(keys.shape[1])
    keys, weights = (keys ^ _LEAST).flatten(), weights.flatten().double()
    left, found = wanted.squeeze(1).clone(), torch.zeros(count, dtype=torch.int64)
    never = torch.zeros(count, dtype=torch.bool)
    for shift, bits in _DIGITS:
        digits = (keys >> shift).bitwise_and_((1 << bits) - 1)
        mass_to = torch.bincount((row << bits) + digits, weights, count << bits).view(count, -1).cumsum(1)
        if shift == _DIGITS[0][0]:
            never = mass_to[:, -1] < left
        digit = (mass_to < left.unsqueeze(1)).sum(1).clamp_(max=(1 << bits) - 1)
        found = found << bits | digit
        before = mass_to.gather(1, (digit - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
        left -= before.where(digit > 0, 0.0)
        is_it = digits == digit[row]
        keys, weights, row = keys[is_it], weights[is_it], row[is_it]
    return (found + _LEAST).masked_fill_(never, _MOST).int().unsqueeze(1)


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The heaviest tokens whose share of `total` reaches `top_p`, equal ones by id; and the lightest weight of them."""
    wanted = torch.where(top_p < 1.0, top_p * total, torch.inf)
    keys = ~weights.view(torch.int32)  # not negative: the bits are in the order of the floats
    found = _reach(keys, weights, wanted)
    is_over = keys < found
    is_equal = keys == found
    lightest = (~found).view(torch.float32)
    # Of the equally likely, as many as it takes.
    short = ((wanted - _sum(weights * is_over)) / lightest).ceil_().clamp_(min=1.0)
    is_over |= is_equal & (is_equal.cumsum(1, dtype=torch.int32) <= short)
    return is_over, torch.where(found < 0, lightest, 0.0)


def _typical(
    weights: torch.Tensor, logs: torch.Tensor, is_kept: torch.Tensor, typical_p: torch.Tensor, sums: Sums
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens whose surprise is nearest to its mean; and the weight of the most surprising one that may be."""
    mean = (-sums.moment / sums.total).float()
    distance = (logs + mean).abs_()
    keys = distance.view(torch.int32).masked_fill(~is_kept, _MOST)
    wanted = torch.where(typical_p < 1.0, typical_p * sums.total, torch.inf)
    found = _reach(keys, weights, wanted)
    # The bits of what is never reached are no number: every comparison with it is false.
    farthest = torch.where(found < _MOST, (-mean - found.view(torch.float32)).exp_(), 0.0)
    return keys <= found, farthest


def top_choices(
    weights: torch.Tensor, is_there: torch.Tensor, threshold: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """XTC's top choices: which of them weigh at least `threshold`, float64 [rows, 1]; and the one that stays.

    The latter is the place of the least likely, the last of equal ones: int64 [rows, 1]. A row without any has it, too.
    """
    is_top = (weights >= threshold.float()).logical_and_(is_there)
    least = weights.masked_fill(~is_top, torch.inf).amin(1, keepdim=True)
    places = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    return is_top, places.where(is_top & (weights == least), 0).amax(1, keepdim=True).long()
