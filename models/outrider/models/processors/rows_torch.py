"""Changes the rows of many texts at once, on the device that holds them: `apply_all` in torch, with the same results.

What changes them is known before the logits are there (`text_rows`). It goes to the device in one copy, beside a GPU
that runs the model; then a fixed number of torch operations changes the rows of all texts. Nothing waits for the
device, but for a look at one number where the device is the CPU.

Order and arithmetic are `options_processor`'s, after the grammar. One thing differs, where logits exceed 1e36: an
infinity that penalties make of an id which is then forbidden does not make the allowed ids equally likely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.models.processors.device_copies import to_device
from outrider.models.processors.text_rows import TextPath

_SHORT: Final = 512
"""Ids of a row whose list is not filled up to the longest."""
_MOST_PENALIZED: Final = 1 << 20
"""Ids of rows that are penalized at a time: 32 rows of a text may have 30,000 each."""
_CACHED: Final = 1 << 18
_LARGE: Final = 1 << 25
"""Logits worked on at a time where temporaries are as wide as rows: what fits a core's cache; elsewhere 128 MiB."""


@dataclass(frozen=True, slots=True)
class RowList:
    """Rows of which few ids are left: a CPU need not look at the others.

    rows: int64 [n], which of the step's. ids: int64 [n, K], of each row, ascending. is_there: bool [n, K]; False fills
    up a shorter list.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    is_there: torch.Tensor

    @classmethod
    def of(cls, rows: Mapping[int, NDArray[np.intp]], device: torch.device) -> RowList:
        """Rows with their ids."""
        ids = np.zeros((len(rows), max(each.size for each in rows.values())), np.int64)
        is_there = np.zeros(ids.shape, np.bool_)
        for index, own in enumerate(rows.values()):
            ids[index, : own.size] = own
            is_there[index, : own.size] = True
        return cls(*to_device([np.array(list(rows), np.int64), ids, is_there], device))

    def values_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Their logits, float32 [n, K]."""
        places = (self.rows.unsqueeze(1) * logits.shape[1] + self.ids).flatten()
        found = logits.view(-1).index_select(0, places).view(self.ids.shape)
        return found.masked_fill_(self.is_there.logical_not(), -torch.inf)


@dataclass(frozen=True, slots=True)
class _Changes:
    """What changes rows. Numbers of rows: int64, ascending. What is said of each id or mask is float32 or uint8.

    rows: that anything changes. biased, drafted, bad, stops: places of ids in the flat logits, row by row; and with
    `_rows` the row of each. penalized, counts: ids of texts, one text behind the other. Of each of n rows that penalize
    ids: num_penalized; ids_before: of the text among `penalized`, less those of the rows before in its part; places
    before it; factors, [n, 3]. drafted: those that have counts of their own; drafted_by: which of the n rows. allowing:
    rows whose options allow some ids only. tight: rows that are not listed, of which these, bad or stops may leave
    nothing.
    """

    rows: torch.Tensor
    biased: torch.Tensor
    biases: torch.Tensor
    penalized: torch.Tensor
    counts: torch.Tensor
    num_penalized: torch.Tensor
    ids_before: torch.Tensor
    places_before: torch.Tensor
    factors: torch.Tensor
    drafted: torch.Tensor
    drafted_counts: torch.Tensor
    drafted_by: torch.Tensor
    masked: torch.Tensor
    masks: torch.Tensor
    allowing: torch.Tensor
    allowed: torch.Tensor
    bad: torch.Tensor
    bad_rows: torch.Tensor
    stops: torch.Tensor
    stop_rows: torch.Tensor
    tight: torch.Tensor


