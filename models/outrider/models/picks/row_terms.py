"""Prepares what decides the picks of a step's rows: on the host, in one go, and with one copy to the device.

It knows nothing of the logits, and not how a token is picked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.models.picks.sampling import SamplingParams

Packed = NDArray[np.int64]


class Way(IntEnum):
    """How a row's token is found.

    GREEDY: the first maximum. PLAIN: the best score of all tokens. The others: the best score of those that truncation
    leaves. BOUNDED: the row's highest logits tell under which one nothing is left (top-k, or min-p without top-p).
    MASS: that depends on the mass of all tokens (top-p, typical-p). WHOLE: high ones are dropped, and low ones are not
    (XTC alone).
    """

    GREEDY = 0
    PLAIN = 1
    BOUNDED = 2
    MASS = 3
    WHOLE = 4


class _Column(IntEnum):
    """Of the packed numbers: 64 bits each, integers first."""

    INDEX = 0
    KEY = 1
    TOP_K = 2
    TEMPERATURE = 3
    TOP_P = 4
    MIN_P = 5
    TYPICAL_P = 6
    XTC = 7


_FLOATS: Final = _Column.TEMPERATURE
_NO_XTC: Final = 2.0
"""A threshold that no token's probability reaches."""
# Of `sampling.noise_key`, and of `narrowing.coin`.
_SEED: Final = np.uint64(0x9E3779B97F4A7C15)
_POSITION: Final = np.uint64(0xD1342543DE82EF95)
_COIN: Final = np.uint64(0xA0761D6478BD642F)


class NarrowingOptions(Protocol):
    """What truncates a row after top-k, top-p and min-p: `processors.ProcessorOptions` says what each is."""

    @property
    def typical_p(self) -> float:
        """1 is off."""

    @property
    def xtc_probability(self) -> float:
        """0 is off."""

    @property
    def xtc_threshold(self) -> float:
        """Over 0.5 is off."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows that are picked from in the same way. rows: which of the step's, for indexing a tensor of [rows, ...].

    Every tensor has a column for its numbers, so that it broadcasts over a row's tokens: [n, 1]. What begins with
    `has_` is known on the host: whether any row needs it.
    """

    way: Way
    rows: slice | torch.Tensor
    _packed: torch.Tensor
    _host: Packed

    @property
    def low(self) -> torch.Tensor:
        """The low half of each row's noise key, int32."""
        return self._key_halves[:, :1]

    @property
    def high(self) -> torch.Tensor:
        """The high half, int32."""
        return self._key_halves[:, 1:]

    @property
    def _key_halves(self) -> torch.Tensor:
        return self._packed[_Column.KEY].view(torch.int32).view(-1, 2)

    @property
    def top_k(self) -> torch.Tensor:
        """int64; 0 is off."""
        return self._packed[_Column.TOP_K].unsqueeze(1)

    @property
    def temperature(self) -> torch.Tensor:
        """float64; 0 for greedy rows."""
        return self._float(_Column.TEMPERATURE)

    @property
    def top_p(self) -> torch.Tensor:
        """float64; 1 is off."""
        return self._float(_Column.TOP_P)

    @property
    def min_p(self) -> torch.Tensor:
        """float64; 0 is off."""
        return self._float(_Column.MIN_P)

    @property
    def typical_p(self) -> torch.Tensor:
        """float64; 1 is off."""
        return self._float(_Column.TYPICAL_P)

    @property
    def xtc_threshold(self) -> torch.Tensor:
        """float64; over 1 where XTC is off, or where the position's coin says so."""
        return self._float(_Column.XTC)

    def _float(self, column: _Column) -> torch.Tensor:
        return self._packed[column].view(torch.float64).unsqueeze(1)

    @property
    def most_top_k(self) -> int:
        """The largest top_k; 0: it is off in every row."""
        return int(self._host[_Column.TOP_K].max(initial=0))

    @property
    def has_top_p(self) -> bool:
        """See the class."""
        return self._has(_Column.TOP_P, 1.0)

    @property
    def has_min_p(self) -> bool:
        """See the class."""
        return self._has(_Column.MIN_P, 0.0)

    @property
    def has_typical_p(self) -> bool:
        """See the class."""
        return self._has(_Column.TYPICAL_P, 1.0)

    @property
    def has_xtc(self) -> bool:
        """See the class."""
        return self._has(_Column.XTC, _NO_XTC)

    @property
    def is_common(self) -> bool:
        """Whether no row needs more than top-k, top-p and min-p."""
        return not (self.has_typical_p or self.has_xtc)

    def _has(self, column: _Column, off: float) -> bool:
        return bool((self._host[column].view(np.float64) != off).any())

    def pieces(self, num_rows: int) -> Iterator[RowPart]:
        """The same rows in order, at most `num_rows` in each piece."""
        count = self._host.shape[1]
        for start in range(0, count, num_rows):
            stop = min(start + num_rows, count)
            if isinstance(self.rows, slice):
                rows: slice | torch.Tensor = slice(self.rows.start + start, self.rows.start + stop)
            else:
                rows = self.rows[start:stop]
            yield RowPart(self.way, rows, self._packed[:, start:stop], self._host[:, start:stop])

    def among(self, chosen: torch.Tensor) -> RowPart:
        """Those of the rows that `chosen`, int64, names by their place here. On the CPU only: it reads the tensor."""
        packed = self._packed[:, chosen]
        return RowPart(self.way, chosen, packed, packed.numpy())


