"""Measures how often a target accepts a draft's tokens: the figure by which a pair is judged.

The target's continuations are computed first, all prompts in one batch, once for any number of drafts. Then a draft
reads the same tokens one at a time, as it does when it drafts, and ranks its guesses at every position with the same
noise. A pick is a pure function of the text before it, so the vector of matches gives the outcome of rounds of any
depth. The ranks and gaps are kept too: they say what a draft that branches gains. Knows no particular runtime.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.report.simulation.ranks import EDGES, MISSED, UNSCORED, Picked, Ranks, bucket
from outrider.models.bundle.manifest import Acceptance, AtDepth, AtGap, AtWidth
from outrider.models.errors import ExportError
from outrider.models.picks.sampling import SamplingParams, candidates, pick
from outrider.models.runtimes.base import BatchRuntime, SequenceRuntime, SequenceSlice

NEW_TOKENS: Final = 40
TEMPERATURES: Final = (0.0, 0.5, 0.8)
DEPTHS: Final = (1, 2, 4, 8)
WIDTHS: Final = (1, 2, 4, 8)

_GUESSES: Final = 16  # that the target's pick is looked for among


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and the target's text after it, as ids, with the sampling parameters."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Rounds:
    """Counts over rounds of drafting to one depth; a round ends at its first rejected token, or after the last."""

    tested: int = 0
    accepted: int = 0
    rounds: int = 0

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(self.tested + other.tested, self.accepted + other.accepted, self.rounds + other.rounds)


def continue_prompts(
    target: BatchRuntime,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    num_ids: int,
    stop_ids: Sequence[int],
    num_tokens: int = NEW_TOKENS,
) -> tuple[Continuation, ...]:
    """The target's own text after each prompt at each temperature, num_tokens long or to its end; prompt i has seed i.

    num_ids: ids that the tokenizer knows; columns beyond are padding, of different width in the two models.
    Raises ExportError if no prompt leaves room for the new tokens.
    """
    fitting = _fitting(target, prompts, num_tokens)
    found: list[Continuation] = []
    for temperature in temperatures:
        params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(len(fitting))]
        texts = _continue_all(
            target, fitting, params, num_ids=num_ids, stop_ids=frozenset(stop_ids), num_tokens=num_tokens
        )
        found += map(Continuation, fitting, map(tuple, texts), params)
    return tuple(found)


def blocks_needed(target: BatchRuntime, prompts: Sequence[Sequence[int]], num_tokens: int = NEW_TOKENS) -> int:
    """Cache blocks that `continue_prompts` needs at least: those of its longest prompt with the new tokens.

    Raises ExportError if no prompt leaves room for them.
    """
    return max(_blocks_each(target, _fitting(target, prompts, num_tokens), num_tokens))


def _fitting(target: BatchRuntime, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """The prompts that leave room for the new tokens. Raises ExportError if none does."""
    longest = target.limits.max_positions
    fitting = [tuple(prompt) for prompt in prompts if 0 < len(prompt) <= longest - num_tokens]
    if not fitting:
        raise nothing_fits(longest, num_tokens)
    return fitting


def measure_ranks(draft: SequenceRuntime, texts: Sequence[Continuation], *, num_ids: int) -> dict[float, Ranks]:
    """Where the target's picks stand among the draft's guesses, by temperature of `texts`, in their order.

    Texts too long for the draft are left out. Raises ExportError if all are.
    """
    longest = draft.limits.max_positions
    fitting = [text for text in texts if len(text.prompt) + len(text.text) <= longest]
    if not fitting:
        raise nothing_fits(longest, NEW_TOKENS)
    found: dict[float, list[tuple[Picked, ...]]] = {}
    for text in fitting:
        picked = tuple(
            Picked.among(
                candidates(logits, text.params, position, _GUESSES),
                token,
                UNSCORED if np.isneginf(logits[token]) else MISSED,
            )
            for position, token, logits in read_along(draft, text, num_ids)
        )
        found.setdefault(text.params.temperature, []).append(picked)
    return {temperature: Ranks(tuple(rows)) for temperature, rows in found.items()}


def read_along(
    draft: SequenceRuntime, text: Continuation, num_ids: int
) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Feeds the text to the draft token by token: each position, the target's token, the draft's logits before it."""
    draft.truncate(0)
    logits = draft.extend(text.prompt)
    for index, token in enumerate(text.text):
        if index:
            logits = draft.extend(text.text[index - 1 : index])
        yield len(text.prompt) + index, token, logits[:num_ids]


def summarize(ranks: Mapping[float, Ranks], target_name: str) -> tuple[Acceptance, ...]:
    """The figures of a report, one per temperature."""
    return tuple(_summary(temperature, found, target_name) for temperature, found in ranks.items())


