"""Draws the plots of a report card as SVG for a page: nothing to load, no scripts, no dates.

A plot is as wide as a phone and is not shrunk there; its legend stands below it. Lines and text that are not data take
the page's own colour, so a plot is readable on light and on dark. The same figures give the same bytes. Knows
manifests, not pages.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.export.report.card import JUDGED_AT, has_trees, judged, prediction_of
from outrider.models.bundle.manifest import Forecast, Manifest
from outrider.models.bundle.speed_up import Setting, stop_and_wait, stream

# Nearly Okabe and Ito's, which the colour-blind tell apart; all of them can be seen on white and on near-black.
COLOURS: Final = ("#1f83c4", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
GREY: Final = "#8f959c"
"""For the drafts that are not recommended."""

INK: Final = "#010203"  # a colour that nothing else has; becomes the page's
_NUM_POINTS: Final = 201
_WAITING: Final = "stop-and-wait"
_WIDTH_IN: Final = 4.8  # 346 SVG units: on a screen of 360 pixels a unit is nearly a pixel
_STYLE: Final = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "text.parse_math": False,  # a label is text, whatever stands in a manifest
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#8a8a8a",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True, slots=True)
class Item:
    """A draft, or a target, under the name that the page calls it by. forecast: see `prediction_of`."""

    label: str
    manifest: Manifest

    @property
    def forecast(self) -> Forecast | None:
        return prediction_of(self.manifest)


def speed_up_plot(drafts: Sequence[Item], marks_ms: Sequence[float] = (), best: str | None = None) -> str:
    """Predicted speed-up against round trip, streamed and stop-and-wait, with the points where each stops paying; and
    a point with trees for each round trip of the table, where they were predicted.

    marks_ms: round trips that drafts are compared at. best: the label of the draft to show in colour; the others are
    grey, and streamed only. Drafts without a forecast are left out.
    """
    curves = [(item, item.forecast) for item in drafts if item.forecast is not None]
    shown = next((item for item, _ in curves if item.label == best), curves[0][0])
    with drawing(4.9, "predicted speed-up by round trip") as drawn:
        axes = drawn.figure.subplots()
        last_ms = max((*marks_ms, *(_last_of_interest(forecast) for _, forecast in curves)))
        round_trips = [last_ms * index / (_NUM_POINTS - 1) for index in range(_NUM_POINTS)]
        others = [forecast for item, forecast in curves if item is not shown]
        assert shown.forecast is not None
        settings = [_setting(shown.forecast, rtt_ms) for rtt_ms in round_trips]
        name = f"{shown.label}, streamed" if others else "streamed"
        axes.plot(round_trips, [stream(one).speed_up for one in settings], color=COLOURS[0], linewidth=2.6, label=name)
        axes.plot(
            round_trips,
            [stop_and_wait(one).speed_up for one in settings],
            color=COLOURS[0],
            linestyle=(0, (4, 2)),
            label=name.replace("streamed", _WAITING),
        )
        for index, forecast in enumerate(others):
            axes.plot(
                round_trips,
                [stream(_setting(forecast, rtt_ms)).speed_up for rtt_ms in round_trips],
                color=GREY,
                linewidth=1.1,
                zorder=1,
                label="" if index else "other drafts, streamed",
            )
        if has_trees(shown.forecast):
            points = [point for point in shown.forecast.curve if point.rtt_ms <= last_ms]
            # Simulated at the table's round trips only: a line between them would show what nobody computed.
            for words, speeds, shape, colour in (
                ("alternatives pending", [point.line for point in points], "D", COLOURS[2]),
                ("tree", [point.tree for point in points], "^", COLOURS[3]),
            ):
                axes.plot([point.rtt_ms for point in points], speeds, shape, color=colour, markersize=5, label=words)
        axes.axhline(1.0, color=INK, linewidth=1.0, label="cloud-only streaming")
        _mark(axes, "o", shown.forecast.fades_ms, shown.forecast, streams=True)
        _mark(axes, "s", shown.forecast.breaks_even_ms, shown.forecast, streams=False)
        for index, mark_ms in enumerate(marks_ms):
            axes.axvline(
                mark_ms, color=INK, linewidth=0.8, linestyle=":", label="" if index else "round trips compared"
            )
        axes.set(xlabel="round trip, ms", ylabel="speed-up, times", xlim=(0.0, last_ms))
        axes.set_ylim(bottom=0.0)
        axes.grid(visible=True)
        drawn.figure.legend(loc="outside lower left")
    return drawn.svg


def acceptance_plot(drafts: Sequence[Item], best: str | None = None) -> str:
    """Two panels: acceptance by temperature, a bar per draft; tokens per target pass by depth.

    A single draft has a line per temperature in the second panel. Of several, `best` is in colour and the others are
    grey, at the temperature that decides.
    """
    colours = _colours(drafts, best)
    with drawing(6.4, "acceptance by temperature and depth") as drawn:
        upper, lower = drawn.figure.subplots(2, 1)
        temperatures = [found.temperature for found in drafts[0].manifest.report.acceptance]
        width = 0.8 / len(drafts)
        for index, (item, colour) in enumerate(zip(drafts, colours, strict=True)):
            found = item.manifest.report.acceptance
            rates, errors = [row.rate for row in found], [row.error for row in found]
            places = [place - 0.4 + width * (index + 0.5) for place in range(len(found))]
            upper.bar(places, rates, 0.92 * width, color=colour)
            upper.errorbar(places, rates, errors, fmt="none", ecolor=INK, linewidth=0.9)
        upper.set(title="acceptance", xlabel="temperature", ylim=(0.0, 1.0))
        upper.set_xticks(range(len(temperatures)), [f"{temperature:g}" for temperature in temperatures])
        upper.grid(visible=True, axis="y")
        upper.set_axisbelow(True)
        for (label, rows), colour in zip(_depth_lines(drafts), colours if len(drafts) > 1 else COLOURS, strict=False):
            is_best = colour != GREY
            lower.plot(
                *zip(*rows, strict=True), "o-", color=colour, markersize=4, label=label, zorder=3 if is_best else 2
            )
        lower.set(xlabel="drafted tokens per round", ylim=(0.0, None))
        lower.set_title("tokens per target pass" + (f", T {JUDGED_AT:g}" if len(drafts) > 1 else ""))
        lower.set_xticks([1, 2, 4, 8])
        lower.grid(visible=True)
        handles, labels = lower.get_legend_handles_labels()
        if len(drafts) > 1:
            chosen = [index for index, colour in enumerate(colours) if colour != GREY][:1]
            grey = [index for index, colour in enumerate(colours) if colour == GREY][:1]
            handles = [handles[index] for index in (*chosen, *grey)]
            labels = [labels[index] for index in chosen] + ["other drafts"] * len(grey)
        drawn.figure.legend(handles, labels, loc="outside lower left", ncols=1 if len(drafts) > 1 else len(labels))
    return drawn.svg


def cost_plot(items: Sequence[Item], best: str | None = None) -> str:
    """Two panels of bars: megabytes, and ms per token. best: as in `acceptance_plot`."""
    with drawing(1.3 + 0.6 * len(items), "size and time per token") as drawn:
        panels = drawn.figure.subplots(2, 1)
        places = list(range(len(items)))[::-1]
        times = [item.manifest.report.timing for item in items]
        values = (
            ("size, MB", [item.manifest.report.size_bytes / 1e6 for item in items]),
            ("ms per token", [timing.token_ms if timing is not None else 0.0 for timing in times]),
        )
        for axes, (title, numbers) in zip(panels, values, strict=True):
            bars = axes.barh(places, numbers, 0.62, color=_colours(items, best))
            axes.bar_label(bars, [f"{number:.3g}" for number in numbers], padding=3)
            axes.set(title=title, xlim=(0.0, 1.3 * max(numbers)))
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(length=0)
            axes.set_yticks(places, [item.label for item in items])
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
    """Far enough to see the speed-up fade; what lies beyond is a flat line."""
    last_ms = forecast.curve[-1].rtt_ms
    if forecast.fades_ms is None:
        return last_ms
    return next((point.rtt_ms for point in forecast.curve if point.rtt_ms > 2.0 * forecast.fades_ms), last_ms)


def _mark(axes: Any, shape: str, at_ms: float | None, forecast: Forecast, *, streams: bool) -> None:
    """A point where a curve stops paying. Its words are in the legend, where nothing runs into them."""
    if not at_ms:
        return
    height = (stream if streams else stop_and_wait)(_setting(forecast, at_ms)).speed_up
    words = f"gains under 5 % from {at_ms:.0f} ms" if streams else f"breaks even at {at_ms:.0f} ms"
    axes.plot([at_ms], [height], shape, color=INK, markersize=6, linestyle="none", label=words, zorder=4)


def _colours(items: Sequence[Item], best: str | None) -> list[str]:
    """One colour per item: the best alone is coloured where one is named, else all are alike."""
    return [COLOURS[0] if best is None or item.label == best else GREY for item in items]


@dataclass(slots=True)
class _Drawing:
    """figure: matplotlib's. svg: an element for a page, once the drawing is done."""

    figure: Any
    svg: str = ""


@contextlib.contextmanager
def drawing(height_in: float, title: str) -> Iterator[_Drawing]:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        drawing = _Drawing(Figure(figsize=(_WIDTH_IN, height_in), layout="constrained"))
        FigureCanvasSVG(drawing.figure)
        yield drawing
        written = io.StringIO()
        no_one = {"Date": None, "Creator": None, "Format": None, "Type": None}
        drawing.figure.savefig(written, format="svg", transparent=True, metadata=no_one)
        drawing.svg = _inline(written.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    """An SVG file's text as an element of a page: no prologue, the page's colour, a name for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>\s*", "", svg, flags=re.DOTALL)  # would hold for the whole page
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # names that every plot of a page would share
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg {names} viewBox="\\1" role="img" aria-label="{title}">'
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', opening, svg, count=1)
    return svg.replace(INK, "currentColor")
