"""Writes the report card as one HTML file that needs nothing else: no scripts, links or fonts; plots are part of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup

from outrider.export.report.card import (
    BY_GAP_EXPLAINED,
    DEPTH_OF_ALPHA,
    EXPLAINED,
    JUDGED_AT,
    TREES_EXPLAINED,
    has_trees,
    judged,
    label,
    leads,
    step_of,
    tokens_per_pass,
    verdict,
    warnings_of,
    words_of_mapping,
)
from outrider.export.report.card_plots import Item, acceptance_plot, cost_plot, speed_up_plot
from outrider.export.report.comparison import Comparison
from outrider.models.bundle.build_site import BuildSite
from outrider.models.bundle.manifest import Acceptance, Manifest
from outrider.models.errors import BundleError, ExportError

REPORT_NAME: Final = "report.html"
"""File name of the page beside a pair's bundles."""

_MARK: Final = '<meta name="generator" content="Outrider">'


class PageWriter:
    """Writes the page at `path` in two steps: `write` does what can fail, `commit` only renames.

    A context manager: leaving it removes a page that was not committed, entering it removes what killed writers left.
    `overwrite` replaces a page that Outrider made, never another file.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._site = BuildSite(self.path.absolute())
        self._partial = self._site.path("partial")

    def __enter__(self) -> PageWriter:
        self.check()
        with self._explaining("no bundle was changed"):
            self._site.open()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)
            self._site.close()

    def check(self) -> None:
        """Raises BundleError if a file is in the way, ModuleNotFoundError if matplotlib is not installed, ExportError
        if the place cannot be read.
        """
        import matplotlib  # noqa: F401  # the plots need it

        with self._explaining("no bundle was changed"):
            self._check_destination()

    def write(
        self, drafts: Sequence[Manifest], target: Manifest | None = None, comparison: Comparison | None = None
    ) -> None:
        """Writes the page beside its place: for these drafts of one model, and for their target if it is at hand.

        Without drafts the page is the target's. The same figures give the same bytes. Raises OSError.
        """
        self._partial.write_text(card_html(drafts, target, comparison), encoding="utf-8", newline="\n")

    def commit(self) -> Path:
        """Puts the page in its place and returns it.

        Raises BundleError if a file is in the way by now, ExportError if the system refuses.
        """
        self._check_destination()
        with self._explaining("the bundles are written"):
            self._partial.replace(self.path)
        return self.path

    @contextlib.contextmanager
    def _explaining(self, bundles: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ExportError(
                f"the report card cannot be written to {self.path} ({error.strerror}); {bundles}. Write it elsewhere: "
                "outrider-export inspect BUNDLE --html PATH"
            ) from error

    def _check_destination(self) -> None:
        if not self.path.exists():
            return
        if not _is_page(self.path):
            raise BundleError(
                f"{self.path} exists and is not a report card of this version, so it is not replaced; choose another "
                "place"
            )
        if not self._overwrite:
            raise BundleError(f"{self.path} exists already; add --overwrite to replace it")


def write_card_html(path: str | Path, drafts: Sequence[Manifest], target: Manifest | None = None) -> Path:
    """Writes the page, as `PageWriter.write` does, and puts it at `path`, where it may replace another such page.

    Raises BundleError if something else is there, ExportError if the file cannot be written.
    """
    with PageWriter(path, overwrite=True) as page:
        with page._explaining("no bundle was changed"):
            page.write(drafts, target)
        return page.commit()


def _is_page(path: Path) -> bool:
    """Whether Outrider made the file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _MARK.encode() in file.read(1024)


