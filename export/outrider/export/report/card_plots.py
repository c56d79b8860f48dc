"""The plots of a report card, as SVG that goes into a page: nothing to load, no scripts, no dates.

Lines and text that are not data take the page's own colour, so a plot is readable on light and on dark. The same
figures give the same bytes. Knows manifests, not pages.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.export.report.card import JUDGED_AT, judged
from outrider.models.manifest import Forecast, Manifest
from outrider.models.prediction import Setting, stop_and_wait, stream

# Nearly Okabe and Ito's, which the colour-blind tell apart; all of them can be seen on white and on near-black.
COLOURS: Final = ("#1f83c4", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a")
_INK: Final = "#010203"  # a colour that nothing else has; becomes the page's
_NUM_POINTS: Final = 301
_LEGEND_COLUMNS: Final = 3
_STYLE: Final = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": "#8a8a8a",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True, slots=True)
class Item:
    """A draft, or a target, under the name that the page calls it by."""

    label: str
    manifest: Manifest

    @property
    def forecast(self) -> Forecast | None:
        """What it is expected to be worth, if a target was at hand."""
        timing = self.manifest.report.timing
        return timing.forecast if timing is not None else None


def require_plots() -> None:
    """Raises ModuleNotFoundError if what draws is not installed."""
    import matplotlib  # noqa: F401


def speed_up_plot(drafts: Sequence[Item], marks_ms: Sequence[float] = ()) -> str:
    """Predicted speed-up against round trip, streamed and stop-and-wait, the ends of their use marked.

    marks_ms: round trips that somebody asked about. Drafts without a forecast are left out.
    """
    curves = [(item, item.forecast) for item in drafts if item.forecast is not None]
    with _drawing(7.2, 3.6, "predicted speed-up by round trip") as drawn:
        axes = drawn.figure.subplots()
        last_ms = max((*marks_ms, *(_last_of_interest(forecast) for _, forecast in curves)))
        round_trips = [last_ms * index / (_NUM_POINTS - 1) for index in range(_NUM_POINTS)]
        axes.axhline(1.0, color=_INK, linewidth=1.0)
        axes.annotate("plain cloud streaming", (last_ms, 1.0), (0, -11), textcoords="offset points", ha="right")
        for (item, forecast), colour in zip(curves, _colours(), strict=False):
            settings = [_setting(forecast, rtt_ms) for rtt_ms in round_trips]
            streamed = [stream(setting).speed_up for setting in settings]
            waited = [stop_and_wait(setting).speed_up for setting in settings]
            axes.plot(round_trips, streamed, color=colour, label=f"{item.label}, streamed")
            alone = len(curves) == 1
            axes.plot(round_trips, waited, color=colour, linestyle=(0, (4, 2)), linewidth=1.8 if alone else 0.9)
            if alone:
                axes.lines[-1].set_label("stop-and-wait")
                _mark(axes, forecast.fades_ms, _setting(forecast, forecast.fades_ms or 0.0), streams=True)
                _mark(axes, forecast.breaks_even_ms, _setting(forecast, forecast.breaks_even_ms or 0.0), streams=False)
            elif forecast.breaks_even_ms:
                axes.plot([forecast.breaks_even_ms], [1.0], "o", color=colour, markersize=4)
        for mark_ms in marks_ms:
            axes.axvline(mark_ms, color=_INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel="round trip, ms", ylabel="speed-up, times", xlim=(0.0, last_ms))
        axes.set_ylim(bottom=0.0)
        axes.grid(visible=True)
        axes.legend(loc="upper right")
        drawn.figure.tight_layout()
    return drawn.svg


def acceptance_plot(drafts: Sequence[Item]) -> str:
    """Two panels: acceptance by temperature, a bar a draft; tokens per target pass by depth.

    Beside others a draft's second line is of the temperature that decides; alone it has a line a temperature.
    """
    with _drawing(7.2, 3.2, "acceptance by temperature and depth") as drawn:
        left, right = drawn.figure.subplots(1, 2)
        temperatures = [found.temperature for found in drafts[0].manifest.report.acceptance]
        width = 0.8 / len(drafts)
        for index, (item, colour) in enumerate(zip(drafts, _colours(), strict=False)):
            found = item.manifest.report.acceptance
            rates, errors = [row.rate for row in found], [row.error for row in found]
            places = [place - 0.4 + width * (index + 0.5) for place in range(len(found))]
            left.bar(places, rates, 0.92 * width, color=colour, label=item.label)
            left.errorbar(places, rates, errors, fmt="none", ecolor=_INK, linewidth=0.9)
        left.set(title="acceptance", xlabel="temperature", ylim=(0.0, 1.0))
        left.set_xticks(range(len(temperatures)), [f"{temperature:g}" for temperature in temperatures])
        left.grid(visible=True, axis="y")
        left.set_axisbelow(True)
        for (label, rows), colour in zip(_depth_lines(drafts), _colours(), strict=False):
            right.plot(*zip(*rows, strict=True), "o-", color=colour, markersize=4, label=label)
        right.set(xlabel="drafted tokens a round", ylim=(0.0, None))
        right.set_title("tokens per target pass" + (f", T {JUDGED_AT:g}" if len(drafts) > 1 else ""))
        right.set_xticks([1, 2, 4, 8])
        right.grid(visible=True)
        below = 0.0
        if len(drafts) == 1:
            right.legend(loc="lower right")
        else:
            drawn.figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=_LEGEND_COLUMNS)
            below = 0.02 + 0.06 * -(-len(drafts) // _LEGEND_COLUMNS)
        drawn.figure.tight_layout(w_pad=2.5, rect=(0.0, below, 1.0, 1.0))
    return drawn.svg


def cost_plot(items: Sequence[Item]) -> str:
    """Two panels of bars: megabytes, and ms per token."""
    with _drawing(7.2, 0.9 + 0.32 * len(items), "size and time per token") as drawn:
        panels = drawn.figure.subplots(1, 2, sharey=True)
        places = list(range(len(items)))[::-1]
        times = [item.manifest.report.timing for item in items]
        values = (
            ("size, MB", [item.manifest.report.size_bytes / 1e6 for item in items]),
            ("ms per token", [timing.token_ms if timing is not None else 0.0 for timing in times]),
        )
        for axes, (title, numbers), colour in zip(panels, values, COLOURS[:2], strict=True):
            bars = axes.barh(places, numbers, 0.62, color=colour)
            axes.bar_label(bars, [f"{number:.3g}" for number in numbers], padding=3)
            axes.set(title=title, xlim=(0.0, 1.18 * max(numbers)))
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(length=0)
        panels[0].set_yticks(places, [item.label for item in items])
        drawn.figure.tight_layout(w_pad=2.0)
    return drawn.svg


def _depth_lines(drafts: Sequence[Item]) -> list[tuple[str, list[tuple[int, float]]]]:
    if len(drafts) == 1:
        found = [(f"T {measured.temperature:g}", measured) for measured in drafts[0].manifest.report.acceptance]
    else:
        decides = [(item.label, judged(item.manifest.report.acceptance)) for item in drafts]
        found = [(label, measured) for label, measured in decides if measured is not None]
    return [(label, [(row.depth, row.tokens_per_pass) for row in measured.by_depth]) for label, measured in found]


def _setting(forecast: Forecast, rtt_ms: float) -> Setting:
    return Setting(forecast.alpha, forecast.draft_ms, forecast.step_ms, forecast.extra_ms, rtt_ms)


def _last_of_interest(forecast: Forecast) -> float:
    """Far enough to see the drafts fade; what lies beyond is a flat line."""
    last_ms = forecast.curve[-1].rtt_ms
    if forecast.fades_ms is None:
        return last_ms
    return next((point.rtt_ms for point in forecast.curve if point.rtt_ms > 2.0 * forecast.fades_ms), last_ms)


def _mark(axes: Any, at_ms: float | None, setting: Setting, *, streams: bool) -> None:
    if not at_ms:
        return
    height = (stream if streams else stop_and_wait)(replace(setting, rtt_ms=at_ms)).speed_up
    words = f"gains under 5 % from {at_ms:.0f} ms" if streams else f"breaks even at {at_ms:.0f} ms"
    axes.plot([at_ms], [height], "o", color=_INK, markersize=5)
    axes.annotate(words, (at_ms, height), (6, 12 if streams else -14), textcoords="offset points")


def _colours() -> list[str]:
    return [*COLOURS] * 4  # more drafts than a sweep can make


@dataclass(slots=True)
class _Drawing:
    """figure: matplotlib's. svg: an element for a page, once the drawing is done."""

    figure: Any
    svg: str = ""


@contextlib.contextmanager
def _drawing(width_in: float, height_in: float, title: str) -> Iterator[_Drawing]:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        drawing = _Drawing(Figure(figsize=(width_in, height_in)))
        FigureCanvasSVG(drawing.figure)
        yield drawing
        written = io.StringIO()
        no_one = {"Date": None, "Creator": None, "Format": None, "Type": None}
        drawing.figure.savefig(written, format="svg", transparent=True, metadata=no_one)
        drawing.svg = _inline(written.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    """An SVG file's text as an element of a page: no prologue, the page's colour, a name for who cannot see it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>\s*", "", svg, flags=re.DOTALL)  # would hold for the whole page
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # names that every plot of a page would share
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _opening(title), svg, count=1)
    return svg.replace(_INK, "currentColor")


def _opening(title: str) -> str:
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {names} viewBox="\\1" role="img" aria-label="{title}">'
