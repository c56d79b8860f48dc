"""Chooses where drafts run: profiles every place with its runtime, and takes the one that is expected to be fastest.

`outrider devices --profile` shows the same figures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from outrider.edge.devices.discovery import FoundRuntime, ModelRuntime, find_runtime
from outrider.edge.devices.energy import energy_meter
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.devices.profiles import (
    BUSY,
    CALL_SIZES,
    STEP_MS,
    Failure,
    Forecast,
    Link,
    Load,
    Profile,
    ProfileKey,
    Profiles,
    forecast,
    processor_load,
)
from outrider.edge.doctor.probe import ProbeFailed, profile_draft
from outrider.edge.link.fleet import open_fleet
from outrider.edge.modes.assemble import open_draft_bundle
from outrider.edge.modes.draft_ladder import Candidate, candidates_of
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.bundle import Bundle
from outrider.models.client.client import ClientOptions
from outrider.models.counted import counted
from outrider.models.errors import BundleError
from outrider.models.process.command_line import print_line
from outrider.models.version import outrider_version

LINK_TIMEOUT_S: Final = 2.0
CALLS: Final = (
    f"Best first for a step and a round trip of {STEP_MS:.0f} ms each: tokens/s is what is expected then, and `run` "
    "asks the cloud for its own. ms/4: a call of the draft model for 4 nodes"
)
ENERGY: Final = (
    "nodes/J: drafted nodes per joule of the processor's package, in calls of the most nodes; its power at rest and "
    "other programs are in it"
)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A place with what was measured and what is expected of it. error: why it has neither."""

    candidate: Candidate
    profile: Profile | None
    load: Load
    forecast: Forecast | None = None
    error: str | None = None

    @property
    def words(self) -> str:
        """What counts in the choice, for people."""
        name, found = self.candidate.words, self.forecast
        if found is None:
            return f"{name}: no profile: {self.error} (`outrider devices --profile` tries again)"
        nodes = f"{counted(found.nodes, 'node')} in {found.nodes_ms:.{0 if found.nodes_ms >= 10.0 else 1}f} ms"
        return f"{name}: {nodes}, about {found.tokens_per_s:.0f} tokens/s"

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        placement, profile, found = self.candidate.placement, self.profile, self.forecast
        return {
            "draft": self.candidate.bundle.manifest.name,
            "bundle": str(self.candidate.bundle.path),
            "runtime": placement.runtime,
            "device": placement.open_on or placement.device,
            "precision": placement.precision,
            "calls_ms": profile and {str(size): round(ms, 3) for size, ms in profile.calls_ms.items()},
            "open_s": profile and round(profile.open_s, 2),
            "nodes_per_joule": profile and profile.nodes_per_joule and round(profile.nodes_per_joule, 2),
            "acceptance": acceptance_of(self.candidate.bundle),
            "utilisation": round(self.load.utilisation, 2),
            "nodes": found and found.nodes,
            "nodes_ms": found and round(found.nodes_ms, 3),
            "tokens_per_s": found and round(found.tokens_per_s, 2),
            "error": self.error,
        }


def rank(
    candidates: Sequence[Candidate],
    num_threads: int = 0,
    link: Link | None = None,
    profiles: Profiles | None = None,
    measure: Callable[[str, DraftChoice, int], Profile] | None = None,
    load_now: Callable[[], Load] = processor_load,
    find: Callable[[ModelRuntime], FoundRuntime] = find_runtime,
    *,
    retries: bool = False,
) -> list[Ranked]:
    """All candidates, the best first; those that cannot be profiled last. Measures what has no kept profile.

    retries: also what could not be profiled before. link: to the cloud, as far as it is known. measure: profiles one;
    by default in a process of its own, since drivers crash.
    """
    profiles, measure, link = profiles or Profiles(), measure or profile_draft, link or Link()
    load, find_once = load_now(), cache(find)
    rates = [acceptance_of(each.bundle) for each in candidates]
    is_rated = all(rate is not None for rate in rates)  # a rate against a missing one is no comparison
    ranked = []
    for candidate, rate in zip(candidates, rates, strict=True):
        key = key_of(candidate, num_threads, find_once(cast(ModelRuntime, candidate.placement.runtime)))
        own = load if candidate.placement.device in (None, "cpu") else Load()  # runtimes tell no load of others
        profile = profiles.find(key)
        if profile is None or (retries and isinstance(profile, Failure)):
            try:
                profile = measure(str(candidate.bundle.path), candidate.choice, num_threads)
            except ProbeFailed as failure:
                profile = Failure(error=str(failure))
            if own.utilisation < BUSY:
                profiles.keep(key, profile)
            else:
                own = Load()  # its times have the load in them
        if isinstance(profile, Failure):
            ranked.append(Ranked(candidate, None, own, error=profile.error))
            continue
        if candidate.placement.device == "gpu" and "iGPU" not in key.device:
            profile = profile.model_copy(update={"nodes_per_joule": None})  # a card is not in the processor's package
        ranked.append(Ranked(candidate, profile, own, forecast(profile, rate if is_rated else None, own, link)))
    return sorted(ranked, key=_fastest_first)