def card_html(drafts: Sequence[Manifest], target: Manifest | None = None, comparison: Comparison | None = None) -> str:
    """The page; see `write_card_html`."""
    assert drafts or target is not None, "a report card needs a draft or a target"
    items = [Item(label(draft), draft) for draft in drafts]
    everything = items if target is None else [*items, Item(f"target, {label(target)}", target)]
    first = comparison.best if comparison is not None else everything[0].manifest
    judged_items = [item for item in items if judged(item.manifest.report.acceptance) is not None]
    forecasts = [item for item in items if item.forecast is not None]
    marks = comparison.round_trips_ms if comparison is not None else ()
    best = comparison.recommended if comparison is not None else None
    shown = [item.manifest for item in everything if comparison is None or item.manifest in (first, target)]
    warnings = [warning for manifest in shown for warning in warnings_of(manifest)]
    if comparison is not None and (others := comparison.load_warning()) is not None:
        warnings.append(others)
    return _template().render(
        mark=Markup(_MARK),
        title=f"Report card: {first.role} {first.name}",
        subtitle=_subtitle(first, target),
        verdict=verdict(first),
        mapping=words_of_mapping(first),
        explained=EXPLAINED,
        warnings=list(dict.fromkeys(warnings)),
        comparison=comparison,
        tiles=_tiles(first),
        depth=DEPTH_OF_ALPHA,
        judged_at=f"{JUDGED_AT:g}",
        temperatures=[f"{found.temperature:g}" for found in first.report.acceptance],
        drafts=judged_items,
        forecasts=forecasts,
        everything=everything,
        speed_ups=Markup(speed_up_plot(forecasts, marks, best)) if forecasts else None,
        acceptance=Markup(acceptance_plot(judged_items, best)) if judged_items else None,
        costs=Markup(cost_plot(everything, best)),
        timed_on=_timed_on([item.manifest for item in everything]),
        footer=_footer(first),
        rests_on=_rests_on(forecasts),
        tokens_per_pass=tokens_per_pass,
        has_trees=has_trees,
        any_trees=any(has_trees(item.forecast) for item in forecasts if item.forecast is not None),
        trees_explained=TREES_EXPLAINED,
        by_gap_explained=BY_GAP_EXPLAINED,
        by_lead=[(item.label, leads(found), found.by_gap) for item, found in _ranked(judged_items)],
        ranked=[item for item, _ in _ranked(judged_items)],
    )


def _ranked(items: Sequence[Item]) -> list[tuple[Item, Acceptance]]:
    """The drafts whose alternatives were measured, with the figure that decides: all but those of earlier versions."""
    found = [(item, judged(item.manifest.report.acceptance)) for item in items]
    return [(item, measured) for item, measured in found if measured is not None and measured.by_gap]


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = resources.files("outrider.export.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(text)


def _subtitle(manifest: Manifest, target: Manifest | None) -> str:
    shape = manifest.architecture
    words = (
        f"{shape.name}, {shape.parameters / 1e6:,.1f} million parameters, {shape.layers} layers; "
        f"{manifest.runtime} on {manifest.device}, {manifest.precision}"
    )
    if target is None or target is manifest:
        return words
    words += f". Judged on {target.name}: {target.architecture.parameters / 1e6:,.1f} million parameters"
    if target.widened is not None:
        words += f", widened to {target.widened.fp32_megabytes:,.0f} MB for measurements; its function is unchanged"
    return words


def _tiles(manifest: Manifest) -> list[tuple[str, str]]:
    report, found = manifest.report, judged(manifest.report.acceptance)
    tiles = [(f"{report.size_bytes / 1e6:,.1f} MB", "size")]
    if report.timing is not None:
        tiles.append((f"{report.timing.token_ms:.3g} ms", "per token"))
    if report.agreement is not None:
        tiles.append((f"{report.agreement.argmax:.1%}", "argmaxes equal to the unquantized model's"))
    if found is not None:
        error = f"±\N{NO-BREAK SPACE}{found.error:.3f}"
        tiles.append((f"{found.rate:.3f}", f"acceptance at temperature {JUDGED_AT:g} ({error})"))
        tiles.append((f"{tokens_per_pass((found,)):.2f}", f"tokens per target pass, {DEPTH_OF_ALPHA} drafted"))
    return tiles


def _rests_on(items: Sequence[Item]) -> str:
    """Assumptions of the predictions, in words; one target, whatever the number of drafts."""
    targets = [forecast for item in items if (forecast := item.forecast) is not None]
    if not targets:
        return ""
    words = step_of(targets[0])
    return (
        f"{words[0].upper()}{words[1:]}, each draft's own time per token and its own acceptance at temperature "
        f"{targets[0].temperature:g}."
    )


def _timed_on(manifests: Sequence[Manifest]) -> str:
    timings = [manifest.report.timing for manifest in manifests]
    places = dict.fromkeys(f"{timing.machine} ({timing.provider})" for timing in timings if timing is not None)
    return f"Times are medians on {'; '.join(places)}." if places else ""


def _footer(manifest: Manifest) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(manifest.report.versions.items()))
    return f"Made by outrider-export. Source weights {manifest.source.weights_sha256[:12]}. {versions}."