def play_rounds(matches: NDArray[np.bool_], depth: int, *, counts_short_ends: bool = False) -> Rounds:
    """Rounds of `depth` drafted tokens along one text; `matches` is [positions].

    A round that accepts n tokens moves on by n + 1: the target's own token follows in any case. Rounds begin only where
    `depth` positions follow: one that the end of the text cuts short would count fewer than it could have had.
    counts_short_ends: count such rounds too, so that every position is in a round.
    """
    counts, start = Rounds(), 0
    while start < len(matches) if counts_short_ends else start + depth <= len(matches):
        window = matches[start : start + depth]
        rejected = np.flatnonzero(~window)
        accepted = int(rejected[0]) if rejected.size else len(window)
        counts += Rounds(accepted + (rejected.size > 0), accepted, 1)
        start += accepted + 1
    return counts


def _summary(temperature: float, ranks: Ranks, target_name: str) -> Acceptance:
    matches = [np.array([token.rank == 0 for token in text], np.bool_) for text in ranks.texts]
    num_tested = sum(map(len, matches))
    rate = sum(int(found.sum()) for found in matches) / num_tested
    # Tokens of one text depend on each other; texts are independent.
    residuals = [float(found.sum()) - rate * len(found) for found in matches]
    played = {depth: sum((play_rounds(found, depth) for found in matches), Rounds()) for depth in DEPTHS}
    by_depth = tuple(
        AtDepth(
            depth=depth,
            rate=round(counts.accepted / counts.tested, 4),
            tokens_per_pass=round((counts.accepted + counts.rounds) / counts.rounds, 3),
        )
        for depth, counts in played.items()
        if counts.rounds
    )
    return Acceptance(
        target=target_name,
        temperature=temperature,
        tested_tokens=num_tested,
        rate=round(rate, 4),
        error=round(math.sqrt(sum(residual**2 for residual in residuals)) / num_tested, 4),
        by_depth=by_depth,
        by_width=tuple(AtWidth(width=width, rate=round(ranks.hits(width), 4)) for width in WIDTHS),
        by_gap=_by_gap(ranks),
        unscored=round(sum(token.rank == UNSCORED for token in ranks.picked) / num_tested, 4),
    )


def _by_gap(ranks: Ranks) -> tuple[AtGap, ...]:
    """Acceptance by the lead of the best guess; buckets that hold no token are left out."""
    found = []
    for index, from_gap in enumerate((0.0, *EDGES)):
        inside = [token.rank for token in ranks.picked if bucket(token.gap(0)) == index]
        if inside:
            best, second = (round(inside.count(guess) / len(inside), 4) for guess in (0, 1))
            found.append(
                AtGap(from_gap=from_gap, share=round(len(inside) / len(ranks.picked), 4), rates=(best, second))
            )
    return tuple(found)


def nothing_fits(longest: int, num_tokens: int) -> ExportError:
    """Says that no prompt leaves room for so many new tokens in sequences of `longest`."""
    return ExportError(
        f"no prompt fits {longest} positions with {num_tokens} new tokens; give shorter prompts with --prompts"
    )


def _continue_all(
    target: BatchRuntime,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    num_ids: int,
    stop_ids: frozenset[int],
    num_tokens: int,
) -> list[list[int]]:
    """The target's own continuation of each prompt, as many prompts at a time as its cache holds."""
    sizes = _blocks_each(target, prompts, num_tokens)
    if max(sizes) > target.num_blocks:
        raise ExportError(
            f"the cache holds {target.num_blocks} blocks and one prompt needs {max(sizes)}; give shorter prompts"
        )
    texts: list[list[int]] = [[] for _ in prompts]
    blocks: dict[int, range] = {}
    while len(blocks) < len(prompts):
        live, begin = [], 0
        for i in range(len(blocks), len(prompts)):
            if begin + sizes[i] > target.num_blocks:
                break
            blocks[i] = range(begin, begin := begin + sizes[i])
            live.append(i)
        while live:
            rows = target.forward([_slice(prompts[i], texts[i], blocks[i]) for i in live])
            for row, i in zip(rows, tuple(live), strict=True):
                texts[i].append(pick(row[:num_ids], params[i], len(prompts[i]) + len(texts[i])))
                if len(texts[i]) == num_tokens or texts[i][-1] in stop_ids:
                    live.remove(i)
    return texts


def _blocks_each(target: BatchRuntime, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    return [-(-(len(prompt) + num_tokens) // target.block_size) for prompt in prompts]


def _slice(prompt: Sequence[int], text: Sequence[int], blocks: range) -> SequenceSlice:
    new = text[-1:] or prompt
    return SequenceSlice(new, len(prompt) + len(text) - len(new), blocks, 1)
