"""A plain twin of mapped drafts: scores from the whole text each time, over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.fake_runtime import FakeSequenceRuntime
from tests.other_tokenizers import DRAFTS, tokenizer_of

from outrider.models.text.draft_text import Place
from outrider.models.text.vocabulary_map import VocabularyMap

Row = NDArray[np.float32]
MAPS = {kind: VocabularyMap(tokenizer_of("target"), tokenizer_of(kind)) for kind in DRAFTS}


def placed(mapping: VocabularyMap, ids: Sequence[int]) -> Place:
    place = mapping.text.begin
    for index in ids:
        place = mapping.text.advance(place, index)
    return place


class PlainTwin:
    """Scores as `mapped_scores` defines them, from the whole text each time and over the whole vocabulary."""

    def __init__(self, kind: str, row_of: Callable[[Sequence[int]], Row]) -> None:
        self.mapping, self.row_of = MAPS[kind], row_of
        self.ids = {spelled: index for index, spelled in enumerate(self.mapping._by_id) if spelled}

    def chances(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        row = self.row_of(tokens).astype(np.float64)
        row[row <= row.max() - 10.0] = -np.inf
        chances: NDArray[np.float64] = row - np.logaddexp.reduce(row)
        return chances

    def step(self, tokens: Sequence[int], token: int) -> float:
        """A faint token counts as the bound of what is faint."""
        chances = self.chances(tokens)
        return max(float(chances[token]), float(chances.max()) - 10.0)

    def longest(self, text: bytes) -> bytes:
        return next((text[:size] for size in range(len(text), 0, -1) if text[:size] in self.ids), b"")

    def scores(self, ids: Sequence[int]) -> NDArray[np.float64]:
        mapping = self.mapping
        place = placed(mapping, ids)
        before, tail = place.cut.since(0), place.tail
        paths = [mapping.text.split(tail, place.cut.at_start)]
        if tail:
            paths.append(mapping.text.split(tail + b"a", place.cut.at_start).until(len(tail)))
        covers: dict[tuple[int, ...], bytes] = {}
        for tokens, ends in paths:
            for at in range(len(tokens), max(-1, len(tokens) - 3), -1):
                rest = tail[(0, *ends)[at] :]
                is_begun = any(each.startswith(rest) and len(each) > len(rest) for each in mapping.spelled)
                if at == len(tokens) or (rest and is_begun):
                    covers.setdefault(tokens[:at], rest)
        shared = min(len(each) for each in covers)
        while any(each[:shared] != next(iter(covers))[:shared] for each in covers):
            shared -= 1
        out = np.full(mapping.num_ids, -np.inf)
        best: tuple[float, tuple[int, ...], bytes, int] = (-math.inf, (), b"", -1)
        for tokens, rest in covers.items():
            steps = range(shared, len(tokens) + 1)
            if any(not before and not tokens[:step] for step in steps):
                continue  # there is no row before the first token
            path = sum(self.step([*before, *tokens[:step]], tokens[step]) for step in steps[:-1])
            row = self.chances([*before, *tokens]) + path
            if not rest and best[0] == -math.inf:  # the text's end comes at a place between tokens
                for index, token in mapping.ends:
                    out[index] = np.logaddexp(out[index], row[token])
            for token, spelled in enumerate(mapping.spelled):
                new = self.longest(spelled[len(rest) :]) if spelled.startswith(rest) else b""
                if new and (mapping.id_of[token] >= 0 or rest):
                    out[self.ids[new]] = np.logaddexp(out[self.ids[new]], row[token])
                if (new or not rest) and row[token] > best[0]:
                    best = (
                        float(row[token]),
                        tokens,
                        spelled[len(rest) :] if mapping.id_of[token] >= 0 else b"",
                        token,
                    )
        self.look_behind(best, before, out)
        last = mapping._by_id[place.last] if place.last >= 0 else b""
        for spelled, index in self.ids.items():
            if last and last + spelled in self.ids:
                out[index] = -np.inf
        return out

    def look_behind(
        self, best: tuple[float, tuple[int, ...], bytes, int], before: Sequence[int], out: NDArray[np.float64]
    ) -> None:
        score, tokens, written, token = best
        if not written or not any(each.startswith(written) and len(each) > len(written) for each in self.ids):
            return
        row, moved = self.chances([*before, *tokens, token]), 0.0
        for after in np.argsort(row)[-32:].tolist():
            index = self.mapping.meant(written, after)
            if index >= 0:
                out[index] = np.logaddexp(out[index], score + row[after])
                moved += math.exp(row[after])
        meant = self.ids[self.longest(written)]
        if moved:
            out[meant] = score + math.log(max(math.exp(out[meant] - score) - moved, 1e-4))


def assert_alike(found: Row, twin: PlainTwin, ids: Sequence[int]) -> None:
    """Equal but for a constant, and what 32 bits leave out."""
    plain = twin.scores(ids)
    if not np.isfinite(plain).any():
        assert not np.isfinite(found).any()
        return
    known = np.flatnonzero(plain > plain.max() - 9.0)
    assert np.ptp(found[known] - plain[known]) < 0.01
    assert not np.isfinite(found[np.isneginf(plain)]).any()


def fake(kind: str, max_branches: int = 8, max_positions: int = 512, **calls: Any) -> FakeSequenceRuntime:
    size = MAPS[kind].num_tokens + 3  # a model's vocabulary is often padded
    return FakeSequenceRuntime(vocab_size=size, max_positions=max_positions, max_branches=max_branches, **calls)


def row_of(kind: str) -> Callable[[Sequence[int]], Row]:
    return lambda tokens: fake(kind).extend(tokens)[: MAPS[kind].num_tokens]
