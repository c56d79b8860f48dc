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

from outrider.models.runtimes.base import num_shared
from outrider.models.text.draft_text import Cut, Place, key_after
from outrider.models.text.vocabulary_map import Pairs, VocabularyMap

Row = NDArray[np.float32]

_PLACES: Final = 2
"""Places between tokens that count before the text's last one; a third adds nothing (docs/any-draft.md)."""
_FAINT: Final = 12.0
"""What is below the best score by more than this is left out where scores are added up."""
_LIKELY = 6.0
_CHECKED = 16
_LEAST_LEFT: Final = 1e-4


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
    """Logits of the draft, [num_tokens + 1] float32; the last is -inf, for ids that no token writes."""

    __slots__ = ("_norm", "logits")

    def __init__(self, logits: Row, num_tokens: int) -> None:
        self.logits = np.empty(num_tokens + 1, np.float32)
        self.logits[:-1] = logits[:num_tokens]
        self.logits[-1] = -np.inf
        self._norm: float | None = None

    @property
    def norm(self) -> float:
        """The logarithm of the sum of exp(logit)."""
        if self._norm is None:
            highest = self.logits.max()
            scaled = self.logits - highest
            self._norm = float(highest) + math.log(float(np.exp(scaled, out=scaled).sum()))
        return self._norm


@dataclass(frozen=True, slots=True)
class Ahead:
    """The likeliest next token, where ids of the target go on after it.

    score: its own. index: the id that it counts for. written: what it writes of the next id. pairs: what tokens after
    it count for.
    """

    context: Context
    score: float
    index: int
    written: bytes
    pairs: Pairs


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
        counted = [at for at in range(max(0, last - _PLACES), last) if mapping.begins(rests[at])] + [last]
        parting = min(parting, counted[0])
        keys = (cut.key, *key_after(cut.key, tokens))
        contexts = [Context(key, cut, tokens[:at]) for at, key in enumerate(keys)]
        for at in reversed(counted):
            found.setdefault(
                keys[at], Cover(contexts[at], rests[at], tuple(zip(contexts[:at], tokens[:at], strict=True)))
            )
    return [Cover(each.context, each.rest, each.path[parting:]) for each in found.values()]


def contexts_of(covers: Sequence[Cover]) -> Iterator[Context]:
    """All whose rows `score` needs, some more than once."""
    for cover in covers:
        yield from (before for before, _ in cover.path)
        yield cover.context


def score(
    mapping: VocabularyMap, last: int, covers: Sequence[Cover], rows: Mapping[int, KeptRow], out: Row
) -> Ahead | None:
    """Writes a score for each id into `out`, [num_ids] float32; gives what to look behind.

    last: the text's last id, or -1. rows: by key; a cover whose rows are missing does not count. Ids without a score
    get -inf; where none has one, all get 0.
    """
    out.fill(-np.inf)
    best: tuple[float, Context, int, int, int] | None = None
    for cover in covers:
        before = [(row, token) for context, token in cover.path if (row := rows.get(context.key)) is not None]
        kept = rows.get(cover.context.key)
        if kept is None or len(before) < len(cover.path):
            continue
        offset = 0.0
        if len(covers) > 1:
            offset = sum(float(row.logits[token]) - row.norm for row, token in before) - kept.norm
        if cover.rest or best is not None:
            pairs = mapping.pairs(cover.rest)
            values = kept.logits[pairs.tokens] + np.float32(offset)
            if not values.size:
                continue
            at = int(values.argmax())
            token, index, highest = int(pairs.tokens[at]), int(pairs.ids[at]), float(values[at])
        else:
            np.take(kept.logits, mapping.token_of, out=out, mode="clip")
            if offset:
                out += np.float32(offset)
            pairs = mapping.longer
            values = kept.logits[pairs.tokens] + np.float32(offset)
            token = int(kept.logits.argmax())
            index, highest = int(mapping.id_of[token]), float(kept.logits[token]) + offset
        if best is None or highest > best[0]:
            best = (highest, cover.context, token, index, len(cover.rest))
        _add(out, pairs.ids, values, best[0])
    out[mapping.joined(last)] = -np.inf
    if best is None or not np.isfinite(out.max()):
        out.fill(0.0)
        return None
    highest, context, token, index, num_before = best
    written = mapping.spelled[token][num_before:]
    pairs = mapping.beyond(written)
    if index < 0 or not len(pairs.ids):
        return None
    return Ahead(context.then(token), highest, index, written, pairs)


def look_behind(mapping: VocabularyMap, last: int, ahead: Ahead, kept: KeptRow, out: Row) -> None:
    """Moves the chance of a token to the ids that go on after it, by the row that follows it."""
    values = kept.logits[ahead.pairs.tokens] - np.float32(kept.norm)
    ids, tokens = ahead.pairs.ids.copy(), ahead.pairs.tokens
    likely = np.flatnonzero(values > values.max() - _LIKELY)
    for at in likely[np.argsort(values[likely])[-_CHECKED:]].tolist():
        ids[at] = mapping.meant(ahead.written, int(tokens[at]), int(ids[at]))
        if ids[at] < 0:
            values[at] = -np.inf
    moved = float(np.exp(values).sum())
    _add(out, ids, values + np.float32(ahead.score), ahead.score)
    left = math.exp(float(out[ahead.index]) - ahead.score) - moved
    out[ahead.index] = ahead.score + math.log(max(left, _LEAST_LEFT))
    out[mapping.joined(last)] = -np.inf


def _add(out: Row, ids: NDArray[np.int64], values: Row, highest: float) -> None:
    """Adds chances, given as logarithms, where they matter."""
    strong = np.flatnonzero(values > highest - _FAINT)
    np.logaddexp.at(out, ids[strong], values[strong])
