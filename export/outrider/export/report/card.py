"""Judges the figures of an export: whether a draft is good enough, and what it is expected to gain.

A draft is judged by its acceptance at temperature 0.8. Greedy text repeats itself, which flatters a draft, and few
people sample hotter. Under 0.3 a pair is refused unless forced; under 0.6 every report carries a warning. So is one
whose draft has a tokenizer that cannot write the target's text.
Knows figures only: no runtime, no terminal, no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.trees import BYTES_PER_TOKEN, simulate
from outrider.export.report.simulation.world import Form, Plan, Times
from outrider.models.bundle.manifest import Acceptance, AtRoundTrip, Forecast, Manifest, Timing, TokenMapping
from outrider.models.bundle.speed_up import WORTH_IT, alpha_for, predict
from outrider.models.errors import ExportError

MOST_TOKENS: Final = 480
"""Played per figure: with nine round trips some 2 s in all."""


def predict_trees(ranks: Ranks, times: Times, curve: Sequence[AtRoundTrip]) -> tuple[AtRoundTrip, ...]:
    """The curve with `line` and `tree` added to each point.

    A line is at least as fast as the path, and a tree as a line, because each may do what the other does.
    """
    num_tokens = min(MOST_TOKENS, len(ranks.picked))

    def played(form: Form, rtt_ms: float) -> float:
        # Beyond a step nothing comes back in time to be worth a wait.
        patience_ms = None if rtt_ms < times.step_ms else 0.0
        plan = Plan(form=form, bytes_per_token=BYTES_PER_TOKEN, patience_ms=patience_ms)
        return round(simulate(ranks, times, rtt_ms, plan, num_tokens=num_tokens, seeds=(0,)).speed_up, 3)

    found = []
    for point in curve:
        line = max(point.stream, played(Form.LINE, point.rtt_ms))
        tree = max(line, played(Form.TREE, point.rtt_ms))
        found.append(point.model_copy(update={"line": line, "tree": tree}))
    return tuple(found)


JUDGED_AT: Final = 0.8
"""The temperature whose acceptance decides."""

REFUSED_UNDER: Final = 0.3
WARNED_UNDER: Final = 0.6
KEPT_FROM: Final = 0.9
"""The least share of a text that the tokenizer of a draft gives back, where it is not the target's."""

EXPLAINED: Final = (
    "Equal argmaxes: how often the export's likeliest next token is the unquantized model's. KL divergence: how far "
    "its probabilities are from that model's, in nats; 0 is no difference."
)
"""Explains the two figures of agreement."""

TREES_EXPLAINED: Final = (
    "Path: one guess per position. Alternatives: the device also sends its next best guesses, so when the target picks "
    "one of them, what was drafted below it is already there; a target step verifies one path. Tree: a step verifies "
    "several branches at once, where the runtime can."
)
"""Explains the ways of drafting that a forecast compares."""

BY_GAP_EXPLAINED: Final = (
    "Lead: by how much the draft's best noisy score (logit / temperature + noise) leads its second. A small lead marks "
    "the tokens where alternatives help."
)
"""Explains acceptance by gap."""

SHOWN_AT_MS: Final = 50.0
"""The longest round trip for which a verdict names the speed-up; shorter where drafting soon stops paying."""

