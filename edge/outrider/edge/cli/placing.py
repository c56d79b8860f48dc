"""Chooses where drafts run: profiles every place with its runtime, and takes the one with the smallest score.

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
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.devices.profiles import (
    BUSY,
    Link,
    Load,
    Profile,
    ProfileKey,
    Profiles,
    node_ms,
    processor_load,
    text_token_ms,
)
from outrider.edge.doctor.probe import ProbeFailed, profile_draft
from outrider.edge.link.fleet import open_fleet
from outrider.edge.modes.assemble import open_draft_bundle
from outrider.edge.modes.draft_ladder import Candidate, candidates_of
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.bundle import Bundle
from outrider.models.client.client import ClientOptions
from outrider.models.errors import BundleError
from outrider.models.version import outrider_version

LINK_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Ranked:
    """A place with its figures, ms. score: of `text_token_ms`. error: why it has none."""

    candidate: Candidate
    profile: Profile | None
    load: Load
    node_ms: float | None = None
    score_ms: float | None = None
    error: str | None = None

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        placement, profile = self.candidate.placement, self.profile
        return {
            "draft": self.candidate.bundle.manifest.name,
            "bundle": str(self.candidate.bundle.path),
            "runtime": placement.runtime,
            "device": placement.open_on or placement.device,
            "precision": placement.precision,
            "token_ms": profile and round(profile.token_ms, 3),
            "eight_ms": profile and round(profile.eight_ms, 3),
            "open_s": profile and round(profile.open_s, 2),
            "acceptance": acceptance_of(self.candidate.bundle),
            "utilisation": round(self.load.utilisation, 2),
            "score_ms": self.score_ms and round(self.score_ms, 3),
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
) -> list[Ranked]:
    """All candidates, the best first; those that cannot be profiled last. Measures what has no kept profile.

    link: to the cloud, as far as it is known. measure: profiles one; by default in a process of its own, since drivers
    crash.
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
        if profile is None:
            try:
                profile = measure(str(candidate.bundle.path), candidate.choice, num_threads)
            except ProbeFailed as failure:
                ranked.append(Ranked(candidate, None, own, error=str(failure)))
                continue
            if own.utilisation < BUSY:
                profiles.keep(key, profile)
            else:
                own = Load()  # its times have the load in them
        score = text_token_ms(profile, rate if is_rated else None, own, link)
        ranked.append(Ranked(candidate, profile, own, node_ms(profile, own, link), score))
    return sorted(ranked, key=lambda each: each.score_ms if each.score_ms is not None else float("inf"))


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
    first, *others = ranked
    if first.score_ms is None:
        return f"{first.candidate.words}; no profile: {first.error}"
    parts = [f"{each.candidate.words} {each.node_ms:.2f} ms" for each in others if each.node_ms is not None]
    beside = f", against {'; '.join(parts)}" if parts else ""
    return f"{first.candidate.words}: {first.node_ms:.2f} ms per drafted token{beside}"


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
    ranked = [rank(candidates_of(group, AS_BUNDLED), num_threads) for group in groups.values()]
    if as_json:
        typer.echo(json.dumps({"profiles": [each.as_json() for group in ranked for each in group]}, indent=2))
        return
    for group in ranked:
        _show(console, group)


def _show(console: Console, ranked: Sequence[Ranked]) -> None:
    table = Table(
        *(Column(name, overflow="fold") for name in ("draft", "runtime and device")),
        *(Column(name, justify="right", no_wrap=True) for name in ("ms/token", "ms/8 nodes")),
        *(Column(name, justify="right", no_wrap=True) for name in ("accepted", "busy", "score")),
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for each in ranked:
        placement, profile = each.candidate.placement, each.profile
        rate = acceptance_of(each.candidate.bundle)
        times = (f"{profile.token_ms:.2f}", f"{profile.eight_ms:.2f}") if profile is not None else ("-", "-")
        score = f"{each.score_ms:.2f}" if each.score_ms is not None else "-"
        busy = f"{100 * each.load.utilisation:.0f} %"
        accepted = f"{100 * rate:.0f} %" if rate is not None else "-"
        table.add_row(
            escape(each.candidate.bundle.manifest.name), escape(placement.words), *times, accepted, busy, score
        )
    console.print(table, highlight=False)
    for each in ranked:
        if each.error is not None:
            console.print(f"{escape(each.candidate.words)}: {escape(each.error)}", highlight=False, style="yellow")
