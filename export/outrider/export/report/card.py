"""What the figures of an export mean: whether a draft is good enough, and what it is expected to be worth.

A draft is judged by its acceptance at temperature 0.8. Greedy text repeats itself, which flatters a draft, and few
people sample hotter. Under 0.3 a pair is refused unless forced; under 0.6 it is said so wherever the report appears.
Knows figures only: no runtime, no terminal, no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.export import recipes
from outrider.models.errors import ExportError
from outrider.models.manifest import Acceptance, Forecast, Manifest, Timing
from outrider.models.prediction import WORTH_IT, Setting, alpha_for, predict

JUDGED_AT: Final = 0.8
"""The temperature whose acceptance decides."""

REFUSED_UNDER: Final = 0.3
WARNED_UNDER: Final = 0.6

DEPTH_OF_ALPHA: Final = 4
"""Predictions use the independent acceptance rate whose rounds of this depth are as long as the measured ones."""


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """The target's step: one token, and what each drafted token adds, in ms. words: where these come from."""

    step_ms: float
    extra_ms: float
    words: str

    @staticmethod
    def require_sense(step_ms: float | None, extra_ms: float | None) -> None:
        """Raises ConfigError for times that no target has: to be told before an export, not after it."""
        Setting(0.0, 0.0, 1.0 if step_ms is None else step_ms, extra_ms or 0.0, 0.0)

    @classmethod
    def resolve(cls, measured: Timing | None, step_ms: float | None, extra_ms: float | None) -> TargetTimes:
        """What was given, else what was measured. An extra that is not given scales with the step that is.

        Raises ExportError if neither is at hand.
        """
        if measured is None:
            if step_ms is None:
                raise ExportError("the target was not timed; give its step time with --step-ms")
            return cls(step_ms, extra_ms or 0.0, "as given")
        here = f"measured here: {measured.machine}, {measured.provider}"
        found_ms = measured.extra_ms or 0.0
        if step_ms is None:
            return cls(measured.token_ms, found_ms if extra_ms is None else extra_ms, here)
        if extra_ms is None:
            return cls(step_ms, found_ms * step_ms / measured.token_ms, "step as given, its growth as measured here")
        return cls(step_ms, extra_ms, "as given")


def judged(measured: Sequence[Acceptance]) -> Acceptance | None:
    """The figure that decides; None where no target was at hand."""
    return next((found for found in measured if found.temperature == JUDGED_AT), None)


def require_acceptance(measured: Sequence[Acceptance], draft: str) -> None:
    """Raises ExportError, saying what to do, if the draft is not worth having."""
    found = judged(measured)
    if found is None or found.rate >= REFUSED_UNDER:
        return
    raise ExportError(
        f"the draft {draft} guesses {found.rate:.2f} of {found.target}'s tokens at temperature {JUDGED_AT:g} "
        f"({found.tested_tokens} tested), expected at least {REFUSED_UNDER:g}: most drafted tokens would be thrown "
        "away. Nothing was written. Distil it on this target (outrider-export distill), choose another draft of the "
        "target's family, or say --force to have it anyway"
    )


def forecast_for(measured: Sequence[Acceptance], token_ms: float, target: TargetTimes) -> Forecast | None:
    """What the draft is expected to be worth; None where it was not judged."""
    found = judged(measured)
    if found is None:
        return None
    alpha = _alpha(found)
    prediction = predict(alpha, draft_ms=token_ms, step_ms=target.step_ms, extra_ms=target.extra_ms)
    return Forecast(
        temperature=JUDGED_AT,
        alpha=alpha,
        draft_ms=token_ms,
        step_ms=target.step_ms,
        extra_ms=target.extra_ms,
        step_from=target.words,
        curve=prediction.curve,
        fades_ms=prediction.fades_ms,
        breaks_even_ms=prediction.breaks_even_ms,
    )


def warnings_of(manifest: Manifest) -> tuple[str, ...]:
    """What a reader of the report must not miss."""
    said = list(manifest.report.notes)
    found, timing = judged(manifest.report.acceptance), manifest.report.timing
    if found is not None and found.rate < WARNED_UNDER:
        said.append(
            f"acceptance is {found.rate:.2f} at temperature {JUDGED_AT:g}, under {WARNED_UNDER:g}: the draft will gain "
            "little; distil it on this target (outrider-export distill), or choose another"
        )
    if timing is not None and not timing.is_on_device:
        said.append(
            f"made for {manifest.device.upper()}, timed on {timing.provider}: acceptance holds, "
            "times and what is predicted from them do not"
        )
    return tuple(said)


def label(manifest: Manifest) -> str:
    """What tells drafts of one model apart, such as "onnxruntime int4"."""
    return recipes.label(manifest.runtime, manifest.precision)


def tokens_per_pass(measured: Sequence[Acceptance]) -> float:
    """Tokens of a target pass in rounds of depth 4, at the temperature that decides; of depth 1 where none fitted."""
    found = judged(measured)
    assert found is not None, "no target was at hand"
    return next((row.tokens_per_pass for row in found.by_depth if row.depth == DEPTH_OF_ALPHA), 1.0 + found.rate)


def ends_of(forecast: Forecast) -> tuple[str, str]:
    """Where drafting ends to pay, streamed and stop-and-wait, in words."""
    last_ms, gain = forecast.curve[-1].rtt_ms, f"{WORTH_IT - 1.0:.0%}"
    fades, even = forecast.fades_ms, forecast.breaks_even_ms
    return (
        f"streamed drafts gain less than {gain} from {fades:g} ms"
        if fades is not None
        else f"streamed drafts gain more than {gain} up to {last_ms:g} ms",
        f"stop-and-wait is slower than no draft from {even:g} ms"
        if even is not None
        else f"stop-and-wait is faster than no draft up to {last_ms:g} ms",
    )


def step_of(forecast: Forecast) -> str:
    """The target that a prediction is for, in words."""
    return (
        f"for a target's step of {forecast.step_ms:.3g} ms + {forecast.extra_ms:.3g} ms a drafted token "
        f"({forecast.step_from})"
    )


def _alpha(found: Acceptance) -> float:
    if not any(row.depth == DEPTH_OF_ALPHA for row in found.by_depth):
        return found.rate
    return round(alpha_for(tokens_per_pass((found,)), DEPTH_OF_ALPHA), 4)
