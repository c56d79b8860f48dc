"""Checks an export: its logits against the source's, in FP32. An export that fails is not written.

It runs in the runtime that will run the bundle, over the kinds of step that speculation makes: prefill, one token on
the cache, several tokens on the cache, tokens over rejected ones, and nodes of a tree in one call where the runtime
takes them. A converter can be silently wrong in any of them; with a sliding window it can be wrong only beyond the
window, so all run once more beyond every window that
the configuration names, and across every original length of a scaled rotary embedding. A target also runs all of them
in batches, with a longer sequence at the last positions: what depends on the longest position of a batch shows in the
shorter one. Knows neither torch nor OpenVINO: the source's logits come in as arrays, the export behind
`SequenceSteps` or `BatchSteps`: one sequence that grows and is cut back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.export.check.advice import GENERAL, Advice
from outrider.export.check.source_logits import BEFORE, KEPT, MULTI, ROLLED, SINGLE, ParityReference, SequencePair
from outrider.models.bundle.manifest import Parity, ParityStage
from outrider.models.errors import ExportError, ParityFailure
from outrider.models.runtimes.base import BatchRuntime, BranchingRuntime, SequenceRuntime, SequenceSlice

_NEIGHBOUR: Final = 160
"""Tokens of the longer sequence in a batch, beside 64."""
_TREE: Final = 6
"""Levels of the tree that is run, of two nodes each."""
_FRESH_NEIGHBOUR: Final = 80
"""The same where it is run from its beginning in every step."""


class RowsRuntime(SequenceRuntime, Protocol):
    """A `SequenceRuntime` that can give the logits after every new token, as a check needs them."""

    def extend_rows(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """As `extend`: [len(tokens), vocab_size] float32."""
        ...


class SequenceSteps:
    """Steps on a `SequenceRuntime` that gives every row. max_positions: the longest sequence. max_branches: of a call;
    1 where the runtime takes none.
    """

    max_branches = 1

    def __init__(self, draft: RowsRuntime) -> None:
        self._draft = draft
        self.max_positions = draft.limits.max_positions
        if isinstance(draft, BranchingRuntime):
            self.max_branches = draft.max_branches

    def run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        """Appends tokens in one step; the logits after the last `num_rows`, [num_rows, vocab_size].

        num_rows: all of them, or 1.
        """
        if num_rows == 1:
            return self._draft.extend(tokens)[None]
        assert num_rows == len(tokens)
        return self._draft.extend_rows(tokens)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        self._draft.truncate(length)

    def run_branches(self, branches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The logits after each of at most `max_branches` branches of the sequence, which stays as it is."""
        assert isinstance(self._draft, BranchingRuntime)
        return self._draft.extend_branches(branches)


