"""Checks in a worker, at its start, that its device picks as numpy does: nine rows, and one that is not finite.

The rows, and what decides their tokens, are made here. Each rule decides its row: without it the token is another one.
And no token is a near tie: it stays where every number is a little larger or smaller. So what differs is no rounding: a
build that hashes, masks, counts or truncates wrongly does not start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.models.picks.row_terms import RowTerms
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.picks.sampling_torch import choose_rows
from outrider.models.processors.chooser import logprobs_of
from outrider.models.processors.logprobs_torch import RowLogprobs, token_logprobs
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan, apply_all
from outrider.models.processors.rows_torch import RowChanges
from outrider.models.processors.text_rows import TextPath, TextRows

Row = NDArray[np.float32]

_LEAST_IDS: Final = 512
_POSITION: Final = 40
_NUM_PEAKS: Final = 24
"""Ids of a row that have nearly all of its mass."""
_LITTLE: Final = 1e-4
_NUM_LOGPROBS: Final = 5
_FAULTY: Final = -1

_WARM: Final = SamplingParams(temperature=0.8)
_RULES: Final = {
    "noise": (_WARM, PLAIN),
    "top-k": (replace(_WARM, top_k=3), PLAIN),
    "top-p": (replace(_WARM, top_p=0.5), PLAIN),
    "min-p": (replace(_WARM, min_p=0.3), PLAIN),
    "typical-p": (_WARM, ProcessorOptions(typical_p=0.5)),
    "XTC": (_WARM, ProcessorOptions(xtc_probability=0.05, xtc_threshold=0.1)),  # another coin acts rarely
}


@dataclass(frozen=True, slots=True)
class _Check:
    """A row, [V], and what decides its token. text: before the row. mask: bool [V], of a grammar; None: none."""

    name: str
    row: Row
    params: SamplingParams
    plan: ProcessorPlan = field(default_factory=ProcessorPlan)
    text: tuple[int, ...] = ()
    mask: NDArray[np.bool_] | None = None

    def changed(self) -> Row:
        """What is picked from, by numpy."""
        row = self.row if self.mask is None else np.where(self.mask, self.row, np.float32(-np.inf))
        return apply_all(replace(self.plan, num_generated=len(self.text)).states(self.text, row.size), row)

    def token(self) -> int:
        """The pick, by numpy."""
        return pick(self.changed(), self.params, _POSITION, self.plan.narrowing)

    def decides(self) -> bool:
        """Whether the token is another one without what decides it, and none that a little of anything changes."""
        temperature = 0.0 if self.name == "noise" else self.params.temperature
        plain = _Check("", self.row, SamplingParams(temperature, seed=self.params.seed))
        token = self.token()
        return plain.token() != token and all(self._moved(by).token() == token for by in (1 - _LITTLE, 1 + _LITTLE))

    def _moved(self, by: float) -> _Check:
        params, options = self.params, self.plan.processors
        moved = replace(
            params, temperature=params.temperature * by, top_p=min(1.0, params.top_p * by), min_p=params.min_p * by
        )
        typical_p, threshold = min(1.0, options.typical_p * by), options.xtc_threshold * by
        plan = replace(self.plan, processors=replace(options, typical_p=typical_p, xtc_threshold=threshold))
        noise = np.random.default_rng(0).normal(scale=_LITTLE * by, size=self.row.size).astype(np.float32)
        return replace(self, row=self.row + noise, params=moved, plan=plan)


def row_faults(device: torch.device, vocab_size: int) -> list[str]:
    """What comes out otherwise on the device than in numpy, in words; nothing where all is well.

    vocab_size: of the model. Takes some tenths of a second with 152,000 ids.
    """
    checks = list(_checks(max(vocab_size, _LEAST_IDS)))
    broken = np.full_like(checks[0].row, np.nan)
    logits = torch.from_numpy(np.stack([*(each.row for each in checks), broken])).to(device)
    every = torch.arange(len(checks), device=device)
    logprobs = RowLogprobs(logits, every, _NUM_LOGPROBS)
    changes = RowChanges(list(_paths(checks)), len(logits), logits.shape[1], device)
    is_finite = changes.apply(logits)
    changed = logits.cpu().numpy().copy()
    terms = RowTerms.of(
        [*(each.params for each in checks), _WARM],
        [_POSITION] * len(logits),
        [*(each.plan.processors for each in checks), None],
        device,
    )
    tokens = choose_rows(logits, terms, is_finite)
    reported = logprobs.of(changes.own(logits, every, tokens[:-1])).tolist()
    faults = [] if int(tokens[-1]) == _FAULTY else ["a row that is not finite: it has a token"]
    for check, token, row, found in zip(checks, tokens.tolist(), changed, reported, strict=False):
        expected = check.token()
        if token != expected:
            faults.append(f"{check.name}: token {token}, expected {expected}")
        others = np.flatnonzero(~np.isclose(row, check.changed(), rtol=0.0, atol=_LITTLE))
        if others.size:
            faults.append(f"{check.name}: other logits of {others.size} tokens, the first is {others[0]}")
        if not _is_near(found, check, token):
            faults.append(f"{check.name}: other logprobs")
    return faults


def _is_near(found: list[float], check: _Check, token: int) -> bool:
    """Whether logprobs are numpy's. found: of `RowLogprobs`, for the token."""
    here, there = token_logprobs(token, found, _NUM_LOGPROBS), logprobs_of(check.row, token, _NUM_LOGPROBS)
    ids = [each for each, _ in here.top] == [each for each, _ in there.top]
    values = [(here.logprob, there.logprob), *((a, b) for (_, a), (_, b) in zip(here.top, there.top, strict=False))]
    return ids and all(abs(a - b) < _LITTLE for a, b in values)


