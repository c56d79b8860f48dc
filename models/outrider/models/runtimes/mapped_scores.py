"""Scores a target's ids by rows of a draft with another tokenizer. Arithmetic only: knows no runtime.

The next id's bytes may begin inside a token that the draft would choose: where the text ends with "(", the draft may go
on with "(self". They may also end behind one: after "token" comes "izer". So the chance of an id is summed over the
last places between tokens, each with the chance of the tokens from there to the text's end (Vieira et al. 2024, arXiv
2412.03719, who sum over all such covers of a text; here along the draft's own splitting only, and along that of the
text with a letter behind it). The likeliest token of all, where ids go on after it, is looked behind: the row after it
says which of these are meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.runtimes.base import num_shared
from outrider.models.text.draft_text import Cut, Place, key_after
from outrider.models.text.vocabulary_map import Indices, Pairs, VocabularyMap

Row = NDArray[np.float32]

_PLACES: Final = 2
"""Places between tokens that count before the text's last one; a third adds nothing (docs/any-draft.md)."""
_FAINT: Final = 10.0
"""A token whose logit is below the likeliest's by more than this does not count: its chance is under a 20,000th of that
one's. At 100,000 tokens all further work is on a few hundred.
"""
_CHECKED: Final = 32
"""Of the tokens behind another, as many of the likeliest are looked at."""
_ROW_BYTES: Final = 600
"""Of the objects around a row's numbers."""
_LEAST_LEFT: Final = 1e-4
"""What is left of a token's chance where all of it is moved."""


@dataclass(frozen=True, slots=True)
class Context:
    """The draft's tokens up to a place in a text. key: equal for equal ones. tokens: those after the cut."""

    key: int
    cut: Cut
    tokens: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.cut.length + len(self.tokens)

    def then(self, token: int) -> Context:
        """The context after one more token."""
        return Context(key_after(self.key, (token,))[0], self.cut, (*self.tokens, token))


@dataclass(frozen=True, slots=True)
class Cover:
    """A place between two tokens, and the bytes of the text after it.

    path: contexts and the token after each, from where the paths to all covers of a text part.
    """

    context: Context
    rest: bytes
    path: tuple[tuple[Context, int], ...]


class KeptRow:
    """What counts of a row of the draft's logits: tokens that are not faint beside the likeliest.

    tokens: [n] int64, ascending; values: [n] float32, the logarithms of their chances. faint: a bound of the others'.
    norm: logits less `values`. Raises ModelFault for logits that are not finite.
    """

    __slots__ = ("faint", "norm", "tokens", "values")

    def __init__(self, logits: Row) -> None:
        highest = logits.max()
        if not math.isfinite(highest):
            raise ModelFault("the draft's logits are not finite; check the export with a parity run")
        self.tokens: Indices = np.flatnonzero(logits > highest - _FAINT)
        self.values = logits[self.tokens] - highest
        norm = math.log(float(np.exp(self.values).sum()))
        self.values -= np.float32(norm)
        self.faint = -_FAINT - norm
        self.norm = float(highest) + norm

    @property
    def num_bytes(self) -> int:
        """What it holds, about."""
        return int(self.tokens.nbytes + self.values.nbytes) + _ROW_BYTES

    def chance(self, token: int) -> float:
        """The logarithm of a token's chance; `faint` for a faint one."""
        at = int(self.tokens.searchsorted(token))
        return float(self.values[at]) if at < len(self.tokens) and self.tokens[at] == token else self.faint

    def of(self, pairs: Pairs) -> tuple[Pairs, Row]:
        """Those of these pairs whose tokens count, and their chances."""
        if not len(pairs.tokens):
            return pairs, self.values[:0]
        if len(pairs.tokens) < len(self.tokens):
            at = np.minimum(self.tokens.searchsorted(pairs.tokens), len(self.tokens) - 1)
            found = np.flatnonzero(self.tokens[at] == pairs.tokens)
            return Pairs(pairs.ids[found], pairs.tokens[found]), self.values[at[found]]
        at = np.minimum(pairs.tokens.searchsorted(self.tokens), len(pairs.tokens) - 1)
        found = np.flatnonzero(pairs.tokens[at] == self.tokens)
        return Pairs(pairs.ids[at[found]], self.tokens[found]), self.values[found]


@dataclass(frozen=True, slots=True)
class Ahead:
    """The likeliest next token, where ids of the target go on after it.

    chance: its own, a logarithm. index: the id that it counts for. written: what it writes of the next id.
    """

    context: Context
    chance: float
    index: int
    written: bytes


@dataclass(frozen=True, slots=True)
class Chances:
    """Chances of the next id. ids: [n] int64, some more than once; values: [n] float32, logarithms.

    norm: what is between these and the draft's logits. ahead: what to look behind.
    """

    ids: Indices
    values: Row
    norm: float
    ahead: Ahead | None