@dataclass(frozen=True, slots=True)
class RowTerms:
    """What decides the picks of some rows, on the device that their logits are on. Made anew for each step.

    A row stands for one token to pick; several rows may share one request's parameters, and giving the same object for
    all of them makes the set-up faster. parts: the rows by the way in which they are picked; each is in one of them.
    """

    num_rows: int
    parts: tuple[RowPart, ...]

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int] | NDArray[np.int64],
        narrowings: Sequence[NarrowingOptions | None] | None,
        device: torch.device,
    ) -> RowTerms:
        """One entry a row in each list; one copy to the device, which does not wait.

        positions: absolute, of the token to pick, as in `sampling.pick`. narrowings: whose last three fields
        (typical_p, xtc_probability, xtc_threshold) truncate the row; None, for a row or for all of them: nothing does.
        """
        packed, kinds = _columns(params, np.asarray(positions, dtype=np.int64), narrowings)
        count = len(params)
        order = np.argsort(kinds, kind="stable")
        packed[_Column.INDEX] = np.arange(count)
        host = packed[:, order].copy()  # in C order, one row too: torch reads the strides
        there = torch.from_numpy(host)
        if device.type == "cuda":
            there = there.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            there = there.to(device)
        ends = np.searchsorted(kinds[order], np.arange(2 * len(Way) + 1)).tolist()
        parts = []
        for kind, (start, stop) in enumerate(pairwise(ends)):
            if stop > start:
                index = host[_Column.INDEX, start:stop]
                first, last = int(index[0]), int(index[-1]) + 1
                is_run = last - first == stop - start
                rows = slice(first, last) if is_run else there[_Column.INDEX, start:stop]
                parts.append(RowPart(Way(kind // 2), rows, there[:, start:stop], host[:, start:stop]))
        return cls(count, tuple(parts))


def _columns(
    params: Sequence[SamplingParams], positions: Packed, narrowings: Sequence[NarrowingOptions | None] | None
) -> tuple[Packed, NDArray[np.int64]]:
    """The packed numbers, [columns, rows], without INDEX; and twice each row's way, and one where it is not common."""
    places: dict[tuple[int, int], int] = {}
    distinct: list[tuple[int, int, tuple[float, ...]]] = []
    which: list[int] = []
    for own, narrowing in zip(params, [None] * len(params) if narrowings is None else narrowings, strict=True):
        # By identity: the rows of one request share their parameters, and comparing these takes longer.
        place = places.setdefault((id(own), id(narrowing)), len(distinct))
        if place == len(distinct):
            more = (1.0, 0.0, 0.0)
            if narrowing is not None:
                more = (narrowing.typical_p, narrowing.xtc_threshold, narrowing.xtc_probability)
            distinct.append((own.seed, own.top_k, (own.temperature, own.top_p, own.min_p, *more)))
        which.append(place)
    seeds = np.array([seed for seed, _, _ in distinct], dtype=np.uint64)[which]
    top_k = np.array([count for _, count, _ in distinct], dtype=np.int64)[which]
    floats = np.array([more for _, _, more in distinct]).reshape(-1, 6)[which]
    temperature, top_p, min_p, typical_p, threshold, probability = floats.T
    keys = _mix64(_mix64(seeds + _SEED) + positions.astype(np.uint64) * _POSITION)
    coins = (_mix64(keys + _COIN) >> np.uint64(11)) * 2.0**-53
    has_xtc = (coins < probability) & ((threshold <= 0.5) | (typical_p < 1.0))
    packed = np.empty((len(_Column), len(which)), dtype=np.int64)
    packed[_Column.KEY], packed[_Column.TOP_K] = keys.view(np.int64), top_k
    packed[_FLOATS:].view(np.float64)[:] = temperature, top_p, min_p, typical_p, np.where(has_xtc, threshold, _NO_XTC)
    ways = np.select(
        [
            temperature == 0.0,
            (top_k > 0) | ((min_p > 0.0) & (top_p == 1.0)),
            (top_p < 1.0) | (typical_p < 1.0),
            has_xtc,
        ],
        [Way.GREEDY, Way.BOUNDED, Way.MASS, Way.WHOLE],
        Way.PLAIN,
    )
    return packed, 2 * ways + ((typical_p < 1.0) | has_xtc)


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`sampling.mix64` of each."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