class RowChanges:
    """What changes the rows of a step, on their device. lists: of rows that are listed; they are not masked."""

    def __init__(
        self,
        paths: Sequence[tuple[int, TextPath]],
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        *,
        may_list: bool = False,
        may_undo: bool = True,
    ) -> None:
        """paths: with the first row of each, ascending. num_rows: of the step, also those that nothing changes.

        may_list: whether rows of which few ids are left are listed. may_undo: whether `own` may be called, which takes
        12 bytes for each id that is penalized in a row.
        """
        self._num_rows, self._vocab_size, self._may_undo = num_rows, vocab_size, may_undo
        self._undo: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_lost: torch.Tensor | None = None
        self._listed: list[torch.Tensor] | None = None
        rows = [(first + index, path, change) for first, path in paths for index, change in path.rows.items()]
        few = {first + index: path.few(index) for first, path in paths if may_list for index in path.rows}
        listed = {row: ids for row, ids in few.items() if ids is not None}
        masked = [(row, change.mask) for row, _, change in rows if change.mask is not None and row not in listed]
        allowing = [(row, path.allowed[1]) for row, path, _ in rows if path.allowed is not None]
        texts = [path for _, path in paths if path.penalized[0].size or any(own.counts for own in path.rows.values())]
        begins = dict(zip(map(id, texts), np.cumsum([0, *(path.penalized[0].size for path in texts)]), strict=False))
        penalized = [(row, path, change) for row, path, change in rows if id(path) in begins]
        num_penalized = [path.penalized[0].size for _, path, _ in penalized]
        self._penalizing = list(_by_sum(num_penalized, _MOST_PENALIZED))
        in_part = [np.cumsum([0, *num_penalized[part]])[:-1] for part, _ in self._penalizing]
        drafted = [[row * vocab_size + token for token in change.counts] for row, _, change in penalized]
        bad = [(row, change.bad) for row, _, change in rows if change.bad.size]
        stops = [(row, change.stops) for row, _, change in rows if change.stops.size]
        tight = {row for row, _ in (*allowing, *bad, *stops)}

        def places(of: Iterable[tuple[int, NDArray[np.intp]]]) -> NDArray[np.int64]:
            return np.concatenate([np.empty(0, np.int64), *(ids + row * vocab_size for row, ids in of)])

        def rows_of(of: Sequence[tuple[int, NDArray[np.intp]]]) -> NDArray[np.int64]:
            return np.repeat(np.array([row for row, _ in of], np.int64), [ids.size for _, ids in of])

        def floats(of: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
            return np.concatenate([np.empty(0, np.float32), *of])

        def masks(of: Sequence[tuple[int, NDArray[np.uint8]]]) -> NDArray[np.uint8]:
            return np.array([mask for _, mask in of], np.uint8) if of else np.empty((0, 1), np.uint8)

        arrays: dict[str, NDArray[Any]] = {
            "rows": np.array([row for row, _, _ in rows], np.int64),
            "biased": places((row, path.biased) for row, path, _ in rows),
            "biases": floats(path.biases for _, path, _ in rows),
            "penalized": np.concatenate([np.empty(0, np.int64), *(path.penalized[0] for path in texts)]),
            "counts": floats(path.penalized[1] for path in texts),
            "num_penalized": np.array(num_penalized, np.int64),
            "ids_before": np.array([begins[id(path)] for _, path, _ in penalized], np.int64),
            "places_before": np.array([row * vocab_size for row, _, _ in penalized], np.int64),
            "factors": np.array([path.factors for _, path, _ in penalized], np.float32).reshape(-1, 3),
            "drafted": np.array(list(chain.from_iterable(drafted)), np.int64),
            "drafted_counts": np.array([n for _, _, change in penalized for n in change.counts.values()], np.float32),
            "drafted_by": np.repeat(np.arange(len(penalized)), list(map(len, drafted))),
            "masked": np.array([row for row, _ in masked], np.int64),
            "masks": masks(masked),
            "allowing": np.array([row for row, _ in allowing], np.int64),
            "allowed": masks(allowing),
            "bad": places(bad),
            "bad_rows": rows_of(bad),
            "stops": places(stops),
            "stop_rows": rows_of(stops),
            "tight": np.array(sorted(tight.difference(listed)), np.int64),
        }
        if in_part:
            arrays["ids_before"][: sum(map(len, in_part))] -= np.concatenate(in_part)
        self._own = _Changes(*to_device(list(arrays.values()), device))
        self._has_tight = bool(tight)
        short = {row: ids for row, ids in listed.items() if ids.size <= _SHORT}
        long = {row: ids for row, ids in listed.items() if ids.size > _SHORT}
        self.lists = [RowList.of(each, device) for each in (short, long) if each]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Changes the rows, float32 [rows, V], contiguous, in place.

        Returns whether the maximum of each row was finite before, bool [rows]; true for rows that nothing changes.
        """
        own, flat = self._own, logits.view(-1)
        is_finite = torch.ones(self._num_rows, dtype=torch.bool, device=logits.device)
        is_finite.index_copy_(0, own.rows, torch.isfinite(_highest(logits, own.rows)))
        if own.biased.numel():
            found = flat.index_select(0, own.biased)
            flat.scatter_(0, own.biased, found + own.biases)
            self._undo.append((own.biased, found))
        drafted = flat.index_select(0, own.drafted) if own.drafted.numel() else None
        for part, count in self._penalizing:
            by = torch.arange(part.start, part.stop, device=logits.device)
            by = by.repeat_interleave(own.num_penalized[part], output_size=count)
            index = torch.arange(count, device=logits.device) + own.ids_before[by]
            places = own.penalized[index] + own.places_before[by]
            self._penalize(flat, places, flat.index_select(0, places), own.counts[index], own.factors[by])
        if drafted is not None:  # with counts of their own, also where they were among the others
            self._penalize(flat, own.drafted, drafted, own.drafted_counts, own.factors[own.drafted_by])
        for part, index in parts_of(logits, own.masked):
            _add(logits, index, _spread(own.masks[part], self._vocab_size))
        if self._has_tight:
            self._forbid(logits, flat)
        return is_finite

    def _penalize(
        self,
        flat: torch.Tensor,
        places: torch.Tensor,
        found: torch.Tensor,
        counts: torch.Tensor,
        factors: torch.Tensor,
    ) -> None:
        """Steps 2 and 3 of `options_processor`, of logits that were `found`. counts: of each; factors: [n, 3]."""
        repetition, frequency, presence = factors.unbind(1)
        value = torch.where(found < 0.0, found * repetition, found / repetition)
        value -= frequency * counts
        value -= presence * (counts > 0.0)
        flat.scatter_(0, places, value)
        if self._may_undo:
            self._undo.append((places, found))

    def listed(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """What `apply` has left of the listed rows: the logits of each list."""
        return self._listed or [each.values_of(logits) for each in self.lists]

    def own(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The model's own logit of each row's pick, float32 [n], after `apply`. rows, tokens: int64 [n].

        Puts back what `apply` has changed, but for what it has masked: the rows are of no more use.
        """
        flat = logits.view(-1)
        for places, values in reversed(self._undo):
            flat.scatter_(0, places, values)
        found = flat.index_select(0, rows * self._vocab_size + tokens)
        return found if self._is_lost is None else found.masked_fill(self._is_lost[rows], -torch.inf)

    def _forbid(self, logits: torch.Tensor, flat: torch.Tensor) -> None:
        """Steps 5 and 6 of `options_processor`, and what mends rows that nothing would be left of."""
        own = self._own
        bad, stops = self._take(flat)
        most = self._most(logits)
        if logits.device.type == "cpu" and bool(torch.isfinite(most).all()):
            return  # nearly always; to know it on another device would be to wait
        if own.allowing.numel():
            before = most.scatter_reduce(0, own.bad_rows, bad, "amax").scatter_reduce(0, own.stop_rows, stops, "amax")
            lost = self._is_lost = torch.zeros_like(before, dtype=torch.bool)
            lost.index_copy_(0, own.allowing, ~torch.isfinite(before[own.allowing]))
            for part, index in parts_of(logits, own.allowing):
                equal = _spread(own.allowed[part], self._vocab_size).add_(0.0)
                changed = torch.where(lost[index].unsqueeze(1), equal, rows_at(logits, index))
                logits.index_copy_(0, index, changed)
            again = self._take(flat)
            bad = torch.where(lost[own.bad_rows], again[0], bad)
            stops = torch.where(lost[own.stop_rows], again[1], stops)
            most = self._most(logits)
        for places, rows, values in ((own.stops, own.stop_rows, stops), (own.bad, own.bad_rows, bad)):
            has_any = torch.isfinite(most)
            flat.scatter_(0, places, values.masked_fill(has_any[rows], -torch.inf))
            most = most.scatter_reduce(0, rows, values, "amax")
        self._listed = None

    def _take(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Forbids bad ids, then stop ids; returns the logits that they had."""
        bad = flat.index_select(0, self._own.bad)
        flat.scatter_(0, self._own.bad, -torch.inf)
        stops = flat.index_select(0, self._own.stops)
        flat.scatter_(0, self._own.stops, -torch.inf)
        return bad, stops

    def _most(self, logits: torch.Tensor) -> torch.Tensor:
        """The highest logit of each row that is tight or listed; 0 of others."""
        most = torch.zeros(self._num_rows, dtype=logits.dtype, device=logits.device)
        self._listed = [each.values_of(logits) for each in self.lists]
        for each, values in zip(self.lists, self._listed, strict=True):
            most.index_copy_(0, each.rows, values.amax(1))
        return most.index_copy_(0, self._own.tight, _highest(logits, self._own.tight))


class DraftedRows:
    """Which picks are committed: of each text those that equal its drafted tokens, and the one that follows."""

    def __init__(self, drafted: Sequence[Sequence[int]], width: int, device: torch.device) -> None:
        """drafted: of each text, which has one row more. width: most rows of a text, or more."""
        self._shape = len(drafted), width
        guesses = [guess for own in drafted for guess in (*own, -1)]
        places = [text * width + row for text, own in enumerate(drafted) for row in range(len(own) + 1)]
        self._guesses, self._places = to_device([np.array(guesses, np.int64), np.array(places, np.int64)], device)

    def committed(self, picks: torch.Tensor) -> torch.Tensor:
        """int32 [texts, width], -1 behind the last one. picks: int64 [rows]; -1: none, which ends a text too."""
        found = torch.full(self._shape, -1, dtype=torch.int64, device=picks.device)
        found.view(-1).scatter_(0, self._places, picks)
        goes_on = torch.zeros(self._shape, dtype=torch.int64, device=picks.device)
        goes_on.view(-1).scatter_(0, self._places, ((picks == self._guesses) & (picks >= 0)).to(torch.int64))
        is_wrong = goes_on.cumprod(1).roll(1, 1) == 0
        is_wrong[:, 0] = False
        return found.masked_fill_(is_wrong, -1).to(torch.int32)


def _by_sum(counts: Sequence[int], most: int) -> Iterator[tuple[slice, int]]:
    """Some of these in a row whose sum is at most `most`, one at least; and the sum. None where all are 0."""
    first = total = 0
    for at, count in enumerate(counts):
        if total and total + count > most:
            yield slice(first, at), total
            first, total = at, 0
        total += count
    if total:
        yield slice(first, len(counts)), total


def parts_of(logits: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some of these rows at a time, so that temporaries stay small: which of them, and their numbers."""
    count = max(1, (_CACHED if logits.device.type == "cpu" else _LARGE) // logits.shape[1])
    for first in range(0, len(rows), count):
        part = slice(first, first + count)
        yield part, rows[part]


def rows_at(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Some rows, for reading. index: int64, not empty, ascending."""
    view = _view(logits, index)
    return logits.index_select(0, index) if view is None else view


def _view(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
    """Rows that lie one behind the other, without a copy; on the CPU, where that costs nothing to know."""
    if logits.device.type != "cpu":
        return None
    first, last = int(index[0]), int(index[-1])
    return logits[first : last + 1] if last - first == len(index) - 1 else None


def _add(logits: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Adds to some rows."""
    view = _view(logits, index)
    if view is None:
        logits.index_add_(0, index, values)
    else:
        view.add_(values)


def _highest(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The maximum of each of these rows."""
    if len(rows) == len(logits):
        return logits.amax(1)
    return torch.cat([logits[:0, 0], *(rows_at(logits, index).amax(1) for _, index in parts_of(logits, rows))])


@lru_cache(maxsize=8)
def _spreading(device: torch.device) -> torch.Tensor:
    """[256, 8] float32: for each bit of a byte, what leaves a logit as it is, or forbids it."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, np.float32(-0.0), np.float32(-np.inf))).to(device)


def _spread(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[n, V] float32 to add to rows: -inf where a bit of `masks`, uint8 [n, (V + 7) // 8], is not set, else -0."""
    found = _spreading(masks.device).index_select(0, masks.reshape(-1).to(torch.int32))
    return found.view(len(masks), -1)[:, :vocab_size]