def _fastest_first(ranked: Ranked) -> tuple[float, float]:
    if ranked.forecast is None or ranked.profile is None:
        return 0.0, 0.0
    # Several may be fast enough, or too slow to gain: rounding errors do not choose among them.
    return -round(ranked.forecast.tokens_per_s, 3), ranked.profile.token_ms


def key_of(candidate: Candidate, num_threads: int, found: FoundRuntime) -> ProfileKey:
    """What a profile of this candidate is kept under."""
    placement = candidate.placement
    names = {placement.open_on, f"{placement.open_on}.0"}
    named = [each for each in found.devices if each.name in names]
    device = next(iter(named + [each for each in found.devices if each.device == placement.device]), None)
    how = f"{placement.open_on}{', emulated' if placement.is_emulated else ''}, {num_threads} threads"
    what = f"{device.full_name}, {device.driver}" if device is not None else ""
    digest, version = candidate.bundle.manifest.digest, found.version or ""
    return ProfileKey(digest, placement.runtime, version, how, what, outrider_version())


def acceptance_of(bundle: Bundle) -> float | None:
    """The mean acceptance rate of the bundle's card; None where it has none."""
    rates = [each.rate for each in bundle.manifest.report.acceptance]
    return sum(rates) / len(rates) if rates else None


def measured_link(clouds: Sequence[tuple[str, ClientOptions]]) -> Link:
    """Round trip and step of the cloud that texts would begin at; unknown where none answers at once."""

    async def look() -> Link:
        async with open_fleet(clouds) as fleet:
            await fleet.look(LINK_TIMEOUT_S)
            first = fleet.ranked()[0].url
            state = next(each for each in fleet.states() if each.url == first)
            return Link(state.round_trip_ms, state.step_ms)

    return asyncio.run(look())


def placed_words(ranked: Sequence[Ranked]) -> str:
    """Why the first was taken, for people."""
    found = ranked[0].forecast
    words = "; ".join(each.words for each in ranked)
    if found is None:
        return words
    return f"{words} (expected at a step of {found.step_ms:.0f} ms and a round trip of {found.round_trip_ms:.0f} ms)"


def show_profiles(drafts: Sequence[Path], num_threads: int, console: Console, *, as_json: bool) -> None:
    """Measures what is not kept yet, and prints a table. Raises OutriderError.

    drafts: bundles; none: all pulled ones.
    """
    bundles = [open_draft_bundle(path) for path in drafts or [each.bundle.path for each in Shelf().drafts()]]
    if not bundles:
        raise BundleError("no draft is here to profile; pull one with `outrider pull`, or name one with --draft")
    groups: dict[str, list[Bundle]] = {}
    for bundle in bundles:  # drafts for different targets do not compete
        groups.setdefault(bundle.manifest.tokenizer_fingerprint, []).append(bundle)
    ranked = [rank(candidates_of(group, AS_BUNDLED), num_threads, retries=True) for group in groups.values()]
    meter = energy_meter()
    if as_json:
        profiles = [each.as_json() for group in ranked for each in group]
        document = {"profiles": profiles, "no_energy": meter if isinstance(meter, str) else None}
        typer.echo(json.dumps(document, indent=2))
        return
    for group in ranked:
        _show(console, group)
    energy = f"energy: not shown, {meter}" if isinstance(meter, str) else ENERGY
    print_line(console, CALLS, "dim")
    print_line(console, energy, "dim")


def _show(console: Console, ranked: Sequence[Ranked]) -> None:
    measured = [each.profile for each in ranked if each.profile is not None]
    sizes = [size for size in CALL_SIZES if any(size in profile.calls_ms for profile in measured)]
    has_energy = any(profile.nodes_per_joule is not None for profile in measured)
    columns = [*(f"ms/{size}" for size in sizes), *(["nodes/J"] if has_energy else []), "accepted", "busy", "tokens/s"]
    table = Table(
        *(Column(name, overflow="fold") for name in ("draft", "runtime and device")),
        *(Column(name, justify="right", no_wrap=True) for name in columns),
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for each in ranked:
        calls = each.profile.calls_ms if each.profile is not None else {}
        per_joule = each.profile.nodes_per_joule if each.profile is not None else None
        rate = acceptance_of(each.candidate.bundle)
        table.add_row(
            escape(each.candidate.bundle.manifest.name),
            escape(each.candidate.placement.words),
            *(f"{calls[size]:.2f}" if size in calls else "-" for size in sizes),
            *([f"{per_joule:.1f}" if per_joule is not None else "-"] if has_energy else []),
            f"{100 * rate:.0f} %" if rate is not None else "-",
            f"{100 * each.load.utilisation:.0f} %",
            f"{each.forecast.tokens_per_s:.1f}" if each.forecast is not None else "-",
        )
    console.print(table, highlight=False)
    for each in ranked:
        if each.error is not None:
            console.print(f"{escape(each.candidate.words)}: {escape(each.error)}", highlight=False, style="yellow")
