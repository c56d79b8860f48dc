"""Guesses from sizes and times of messages which prompt a text continues, for `bench.side_channel`.

Classifiers learn from traces whose prompts are known, and name those of others. Knows nothing of how traces are made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

SMOOTHING: Final = 0.1
"""Of naive Bayes: a word that a prompt never had counts as so much of one trace."""
NUM_BINS: Final = 40
"""Of time, of the linear discriminant."""


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


# -- what is seen of a trace -------------------------------------------------------------------------------------------


def as_it_is(traces: Sequence[Trace]) -> list[Trace]:
    """The traces."""
    return list(traces)


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


SEEN: Final[Mapping[str, Callable[[Sequence[Trace]], list[Trace]]]] = {"as it is": as_it_is, "padded": padded}
"""The rows of the table."""
OPENING: Final = "opening"


# -- the classifiers ---------------------------------------------------------------------------------------------------

Words = Callable[[Trace], Iterator[object]]
Classify = Callable[[Sequence[Trace], Sequence[Trace]], list[int]]
"""Traces that are known, and others: the others' prompts, as guessed."""


def naive_bayes(words: Words, known: Sequence[Trace], others: Sequence[Trace]) -> list[int]:
    """Multinomial naive Bayes over a trace's words (Manning et al. 2008, 13.2), each counted once in a trace."""
    places: dict[object, int] = {}
    seen = [[places.setdefault(word, len(places)) for word in set(words(trace))] for trace in known]
    prompts = sorted({trace.prompt for trace in known})
    counts = np.full((len(prompts), len(places)), SMOOTHING)
    for trace, found in zip(known, seen, strict=True):
        counts[prompts.index(trace.prompt), found] += 1.0
    logs = np.log(counts / counts.sum(axis=1, keepdims=True))
    asked = ([places[word] for word in set(words(trace)) if word in places] for trace in others)
    return [prompts[int(logs[:, found].sum(axis=1).argmax())] for found in asked]


def nearest_mean(known: Sequence[Trace], others: Sequence[Trace], *, bin_s: float = 0.04) -> list[int]:
    """Linear discriminant analysis of the numbers of reads and bytes in each time bin, its covariance shrunk."""
    labels = np.array([trace.prompt for trace in known])
    rows, wanted = _bins(known, bin_s), _bins(others, bin_s)
    spread = rows.std(axis=0) + 1e-9
    rows, wanted = rows / spread, wanted / spread
    prompts = np.unique(labels)
    means = np.stack([rows[labels == prompt].mean(axis=0) for prompt in prompts])
    inside = rows - means[np.searchsorted(prompts, labels)]
    covariance = inside.T @ inside / len(rows)
    shrunk = 0.5 * np.trace(covariance) / len(covariance) + 1e-9  # some more: bins that never differ make it singular
    covariance = 0.5 * covariance + shrunk * np.eye(len(covariance))
    weights = np.linalg.solve(covariance, means.T)
    scores = wanted @ weights - 0.5 * (means * weights.T).sum(axis=1)
    return [int(prompt) for prompt in prompts[scores.argmax(axis=1)]]


def nearest_opening(known: Sequence[Trace], others: Sequence[Trace]) -> list[int]:
    """By the size of the opening alone: the prompt whose own are closest on average."""
    sizes: dict[int, list[int]] = {}
    for trace in known:
        sizes.setdefault(trace.prompt, []).append(trace.opening)
    means = {prompt: sum(found) / len(found) for prompt, found in sizes.items()}
    return [min(means, key=lambda prompt: abs(means[prompt] - trace.opening)) for trace in others]


def _bins(traces: Sequence[Trace], bin_s: float) -> NDArray[np.float64]:
    """[N, 4 * bins]: reads up, reads down, bytes up, bytes down, each summed to the end of the bin."""
    count = math.ceil(max(read.at_s for trace in traces for read in trace.reads) / bin_s) + 1
    rows = np.zeros((len(traces), 2, 2, max(count, NUM_BINS)))
    for row, trace in zip(rows, traces, strict=True):
        for read in trace.reads:
            row[:, int(read.is_up), int(read.at_s / bin_s)] += (1.0, read.num_bytes)
    cumulated: NDArray[np.float64] = rows[..., :NUM_BINS].cumsum(axis=-1).reshape(len(traces), -1)
    return cumulated


def runs_of_sizes(trace: Trace) -> Iterator[object]:
    """Runs of one to four sizes in a direction."""
    for is_up in (False, True):
        sizes = [read.num_bytes for read in trace.reads if read.is_up is is_up]
        for length in (1, 2, 3, 4):
            yield from ((is_up, *sizes[at : at + length]) for at in range(len(sizes) - length + 1))


def placed_sizes(trace: Trace) -> Iterator[object]:
    """Sizes in a direction, each with about how many of its size class came before."""
    for is_up in (False, True):
        sizes = [read.num_bytes for read in trace.reads if read.is_up is is_up]
        yield from ((is_up, place // 3, size) for place, size in enumerate(sizes))


def placed_texts(trace: Trace) -> Iterator[object]:
    """Larger reads down alone, by place: commits, without the answers to drafts, which all have one size."""
    common = Counter(read.num_bytes for read in trace.reads if not read.is_up).most_common(1)
    sizes = [read.num_bytes for read in trace.reads if not read.is_up and read.num_bytes != common[0][0]]
    for length in (1, 2, 3):
        for at in range(len(sizes) - length + 1):
            run = tuple(sizes[at : at + length])
            yield run
            yield (at // 2, *run)


def gaps(trace: Trace) -> Iterator[object]:
    """Runs of one to three times between reads in a direction, to 5 ms, each with its time to 0.2 s."""
    for is_up in (False, True):
        times = [read.at_s for read in trace.reads if read.is_up is is_up]
        steps = [round((b - a) / 0.005) for a, b in pairwise(times)]
        for length in (1, 2, 3):
            for at in range(len(steps) - length + 1):
                yield (is_up, *steps[at : at + length])
                yield (is_up, int(times[at] / 0.2), *steps[at : at + length])


def all_words(trace: Trace) -> Iterator[object]:
    """All of the above."""
    for words in (runs_of_sizes, placed_sizes, placed_texts, gaps):
        yield from ((words.__name__, word) for word in words(trace))


CLASSIFIERS: Final[Mapping[str, Classify]] = {
    words.__name__: partial(naive_bayes, words)
    for words in (runs_of_sizes, placed_sizes, placed_texts, gaps, all_words)
} | {"nearest_mean": nearest_mean}


def share(guessed: Sequence[int], traces: Sequence[Trace]) -> float:
    """Of guesses that are right."""
    return sum(guess == trace.prompt for guess, trace in zip(guessed, traces, strict=True)) / len(traces)


def validated(classify: Classify, known: Sequence[Trace], num_folds: int = 2) -> float:
    """The share of right guesses of traces that were left out in turn, by their seeds."""
    shares = []
    for fold in range(num_folds):
        out = [trace for trace in known if trace.seed % num_folds == fold]
        left = [trace for trace in known if trace.seed % num_folds != fold]
        if out and left:
            shares.append(share(classify(left, out), out))
    return sum(shares) / len(shares)
