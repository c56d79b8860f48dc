"""Compares drafts of one model and recommends one.

The prediction decides: a smaller precision is faster and accepted less often, and predicted tokens per second at the
chosen round trips weigh the two. Knows manifests, not how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final

from outrider.export.report.card import REFUSED_UNDER, judged, label, prediction_of, require_acceptance
from outrider.models.bundle.manifest import Forecast, Manifest
from outrider.models.bundle.speed_up import Setting, stream

TIE: Final = 0.02
"""Drafts whose predicted tokens per second differ by less are equally good, as far as times and acceptance can be
measured: the smaller one is recommended."""


@dataclass(frozen=True, slots=True)
class NotMade:
    """A recipe that gave no draft on this machine, and why."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One draft of the comparison. label: runtime and precision. tokens_per_s, speed_ups: predicted, at each of the
    chosen round trips.
    """

    label: str
    manifest: Manifest
    tokens_per_s: tuple[float, ...]
    speed_ups: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a sweep. recommended: the label of one row; reason: why that one, in words."""

    rows: tuple[Row, ...]
    not_made: tuple[NotMade, ...]
    round_trips_ms: tuple[float, ...]
    recommended: str
    reason: str

    @property
    def best(self) -> Manifest:
        """The recommended draft."""
        return next(row.manifest for row in self.rows if row.label == self.recommended)

    def load_warning(self) -> str | None:
        """Which of the other drafts were timed on a busy machine, in words; the recommended one has its own warning."""
        timings = [(row.label, row.manifest.report.timing) for row in self.rows if row.label != self.recommended]
        busy = [name for name, timing in timings if timing is not None and timing.load_warning is not None]
        return f"The machine was busy while these were timed too: {', '.join(busy)}." if busy else None


def compare(
    drafts: Sequence[Manifest],
    round_trips_ms: Sequence[float],
    not_made: Sequence[NotMade] = (),
    *,
    is_forced: bool = False,
) -> Comparison:
    """Predicts every draft at `round_trips_ms` and recommends one. Raises ExportError if none is accepted often enough.

    drafts: with a forecast each, for one target. is_forced: a draft that is accepted too rarely may be recommended.
    Where any was timed on another device than its own, all are taken to be as slow as the slowest.
    """
    are_times_real = all(draft.report.timing is not None and draft.report.timing.is_on_device for draft in drafts)
    slowest_ms = max(forecast_of(draft).draft_ms for draft in drafts)
    rows = tuple(_row(draft, round_trips_ms, None if are_times_real else slowest_ms) for draft in drafts)
    worthy = [row for row in rows if is_forced or acceptance_of(row.manifest) >= REFUSED_UNDER]
    if not worthy:
        highest = max(drafts, key=acceptance_of)
        require_acceptance(highest.report.acceptance, f"{highest.name} ({label(highest)}, the best of {len(drafts)})")
    fastest = max(worthy, key=lambda row: mean(row.tokens_per_s))
    as_good = [row for row in worthy if mean(row.tokens_per_s) >= (1.0 - TIE) * mean(fastest.tokens_per_s)]
    best = min(as_good, key=lambda row: row.manifest.report.size_bytes)
    reason = _reason(best, as_good, round_trips_ms, are_times_real=are_times_real)
    return Comparison(rows, tuple(not_made), tuple(round_trips_ms), best.label, reason)


def _row(draft: Manifest, round_trips_ms: Sequence[float], draft_ms: float | None) -> Row:
    forecast = forecast_of(draft)
    speed_ups = tuple(
        stream(
            Setting(
                forecast.alpha,
                forecast.draft_ms if draft_ms is None else draft_ms,
                forecast.step_ms,
                forecast.extra_ms,
                rtt_ms,
            )
        ).speed_up
        for rtt_ms in round_trips_ms
    )
    return Row(label(draft), draft, tuple(1e3 / forecast.step_ms * speed_up for speed_up in speed_ups), speed_ups)


def _reason(best: Row, as_good: Sequence[Row], round_trips_ms: Sequence[float], *, are_times_real: bool) -> str:
    where = " and ".join(f"{rtt_ms:g}" for rtt_ms in round_trips_ms)
    average, trips = ("on average ", "round trips") if len(round_trips_ms) > 1 else ("", "a round trip")
    words = (
        f"{average}{mean(best.tokens_per_s):.1f} tokens/s predicted at {trips} of {where} ms, "
        f"{mean(best.speed_ups):.2f}x of cloud-only streaming; "
    )
    num_others = len(as_good) - 1
    words += f"the smallest of {len(as_good)} within {TIE:.0%}" if num_others else f"no other is within {TIE:.0%}"
    if not are_times_real:
        words += "; all drafts are taken to be equally fast, because this machine lacks the device"
    return words


def forecast_of(draft: Manifest) -> Forecast:
    """The predicted gain of a draft that was judged."""
    forecast = prediction_of(draft)
    assert forecast is not None, "a comparison is of drafts judged on a target"
    return forecast


def acceptance_of(draft: Manifest) -> float:
    """The rate that decides, of a draft that was judged."""
    found = judged(draft.report.acceptance)
    assert found is not None, "a comparison is of drafts judged on a target"
    return found.rate