def covers_of(mapping: VocabularyMap, place: Place) -> list[Cover]:
    """The places between tokens that count for the next id, the text's last one first."""
    tail, cut = place.tail, place.cut
    paths = [mapping.text.split(tail, cut.at_start)]
    if tail:
        # The draft would have split the text elsewhere, had it known that a word follows or goes on.
        other = mapping.text.split(tail + b"a", cut.at_start).until(len(tail))
        if other.tokens != paths[0].tokens[: len(other.tokens)]:
            paths.append(other)
    parting = min(num_shared(paths[0].tokens, path.tokens) for path in paths)
    found: dict[int, Cover] = {}
    for tokens, ends in paths:
        rests = [tail[end:] for end in (0, *ends)]
        last = len(tokens)
        counted = [at for at in range(max(0, last - _PLACES), last) if rests[at] and mapping.begins(rests[at])] + [last]
        parting = min(parting, counted[0])
        keys = (cut.key, *key_after(cut.key, tokens))
        contexts = [Context(key, cut, tokens[:at]) for at, key in enumerate(keys)]
        for at in reversed(counted):
            found.setdefault(
                keys[at], Cover(contexts[at], rests[at], tuple(zip(contexts[:at], tokens[:at], strict=True)))
            )
    return [Cover(each.context, each.rest, each.path[parting:]) for each in found.values()]


def contexts_of(covers: Sequence[Cover]) -> Iterator[Context]:
    """All whose rows `chances_of` needs, some more than once."""
    for cover in covers:
        yield from (before for before, _ in cover.path)
        yield cover.context


def chances_of(mapping: VocabularyMap, covers: Sequence[Cover], rows: Mapping[int, KeptRow]) -> Chances:
    """The chances by all covers. rows: by key; a cover whose rows are missing does not count."""
    ids, values = list[Indices](), list[Row]()
    best = (-math.inf, -1, -1)  # the likeliest token's chance, itself, and the id that it counts for
    at: Cover | None = None
    for cover in covers:
        before = [(row, token) for context, token in cover.path if (row := rows.get(context.key)) is not None]
        kept = rows.get(cover.context.key)
        if kept is None or len(before) < len(cover.path):
            continue
        path = sum(row.chance(token) for row, token in before)
        if cover.rest:
            pairs, found = kept.of(mapping.pairs(cover.rest))
        else:
            pairs, found = Pairs(mapping.id_of[kept.tokens], kept.tokens), kept.values
            if at is None:  # the text ends between two tokens, so it may also end for good
                ends = [(index, chance) for index, token in mapping.ends if (chance := kept.chance(token)) > kept.faint]
                ids.append(np.array([index for index, _ in ends], np.int64))
                values.append(np.array([chance + path for _, chance in ends], np.float32))
        if not len(found):
            continue
        top = int(found.argmax())
        if at is None or found[top] + path > best[0]:
            best, at = (float(found[top]) + path, int(pairs.tokens[top]), int(pairs.ids[top])), cover
        counts = pairs.ids >= 0
        ids.append(pairs.ids[counts])
        values.append(found[counts] + np.float32(path))
    chance, token, index = best
    written = mapping.spelled[token][len(at.rest) :] if at is not None and index >= 0 else b""
    ahead = (
        Ahead(at.context.then(token), chance, index, written) if at is not None and mapping.goes_on(written) else None
    )
    none = np.zeros(0, np.int64)
    norm = rows[at.context.key].norm if at is not None else 0.0
    return Chances(np.concatenate([none, *ids]), np.concatenate([none.astype(np.float32), *values]), norm, ahead)


def write_scores(mapping: VocabularyMap, last: int, chances: Chances, behind: KeptRow | None, out: Row) -> None:
    """Writes a score for each id into `out`, [num_ids] float32; -inf for ids without one.

    It is the logarithm of the id's chance and a constant, which makes it as large as the draft's own logits: penalties
    multiply them. last: the text's last id, or -1. behind: the row after the token that is looked behind.
    """
    ids, values, ahead = chances.ids, chances.values, chances.ahead
    if not len(ids):
        out.fill(-np.inf)
        return
    highest = float(values.max())
    moved = 0.0
    if ahead is not None and behind is not None:
        more = [
            (index, float(behind.values[at]))
            for at in np.argsort(behind.values)[-_CHECKED:].tolist()
            if (index := mapping.meant(ahead.written, int(behind.tokens[at]))) >= 0
        ]
        moved = sum(math.exp(chance) for _, chance in more)
        ids = np.concatenate([ids, np.array([index for index, _ in more], np.int64)])
        values = np.concatenate([values, np.array([chance + ahead.chance for _, chance in more], np.float32)])
    out.fill(0.0)
    np.add.at(out, ids, np.exp(values - np.float32(highest)))
    if moved and ahead is not None:
        own = math.exp(ahead.chance - highest)
        out[ahead.index] = max(float(out[ahead.index]) - own * moved, own * _LEAST_LEFT)
    out[mapping.joined(last)] = 0.0
    ids = ids[out[ids] > 0.0]
    logarithms = np.log(out[ids]) + np.float32(highest + chances.norm)
    out.fill(-np.inf)
    out[ids] = logarithms
