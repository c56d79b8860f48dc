"""Guesses from sizes and times of messages which prompt a text continues, for `bench.side_channel`.

Classifiers learn from traces whose prompts are known, and name those of others. Knows nothing of how traces are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer

BIN_S: Final = 0.04
NUM_TREES = 500
MERGE_S: Final = 0.002
"""Reads of a direction that are closer are one."""
NUM_COMMITS: Final = 8
PLAIN_COMMIT, DRAFTED_COMMIT = 51, 78
"""About the bytes of a commit's chunk without its tokens: where nothing was proposed, and else."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes that the eavesdropper sees pass. at_s: by a clock of its own."""

    at_s: float
    is_up: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One text's window. opening: bytes of the largest read up before it. num_tokens: in it. reads: at_s counts from
    its beginning. is_steady: whether it is of a steady session.
    """

    prompt: int
    seed: int
    opening: int
    num_tokens: int
    reads: tuple[Read, ...]
    is_steady: bool = False


def padded(traces: Sequence[Trace]) -> list[Trace]:
    """Every read as large as the largest of its direction, the opening as the largest opening."""
    most = {
        is_up: max((read.num_bytes for trace in traces for read in trace.reads if read.is_up is is_up), default=0)
        for is_up in (False, True)
    }
    opening = max(trace.opening for trace in traces)
    return [
        replace(trace, opening=opening, reads=tuple(replace(read, num_bytes=most[read.is_up]) for read in trace.reads))
        for trace in traces
    ]


# -- what a classifier knows of a trace --------------------------------------------------------------------------------


def merged(trace: Trace, is_up: bool) -> list[tuple[float, int]]:
    """(seconds, bytes) of a direction's messages, as far as reads show them."""
    found: list[tuple[float, int]] = []
    for read in trace.reads:
        if read.is_up is not is_up:
            continue
        if found and read.at_s - found[-1][0] < MERGE_S:
            found[-1] = (found[-1][0], found[-1][1] + read.num_bytes)
        else:
            found.append((read.at_s, read.num_bytes))
    return found


def by_place(traces: Sequence[Trace], num_down: int, num_up: int, num_bins: int) -> NDArray[np.float32]:
    """[N, features]: sizes and times of the first messages of each direction, then messages and bytes so far in bins of
    time. -1 where there is none.
    """
    rows = np.full((len(traces), 2 * (num_down + num_up) + 4 * num_bins), -1.0, np.float32)
    for row, trace in zip(rows, traces, strict=True):
        at = 0
        for is_up, num in ((False, num_down), (True, num_up)):
            messages = merged(trace, is_up)
            for place, (at_s, num_bytes) in enumerate(messages[:num]):
                row[at + 2 * place : at + 2 * place + 2] = num_bytes, at_s
            at += 2 * num
            for bin_ in range(num_bins):
                before = [num_bytes for at_s, num_bytes in messages if at_s < (bin_ + 1) * BIN_S]
                row[at : at + 2] = len(before), sum(before)
                at += 2
    return rows


def words(trace: Trace) -> Iterator[str]:
    """Of the first commits: each size by its place and by how much came before, runs of sizes, the whole beginning."""
    sizes = [num_bytes for _, num_bytes in merged(trace, False)][:NUM_COMMITS]
    gaps = [round((b - a) / 0.005) for (a, _), (b, _) in pairwise(merged(trace, False))][:NUM_COMMITS]
    yield from (f"gap {place} {gap}" for place, gap in enumerate(gaps))
    before = 0
    for place, size in enumerate(sizes):
        yield f"size {place} {size}"
        yield f"beginning {sizes[: place + 1]}"
        for shift in (0, 1):  # so that two that differ by one have a word in common
            near = f"after {(before + shift) // 2}"
            yield f"{near} {size // 2}"
            if place + 1 < len(sizes):
                yield f"{near} {size // 2} {sizes[place + 1] // 2}"
        if place:
            yield f"run {sizes[place - 1]} {size}"
        before += size - (PLAIN_COMMIT if size < DRAFTED_COMMIT else DRAFTED_COMMIT)
        yield f"so far {before}"


def with_opening(traces: Sequence[Trace], num_down: int) -> NDArray[np.float32]:
    """The size of the opening as well."""
    openings = np.array([[trace.opening] for trace in traces], np.float32)
    return np.hstack([openings, by_place(traces, num_down, 0, 0)])


Features = Callable[[Sequence[Trace]], Any]


def trees(features: Features, max_features: float | str = "sqrt") -> Pipeline:
    """Extremely randomized trees (Geurts et al. 2006). max_features: of a split, as scikit-learn has it."""
    forest = ExtraTreesClassifier(NUM_TREES, max_features=max_features, n_jobs=-1, random_state=0)
    return make_pipeline(FunctionTransformer(features), forest)


CLASSIFIERS: Final[Mapping[str, Callable[[], Pipeline]]] = {
    f"trees, {num_down} down, {num_up} up, {num_bins} bins": partial(
        trees, partial(by_place, num_down=num_down, num_up=num_up, num_bins=num_bins)
    )
    for num_down, num_up, num_bins in ((8, 0, 0), (16, 48, 0), (0, 0, 24))
} | {
    "naive Bayes of words": lambda: make_pipeline(
        CountVectorizer(analyzer=lambda trace: list(words(trace)), binary=True), MultinomialNB(alpha=0.05)
    )
}
OPENING: Final[Mapping[str, Callable[[], Pipeline]]] = {
    f"trees, opening, {num_down} down": partial(trees, partial(with_opening, num_down=num_down), max_features=1.0)
    for num_down in (0, 8)
}


def validated(classifier: Pipeline, known: Sequence[Trace]) -> float:
    """The share of right guesses of traces that were left out in turn, by their seeds."""
    labels, seeds = [trace.prompt for trace in known], [trace.seed for trace in known]
    folds = GroupKFold(min(4, len(set(seeds))))
    return float(np.mean(cross_val_score(classifier, known, labels, groups=seeds, cv=folds)))


def named(classifier: Pipeline, known: Sequence[Trace], others: Sequence[Trace]) -> float:
    """The share of `others` whose prompt is guessed rightly."""
    classifier.fit(known, [trace.prompt for trace in known])
    return float(classifier.score(others, [trace.prompt for trace in others]))
