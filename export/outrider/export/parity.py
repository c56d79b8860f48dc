"""The check that decides whether an export may exist: its logits against the source's, in FP32.

Run in the runtime that will run the bundle, over the four kinds of step that speculation makes: prefill, one
token on the cache, several tokens on the cache, and tokens over rejected ones. A converter can be silently
wrong in any of them. Knows neither torch nor OpenVINO: the source's logits come in as arrays, the export as a
function of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ExportError, ParityFailure
from outrider.models.manifest import Parity, ParityStage
from outrider.models.tokenizer import Tokenizer

PARITY_TEXT: Final = (
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) "
    "% 2:\n        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n\n"
    "The median of an even number of values is the mean of the two in the middle; it moves little when one "
    "value is far off, which is why the figures of a benchmark are given as medians of several runs.\n"
)
_PREFILL: Final = 48
_SINGLE: Final = 8
_MULTI: Final = 8
_KEPT: Final = 3
_ROLLED: Final = 6
NUM_TOKENS: Final = _PREFILL + _SINGLE + _MULTI


class Steps(Protocol):
    """An export being run: one sequence that grows and is cut back."""

    def run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends tokens; the logits after each, [len(tokens), vocab_size]."""
        ...

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        ...


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a precision may cost. max_relative_delta: largest |delta logit| over the largest |logit|."""

    max_relative_delta: float
    max_mean_kl: float
    min_argmax_agreement: float


THRESHOLDS: Final = {
    # Measured: about 1e-6. Anything structural (a position off by one, a stale slot) is above 1e-2.
    "fp32": Thresholds(1e-4, 1e-6, 0.98),
    "fp16": Thresholds(0.03, 5e-3, 0.90),
    "bf16": Thresholds(0.08, 2e-2, 0.85),
    "int8": Thresholds(0.15, 5e-2, 0.80),
}


@dataclass(frozen=True, slots=True)
class ParityReference:
    """Two sequences that share a beginning, and the source's logits of each, [length, vocab_size]."""

    main: tuple[int, ...]
    other: tuple[int, ...]
    main_logits: NDArray[np.float32]
    other_logits: NDArray[np.float32]


def make_reference(tokenizer: Tokenizer, logits_of: Callable[[Sequence[int]], NDArray[np.float32]]) -> ParityReference:
    """Runs the source, once a sequence. `logits_of` gives [length, vocab_size] for a whole sequence."""
    once = tokenizer.encode(PARITY_TEXT)
    main = (once * (1 + (NUM_TOKENS + _ROLLED) // len(once)))[: NUM_TOKENS + _ROLLED]
    # What replaces the rolled-back tokens must differ from them, or stale slots would go unnoticed.
    replaced = main[::-1][:_ROLLED]
    other = (*main[: _PREFILL + _KEPT], *replaced)
    main = main[:NUM_TOKENS]
    return ParityReference(tuple(main), other, logits_of(main), logits_of(other))


def check_parity(steps: Steps, reference: ParityReference, precision: str, runtime: str) -> Parity:
    """Measures all stages. Raises ExportError naming the first that is out of bounds, with its numbers."""
    main, expected = reference.main, reference.main_logits
    single_end = _PREFILL + _SINGLE
    stages = [_compare("prefill", steps.run(main[:_PREFILL]), expected[:_PREFILL])]
    singles = [steps.run(main[i : i + 1]).copy() for i in range(_PREFILL, single_end)]
    stages.append(_compare("cached step", np.concatenate(singles), expected[_PREFILL:single_end]))
    stages.append(_compare("multi-token step", steps.run(main[single_end:]), expected[single_end:]))
    kept = _PREFILL + _KEPT
    steps.truncate(kept)
    stages.append(_compare("step after rollback", steps.run(reference.other[kept:]), reference.other_logits[kept:]))
    bounds = THRESHOLDS[precision]
    parity = Parity(
        runtime=runtime,
        max_relative_delta=bounds.max_relative_delta,
        max_mean_kl=bounds.max_mean_kl,
        min_argmax_agreement=bounds.min_argmax_agreement,
        stages=tuple(stages),
    )
    _require_parity(parity, precision)
    return parity


def _compare(name: str, found: NDArray[np.float32], expected: NDArray[np.float32]) -> ParityStage:
    if found.shape != expected.shape:
        raise ExportError(
            f"parity check, {name}: the export gives logits of shape {found.shape}, the source {expected.shape}"
        )
    if not np.isfinite(found).all():
        raise ExportError(f"parity check, {name}: the export gives logits that are not finite")
    log_p, log_q = _log_softmax(expected), _log_softmax(found)
    return ParityStage(
        name=name,
        rows=len(found),
        max_delta=_rounded(float(np.abs(found - expected).max())),
        scale=_rounded(float(np.abs(expected).max())),
        mean_kl=_rounded(float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())),
        argmax_agreement=_rounded(float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())),
    )


def _require_parity(parity: Parity, precision: str) -> None:
    rows = sum(stage.rows for stage in parity.stages)
    agreement = sum(stage.argmax_agreement * stage.rows for stage in parity.stages) / rows
    worst = max(stage.max_delta / stage.scale for stage in parity.stages)
    for stage in parity.stages:
        relative = stage.max_delta / stage.scale
        if relative > parity.max_relative_delta or stage.mean_kl > parity.max_mean_kl:
            raise ParityFailure(
                f"parity check failed, {stage.name}: largest difference {stage.max_delta:.3g} on logits up "
                f"to {stage.scale:.3g} ({relative:.2g} relative, at most {parity.max_relative_delta:g} for "
                f"{precision}), mean KL {stage.mean_kl:.3g} (at most {parity.max_mean_kl:g}); nothing was "
                "written. The converter or the runtime is wrong for this model: try --precision fp32, or "
                "another runtime",
                worst,
            )
    if agreement < parity.min_argmax_agreement:
        raise ParityFailure(
            f"parity check failed: {agreement:.2f} of {rows} argmaxes agree with the source, expected at "
            f"least {parity.min_argmax_agreement:g} for {precision}; nothing was written. Try --precision "
            "fp32",
            worst,
        )


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    total: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted - total


def _rounded(value: float) -> float:
    """Three significant digits: what a reader wants, and what does not change with the order of a sum."""
    return float(f"{value:.3g}")