DEPTH_OF_ALPHA: Final = 4
"""Predictions use the independent acceptance rate whose rounds of this depth are as long as the measured ones."""


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """A target's step: one token, and what each drafted token adds, in ms. words: where these come from."""

    step_ms: float
    extra_ms: float
    words: str

    @classmethod
    def resolve(cls, measured: Timing | None, step_ms: float | None, extra_ms: float | None) -> TargetTimes:
        """The given times, else the measured ones. Where only the step is given, the measured extra scales with it.

        Raises ExportError if there is neither.
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
    """Raises ExportError if the draft is accepted too rarely."""
    found = judged(measured)
    if found is None or found.rate >= REFUSED_UNDER:
        return
    raise ExportError(
        f"{found.target} accepts {found.rate:.2f} of the tokens of the draft {draft} at temperature {JUDGED_AT:g} "
        f"({found.tested_tokens} tested); expected at least {REFUSED_UNDER:g}. Nothing was written. Distil the draft "
        "on this target: outrider-export distill"
    )


def require_text_kept(mapping: TokenMapping, draft: str, target: str) -> None:
    """Raises ExportError if the draft's tokenizer cannot write the target's text."""
    if mapping.text_kept >= KEPT_FROM:
        return
    raise ExportError(
        f"the draft {draft} cannot write the text of {target}: its tokenizer changes {_listed(mapping.changes)} and "
        f"gives back {mapping.text_kept:.0%} of the characters; expected at least {KEPT_FROM:.0%}. Nothing was "
        "written. Use a draft whose tokenizer keeps a text as it is, or write this one with --force"
    )


def _listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def words_of_mapping(manifest: Manifest) -> str | None:
    """What a draft's other tokenizer costs, in one sentence; None for a draft with the target's."""
    mapping = manifest.report.mapping
    if mapping is None:
        return None
    words = (
        f"Another tokenizer than the target's: one draft token writes {mapping.ids_covered:.0%} of the target's ids "
        f"and {mapping.text_covered:.0%} of its text"
    )
    found = judged(manifest.report.acceptance)
    if found is None:
        return f"{words}."
    return f"{words}; {found.unscored:.0%} of the target's picks get no score from it."


def forecast_for(
    measured: Sequence[Acceptance], token_ms: float, target: TargetTimes, ranks: Ranks | None = None
) -> Forecast | None:
    """The predicted gain of a draft; None where it was not judged. ranks: as measured, to predict trees too."""
    found = judged(measured)
    if found is None:
        return None
    alpha = _alpha(found)
    prediction = predict(alpha, draft_ms=token_ms, step_ms=target.step_ms, extra_ms=target.extra_ms)
    curve = prediction.curve
    if ranks is not None:
        curve = predict_trees(ranks, Times(target.step_ms, target.extra_ms, token_ms), curve)
    return Forecast(
        temperature=JUDGED_AT,
        alpha=alpha,
        draft_ms=token_ms,
        step_ms=target.step_ms,
        extra_ms=target.extra_ms,
        step_from=target.words,
        curve=curve,
        fades_ms=prediction.fades_ms,
        breaks_even_ms=prediction.breaks_even_ms,
    )


def warnings_of(manifest: Manifest) -> tuple[str, ...]:
    """Warnings that every view of the report shows."""
    said = list(manifest.report.notes)
    found, timing, mapping = judged(manifest.report.acceptance), manifest.report.timing, manifest.report.mapping
    if mapping is not None and mapping.text_kept < KEPT_FROM:
        said.append(
            f"the draft cannot write this text: its tokenizer changes {_listed(mapping.changes)} and gives back "
            f"{mapping.text_kept:.0%} of the characters; use a draft whose tokenizer keeps a text as it is"
        )
    if found is not None and found.rate < WARNED_UNDER:
        said.append(
            f"acceptance is {found.rate:.2f} at temperature {JUDGED_AT:g}, under {WARNED_UNDER:g}: the draft will gain "
            "little; distil it on this target (outrider-export distill)"
        )
    low = [each for each in manifest.report.acceptance if each is not found and each.rate < REFUSED_UNDER]
    if low:
        rates = ", ".join(f"{each.rate:.2f} at temperature {each.temperature:g}" for each in low)
        said.append(f"acceptance is under {REFUSED_UNDER:g} elsewhere: {rates}")
    if timing is not None and not timing.is_on_device:
        said.append(
            f"made for {manifest.device.upper()}, timed on {timing.provider}: acceptance holds, times and predictions "
            "do not"
        )
    if timing is not None and timing.load_warning is not None:
        words = timing.load_warning.replace("This machine", "its machine", 1)
        said.append(f"{manifest.role}: when it was exported, {words}")
    return tuple(said)


def prediction_of(manifest: Manifest) -> Forecast | None:
    """The predicted gain of a draft, if a target was at hand."""
    timing = manifest.report.timing
    return timing.forecast if timing is not None else None


def verdict(manifest: Manifest) -> str:
    """The verdict, in one or two sentences."""
    timing, forecast = manifest.report.timing, prediction_of(manifest)
    if manifest.role == "target":
        return "A target alone: export it with a draft (outrider-export pair) to see what drafting gains."
    if timing is None or forecast is None:
        return "Not predicted, as no target was at hand: export the draft with its target (outrider-export pair)."
    words = _pays(forecast)
    if not timing.is_on_device:
        return f"{words} These times are not of the {manifest.device.upper()} that the draft is for."
    return f"{words} The machine was busy while times were measured." if timing.load_warning is not None else words


def _pays(forecast: Forecast) -> str:
    """Up to which round trip streamed drafts gain enough, and how much at about half of it."""
    curve, fades_ms = forecast.curve, forecast.fades_ms
    if fades_ms == 0.0:
        best = max(point.stream for point in curve)
        return f"With this target, drafting does not pay at any round trip: it gives {_times(best)} at best."
    reach_ms = SHOWN_AT_MS if fades_ms is None else min(SHOWN_AT_MS, fades_ms / 2)
    shown = [point for point in curve if point.rtt_ms <= reach_ms][-1]
    gives = f"at {shown.rtt_ms:g} ms it gives {_times(shown.stream)}"
    if fades_ms is not None:
        return f"With this target, drafting pays up to a round trip of {fades_ms:.0f} ms; {gives}."
    last = curve[-1]
    gives += f", at {last.rtt_ms:g} ms {_times(last.stream)}"
    return f"With this target, drafting pays at every round trip computed; {gives}."


def _times(speed_up: float) -> str:
    """Near 1, where it matters, with two decimals."""
    return f"{speed_up:.1f}x" if speed_up >= 1.2 else f"{speed_up:.2f}x"


def label(manifest: Manifest) -> str:
    """Short label of an export, such as "onnxruntime int4", as in `ExportOptions`."""
    return f"{manifest.runtime} {manifest.precision}"


def tokens_per_pass(measured: Sequence[Acceptance]) -> float:
    """Tokens per target pass in rounds of depth 4, at the temperature that decides; of depth 1 where none fitted."""
    found = judged(measured)
    assert found is not None, "no target was at hand"
    return next((row.tokens_per_pass for row in found.by_depth if row.depth == DEPTH_OF_ALPHA), 1.0 + found.rate)


def ends_of(forecast: Forecast) -> tuple[str, str]:
    """The round trips at which drafting stops paying, streamed and stop-and-wait, in words."""
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
    """The target's step that a prediction is for, in words."""
    return (
        f"for a target step of {forecast.step_ms:.3g} ms + {forecast.extra_ms:.3g} ms per drafted token "
        f"({forecast.step_from})"
    )


def has_trees(forecast: Forecast) -> bool:
    """Whether trees were predicted: not in bundles of earlier versions."""
    return all(point.line is not None and point.tree is not None for point in forecast.curve)


def leads(found: Acceptance) -> tuple[str, ...]:
    """The names of the buckets of `by_gap`, in its order."""
    starts = [row.from_gap for row in found.by_gap]
    ends = [f"{start:g} to {end:g}" for start, end in pairwise(starts)]
    return (*ends, f"over {starts[-1]:g}") if starts else ()


def _alpha(found: Acceptance) -> float:
    if not any(row.depth == DEPTH_OF_ALPHA for row in found.by_depth):
        return found.rate
    return round(alpha_for(tokens_per_pass((found,)), DEPTH_OF_ALPHA), 4)