def _paths(checks: list[_Check]) -> Iterator[tuple[int, TextPath]]:
    """What changes the rows, with the first row of each."""
    for index, check in enumerate(checks):
        if check.mask is not None:
            path = TextRows(check.plan, (), check.row.size).walk(())
            path.rows[0] = replace(path.rows[0], mask=np.packbits(check.mask, bitorder="little"))
            yield index, path
    *_, before, behind = checks
    text = TextRows(before.plan, (), before.row.size)
    text.follow((), before.text)
    yield len(checks) - 2, text.walk(behind.text[len(before.text) :])


def _checks(size: int) -> Iterator[_Check]:
    """The rows, of `size` ids each; the last two are of one text, with a drafted token between them."""
    for index, (name, (params, options)) in enumerate(_RULES.items()):
        check = _Check(name, _row(size, index)[0], params, ProcessorPlan(options))
        seeded = (replace(check, params=replace(params, seed=seed)) for seed in count())
        yield next(each for each in seeded if each.decides())
    row, peaks = _row(size, len(_RULES))
    mask = np.ones(size, np.bool_)
    mask[peaks[: _NUM_PEAKS // 2]] = False
    yield _Check("a grammar's mask", row, SamplingParams(), mask=mask)
    yield from _with_options(size)


def _with_options(size: int) -> tuple[_Check, _Check]:
    """Two rows of one text."""
    row, peaks = _row(size, len(_RULES) + 1)
    plan = ProcessorPlan(
        ProcessorOptions(
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.7,
            logit_bias=((peaks[5], 1.5), (peaks[0], -2.0)),
            bad_words=((peaks[4],), (peaks[3], peaks[2])),
            min_tokens=50,
            allowed_ids=tuple(peaks[:-1]),
        ),
        stop_ids=frozenset({peaks[1]}),
    )
    text = (peaks[0], peaks[6], peaks[0])
    for seed in count():
        params = replace(_WARM, seed=seed)
        before = _Check("penalties, biases, forbidden ids", row, params, plan, text)
        behind = _Check("the same behind a drafted token", row, params, plan, (*text, peaks[3]))
        if before.decides() and behind.decides():
            return before, behind
    raise AssertionError


def _row(size: int, number: int) -> tuple[Row, list[int]]:
    """A row, and its peaks, the highest first."""
    rng = np.random.default_rng(number)
    row = rng.normal(size=size).astype(np.float32)
    peaks = rng.choice(size, _NUM_PEAKS, replace=False)
    row[peaks] = rng.uniform(13.0, 17.0, _NUM_PEAKS)
    return row, sorted(peaks.tolist(), key=lambda peak: -row[peak])