class BatchSteps:
    """Steps on a `BatchRuntime`, which can step a second sequence, a neighbour, in the same batch.

    The first sequence's blocks are used from the last to the first, as their order must not matter; a neighbour has the
    blocks from the first on. num_positions: of the model, whatever the cache holds. max_positions: the longest
    sequence, of the model or as the cache holds. max_neighbour: tokens that the cache can hold of a neighbour beside 64
    of the first sequence.
    """

    def __init__(self, target: BatchRuntime) -> None:
        size = target.block_size
        self._target = target
        self.num_positions = target.limits.max_positions
        self.max_positions = min(self.num_positions, target.num_blocks * size)
        self.max_neighbour = (target.num_blocks + -64 // size) * size
        self._length = 0
        self.begin_neighbour(0)

    def run(self, tokens: Sequence[int], num_rows: int) -> NDArray[np.float32]:
        """Appends tokens in one step; the logits after the last `num_rows`, [num_rows, vocab_size]."""
        return self._target.forward([self._append(tokens, num_rows)])

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        self._length = length

    def begin_neighbour(self, first_position: int) -> None:
        """Empties the neighbour; its first token will have this position."""
        self._neighbour_length, self._neighbour_position = 0, first_position

    def run_both(
        self, tokens: Sequence[int], neighbour: Sequence[int], num_rows: int, num_neighbour_rows: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Appends tokens to both in one step; the logits after the last rows of each. `tokens` may be empty."""
        batch = [self._append(tokens, num_rows)] if tokens else []
        past, self._neighbour_length = self._neighbour_length, self._neighbour_length + len(neighbour)
        blocks = range(-(-self._neighbour_length // self._target.block_size))
        first = self._neighbour_position + past
        positions = range(first, first + len(neighbour))
        batch.append(SequenceSlice(neighbour, past, blocks, num_neighbour_rows, positions))
        logits = self._target.forward(batch)
        return logits[:num_rows], logits[num_rows:]

    def _append(self, tokens: Sequence[int], num_rows: int) -> SequenceSlice:
        past, self._length = self._length, self._length + len(tokens)
        num_blocks = -(-self._length // self._target.block_size)
        last = self._target.num_blocks - 1
        return SequenceSlice(tokens, past, range(last, last - num_blocks, -1), num_rows)


Steps = SequenceSteps | BatchSteps


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Bounds of a precision: against the source, and of the export's steps against its own prefill.

    Deltas: largest |delta logit| over the largest |logit|; None bounds the mean KL over all rows instead.
    max_own_delta tells a stale or unseen token from the noise of quantization, which is the same in a step and in a
    prefill.
    """

    max_relative_delta: float | None
    max_mean_kl: float
    min_argmax_agreement: float
    max_own_delta: float


# Measured on tiny random models of ten families, which are the hardest, in every runtime; in brackets on the reference
# pair. Worst relative delta, KL and own delta:
#   FP32 2e-6, 2e-12, 1e-6    FP16 0.005, 8e-6, 0.0015    BF16 0.04, 4e-4, 0.007    W8A8 0.18, 0.008, 0.064
#   INT8 0.15, 0.004, 9e-4 (0.02, 0.001, 0.004)           INT4 0.8, 0.3, 2e-6 (0.2, 0.2, 0.004)
# Structural errors on the same models: a window ignored 0.3-0.9 and 0.08-0.4, soft-capping left out 0.1-0.4 and
# 0.01-0.07, positions off by one 0.7-1.3 and 0.1-1; one token of the past unseen or stale 0.08-0.6 and 0.0005-0.05,
# which only `max_own_delta` tells from INT8. Quantization hides the mild ones of the first kind: hence `QUANTIZED`.
THRESHOLDS: Final = {
    "fp32": Thresholds(1e-4, 1e-6, 0.98, 1e-4),
    "fp16": Thresholds(0.03, 5e-3, 0.90, 0.01),
    "bf16": Thresholds(0.08, 2e-2, 0.85, 0.03),
    "int8": Thresholds(0.25, 2e-2, 0.75, 0.03),
    "w8a8": Thresholds(0.4, 0.05, 0.65, 0.15),
    "int4": Thresholds(1.0, 0.6, 0.25, 0.03),
}

# Of mixtures of experts: rounding lets some tokens choose other experts, which changes their logits by 0.4 to 0.65 in
# INT8 and 0.2 to 0.4 in BF16 whatever is right. Measured on tiny random models of three families (docs/numerics.md).
# Worst KL and agreement over all rows: BF16 0.005, 0.93; INT8 0.02, 0.86; INT4 0.32, 0.23. That the graph is right is
# checked unquantized, in FP32's bounds; that its weights are, by `convert.weight_check`.
MIXTURES: Final = {
    "fp16": Thresholds(None, 5e-3, 0.90, 0.01),
    "bf16": Thresholds(None, 2e-2, 0.85, 0.03),
    "int8": Thresholds(None, 5e-2, 0.75, 0.03),
    "w8a8": Thresholds(None, 0.1, 0.65, 0.15),
    "int4": Thresholds(None, 0.6, 0.15, 0.03),
}


MAX_UNUSUAL: Final = 5.0
"""An error of more than so many times the usual one of a recipe is no rounding."""

QUANTIZED: Final = ("int8", "int4", "w8a8")
"""Precisions whose noise can hide an error of the graph: the same graph is checked unquantized first."""


def check_parity(
    steps: Steps,
    reference: ParityReference,
    precision: str,
    runtime: str,
    advice: Advice = GENERAL,
    *,
    is_mixture: bool = False,
    usual_delta: float | None = None,
) -> Parity:
    """Measures all stages. is_mixture: of experts, whose largest difference is not bounded but in FP32. usual_delta:
    of this recipe and a model of this size; the bound is MAX_UNUSUAL times that where it is lower than the precision's.

    Raises ParityFailure with the first stage that is out of bounds and its numbers; ExportError if the export cannot
    hold a sequence of the check.
    """
    stages, own_delta = _run(steps, reference.near, "")
    for where, pair in reference.beyond.items():
        steps.truncate(0)
        more, own_far = _run(steps, pair, where)
        stages, own_delta = stages + more, max(own_delta, own_far)
    if isinstance(steps, BatchSteps):
        for original in reference.originals or (0,):
            stage, own_batched = _run_batched(steps, reference, original)
            stages, own_delta = [*stages, stage], max(own_delta, own_batched)
    bounds = MIXTURES[precision] if is_mixture and precision in MIXTURES else THRESHOLDS[precision]
    if bounds.max_relative_delta is not None and usual_delta is not None:
        bounds = replace(bounds, max_relative_delta=rounded(min(bounds.max_relative_delta, MAX_UNUSUAL * usual_delta)))
    parity = Parity(
        runtime=runtime,
        max_relative_delta=bounds.max_relative_delta,
        max_mean_kl=bounds.max_mean_kl,
        min_argmax_agreement=bounds.min_argmax_agreement,
        max_own_delta=bounds.max_own_delta,
        own_delta=rounded(own_delta),
        stages=tuple(stages),
    )
    _require_parity(parity, precision, advice)
    return parity


def _run(steps: Steps, pair: SequencePair, where: str) -> tuple[list[ParityStage], float]:
    """The four stages, and their largest difference from the export's own prefill of the same tokens."""
    main, prefill, kept = pair.main, pair.prefill, pair.prefill + KEPT
    if len(main) > steps.max_positions:
        raise ExportError(
            f"the numerical check{where} needs {len(main)} positions, the export holds {steps.max_positions}; choose a "
            "lower --max-positions"
        )
    compared = len(pair.main_logits) - (len(main) - prefill)
    single_end = prefill + SINGLE
    expected = np.split(pair.main_logits, [compared, compared + SINGLE])
    found = [steps.run(main[:prefill], compared).copy()]
    found.append(np.concatenate([steps.run(main[i : i + 1], 1).copy() for i in range(prefill, single_end)]))
    found.append(steps.run(main[single_end:], MULTI).copy())
    steps.truncate(kept)
    found.append(steps.run(pair.other[kept:], ROLLED).copy())
    names = ("prefill", "cached step", "multi-token step", "step after rollback")
    stages = [
        _compare(f"{name}{where}", rows, source_rows)
        for name, rows, source_rows in zip(names, found, (*expected, pair.other_logits), strict=True)
    ]
    if isinstance(steps, SequenceSteps) and steps.max_branches > 1:
        steps.truncate(kept)
        stages.append(_run_tree(steps, pair, kept, where))
    own = max(
        _own_delta(steps, main, np.concatenate(found[:3]), compared),
        _own_delta(steps, pair.other, found[3], compared),
    )
    return stages, own / max(stage.scale for stage in stages)


def _run_tree(steps: SequenceSteps, pair: SequencePair, kept: int, where: str) -> ParityStage:
    """The nodes of a tree that goes both ways, level by level, behind the `kept` tokens that both share."""
    length = min(len(pair.main) - kept, len(pair.other) - kept, _TREE)
    first = len(pair.main_logits) - (len(pair.main) - kept)
    ways = pair.main[kept : kept + length], pair.other[kept : kept + length]
    source = pair.main_logits[first : first + length], pair.other_logits[:length]
    nodes = [(way, depth) for depth in range(length) for way in range(2)]
    found = [
        steps.run_branches([ways[way][: depth + 1] for way, depth in nodes[at : at + steps.max_branches]]).copy()
        for at in range(0, len(nodes), steps.max_branches)
    ]
    expected = np.stack([source[way][depth] for way, depth in nodes])
    return _compare(f"nodes of a tree{where}", np.concatenate(found), expected)


def _run_batched(steps: BatchSteps, reference: ParityReference, original: int) -> tuple[ParityStage, float]:
    """Prefill, cached and multi-token steps of the near sequence, each in one step with a longer neighbour's.

    Compares the near sequence with the source, and both with their own prefill: the neighbour is at positions where
    the source was not run. It crosses the original length in cached steps where there is one (not 0), and otherwise
    ends at the last position. With a window it starts anew in every step, as runtimes take a cached token's slot for
    its position there.
    """
    main, prefill = reference.near.main, reference.near.prefill
    single_end = prefill + SINGLE
    rest = len(main) - prefill
    # Other tokens than the first sequence's, which reads wrong slots unnoticed otherwise.
    is_fresh = reference.has_windows
    length = min(_FRESH_NEIGHBOUR if is_fresh else _NEIGHBOUR, steps.max_neighbour, steps.num_positions)
    text = (main[::-1] * (length // len(main) + 1))[:length]
    begin = length - rest
    end_position = steps.num_positions
    if original and original + rest <= end_position:
        end_position = max(length, original + rest - BEFORE)
    first_position = end_position - length
    steps.truncate(0)
    steps.begin_neighbour(first_position)
    cuts = [(0, prefill, 0, begin)]
    cuts += [(prefill + i, prefill + i + 1, begin + i, begin + i + 1) for i in range(SINGLE)]
    cuts += [(single_end, len(main), begin + SINGLE, length)]
    own_rows, neighbour_rows = [], []
    for start, end, other_start, other_end in cuts:
        num_rows, num_others = end - start, min(other_end - other_start, MULTI)
        if is_fresh:
            steps.begin_neighbour(first_position)
            other_start = 0
        rows, others = steps.run_both(main[start:end], text[other_start:other_end], num_rows, num_others)
        own_rows.append(rows.copy())
        neighbour_rows.append(others.copy())
    found = np.concatenate(own_rows)
    stage = _compare("batch with a longer sequence", found, reference.near.main_logits)
    own = _own_delta(steps, main, found, prefill)
    steps.begin_neighbour(first_position)
    stepped = np.concatenate(neighbour_rows)[-rest:]
    _, alone = steps.run_both((), text, 0, rest)
    _require_finite(stage.name, alone, stepped)
    return stage, max(own, float(np.abs(alone - stepped).max())) / stage.scale


def _own_delta(steps: Steps, tokens: Sequence[int], found: NDArray[np.float32], compared: int) -> float:
    """The largest difference between `found`, of the last tokens, and the same tokens in one prefill.

    Only its last row where `compared` is 1.
    """
    steps.truncate(0)
    own = steps.run(tokens, len(tokens) if compared > 1 else 1)
    num_rows = min(len(own), len(found))
    return float(np.abs(own[-num_rows:] - found[-num_rows:]).max())


def _compare(name: str, found: NDArray[np.float32], expected: NDArray[np.float32]) -> ParityStage:
    if found.shape != expected.shape:
        raise ParityFailure(
            f"parity check failed, {name}: the export gives logits of shape {found.shape}, the source {expected.shape}",
            math.inf,
        )
    _require_finite(name, found)
    log_p, log_q = log_softmax(expected), log_softmax(found)
    return ParityStage(
        name=name,
        rows=len(found),
        max_delta=rounded(float(np.abs(found - expected).max())),
        scale=rounded(float(np.abs(expected).max())),
        mean_kl=rounded(float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())),
        argmax_agreement=rounded(float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())),
    )


def _require_finite(name: str, *logits: NDArray[np.float32]) -> None:
    if not all(np.isfinite(rows).all() for rows in logits):
        raise ParityFailure(f"parity check failed, {name}: the export gives logits that are not finite", math.inf)


def _require_parity(parity: Parity, precision: str, advice: Advice) -> None:
    rows = sum(stage.rows for stage in parity.stages)
    agreement = sum(stage.argmax_agreement * stage.rows for stage in parity.stages) / rows
    worst = max(stage.max_delta / stage.scale for stage in parity.stages)
    largest = parity.max_relative_delta
    if largest is None:
        mean_kl = sum(stage.mean_kl * stage.rows for stage in parity.stages) / rows
        if mean_kl > parity.max_mean_kl:
            raise ParityFailure(
                f"parity check failed: mean KL {mean_kl:.3g} over {rows} rows of a mixture of experts (at most "
                f"{parity.max_mean_kl:g} for {precision}); nothing was written: {advice.finer}",
                worst,
            )
    else:
        for stage in parity.stages:
            relative = stage.max_delta / stage.scale
            if relative > largest or stage.mean_kl > parity.max_mean_kl:
                raise ParityFailure(
                    f"parity check failed, {stage.name}: largest difference {stage.max_delta:.3g} on logits up "
                    f"to {stage.scale:.3g} ({relative:.2g} relative, at most {largest:g} for "
                    f"{precision}), mean KL {stage.mean_kl:.3g} (at most {parity.max_mean_kl:g}); nothing was "
                    f"written. The converter or the runtime is wrong for this model: {advice.finer}",
                    worst,
                )
    if parity.own_delta > parity.max_own_delta:
        raise ParityFailure(
            f"parity check failed: the export's steps differ by {parity.own_delta:.2g} from its own prefill of the "
            f"same tokens (at most {parity.max_own_delta:g} for {precision}); nothing was written. The runtime is "
            f"wrong for this model: {advice.elsewhere}",
            max(worst, parity.own_delta),
        )
    if agreement < parity.min_argmax_agreement:
        raise ParityFailure(
            f"parity check failed: {agreement:.2f} of {rows} argmaxes agree with the source, expected at "
            f"least {parity.min_argmax_agreement:g} for {precision}; nothing was written: {advice.finer}",
            worst,
        )


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of each row of [n, vocab_size], in nats."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    total: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted - total


def rounded(value: float) -> float:
    """Three significant digits: enough for a reader, and independent of the order of a sum."""
    return float(f"{value:.3g}")
