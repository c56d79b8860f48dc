"""Pulls a draft from a server: what is chosen and why, a progress bar, and the bundle's place.

The place goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table

from outrider.edge.cli.command_options import PullOptions
from outrider.edge.cli.draft_source import Clouds, Notes, clouds_of
from outrider.edge.devices.discovery import RUNTIME_NAMES
from outrider.edge.link.downloads import DraftClient
from outrider.edge.link.endpoints import RetryPolicy
from outrider.edge.store.choice import Judged, Wishes, judge
from outrider.edge.store.fetch import Progress
from outrider.edge.store.prune import find_outdated, prune, size_of
from outrider.edge.store.pull import Offer, PullResult, find_offer, list_offered, pull_draft
from outrider.edge.store.shelf import Shelf
from outrider.models.counted import counted
from outrider.models.errors import CloudError, OutriderError, RequestError
from outrider.models.process.command_line import print_line
from outrider.models.visible import visible
from outrider.models.wire.offered import DraftList, OfferedDraft

ONCE: Final = RetryPolicy(max_failures=1, max_loading_s=0.0)
"""For one of several servers: one that does not answer is left out."""


def pull_once(options: PullOptions, out: Console, about: Console) -> None:
    """Pulls a draft, or lists them; raises OutriderError. out: the bundle's place. about: everything else."""
    asyncio.run(_pull(clouds_of(options.cloud, options.keys()), options, out, about))


async def _pull(clouds: Clouds, options: PullOptions, out: Console, about: Console) -> None:
    note = Notes(about).line
    # A configured "ngram" is for the commands that draft.
    runtime = None if options.runtime == "ngram" else options.runtime
    wishes = Wishes(options.device, runtime, options.precision, options.name, options.same_tokenizer)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(DraftClient(url, each)) for url, each in clouds]
        if options.is_listing:
            await _list(clients, wishes, out, note)
            return
        offer = await find_offer(clients, wishes, note)
        chosen = offer.chosen
        where = f" from {offer.client.url}" if len(clients) > 1 else ""
        print_line(about, f"{chosen.draft.name}{where}: {describe(chosen.draft)}", "bold")
        print_line(about, f"Chosen: {chosen.why}.", "dim")
        for each in offer.judged:
            if each.why_not is not None:
                print_line(about, f"Left out: {each.draft.name}, {each.why_not}.", "dim")
        if chosen.note is not None:
            note(f"note: {chosen.note}")
        result = await _with_bar(offer, options, about)
        if options.to is None:
            lists = {offer.client.url: offer.offered}
            if options.prune:
                others, errors = await _ask_all([each for each in clients if each is not offer.client], note, ONCE)
                lists |= others
                for error in errors:
                    note(f"{error}. What was pulled from there stays.")
            _keep_house(lists, about, is_pruning=options.prune)
    fetched = "Pulled." if result.is_new else "It is here already, unchanged."
    advice = "`outrider run` and `outrider serve` draft with it for this target."
    if options.to is not None:
        advice = f"Draft with it: outrider run --draft {shlex.quote(str(result.path))}"
    print_line(about, f"{fetched} {advice}", "dim")
    out.print(str(result.path), soft_wrap=True, highlight=False, markup=False)


async def _ask_all(
    clients: Sequence[DraftClient], note: Callable[[str], None], retry: RetryPolicy | None
) -> tuple[dict[str, DraftList], list[OutriderError]]:
    """What each server offers now, by its address, and why the others do not say."""
    found, errors = dict[str, DraftList](), list[OutriderError]()
    for client in clients:
        try:
            found[client.url] = await list_offered(client, note, retry)
        except (CloudError, RequestError) as error:
            errors.append(error)
    return found, errors


def _keep_house(lists: Mapping[str, DraftList], about: Console, *, is_pruning: bool) -> None:
    """Says how much the cache holds; removes what is outdated, or says how."""
    shelf = Shelf()
    outdated = find_outdated(shelf, lists)
    sizes = {each.bundle.path: size_of(each.bundle.path) for each in shelf.drafts()}
    if is_pruning:
        for each in prune(shelf, outdated, lambda words: print_line(about, words, "yellow")):
            print_line(about, f"Removed: {each.words}, {sizes.pop(each.bundle.path) / 1e6:,.1f} MB.", "dim")
        outdated = []
    line = f"The cache holds {counted(len(sizes), 'draft')}, {sum(sizes.values()) / 1e6:,.1f} MB, in {shelf.root}"
    if outdated:
        old_mb = sum(sizes[each.bundle.path] for each in outdated) / 1e6
        line += f"; no longer offered: {len(outdated)}, {old_mb:,.1f} MB. `outrider pull --prune` removes them"
    print_line(about, f"{line}.", "dim")


async def _list(clients: Sequence[DraftClient], wishes: Wishes, out: Console, note: Callable[[str], None]) -> None:
    """Shows what each server offers. Raises the first error where none can be asked."""
    found, errors = await _ask_all(clients, note, ONCE if len(clients) > 1 else None)
    if not found:
        raise errors[0]
    for url, offered in found.items():
        show_offered(out, offered, judge(offered.drafts, wishes), url)
    for error in errors:
        note(f"{error}.")


async def _with_bar(offer: Offer, options: PullOptions, about: Console) -> PullResult:
    """Pulls it, with a bar on a terminal."""
    chosen = offer.chosen
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=about, disable=not about.is_terminal, transient=True) as bar:
        task = bar.add_task(escape(visible(chosen.draft.name)), total=chosen.draft.size_bytes)
        progress = Progress(
            chosen.draft.size_bytes,
            on_change=lambda done: bar.update(task, completed=done),
            note=Notes(bar.console).line,
        )
        try:
            return await pull_draft(offer.client, offer.offered, chosen, progress, options.to)
        except asyncio.CancelledError:  # Ctrl-C
            progress.note("Interrupted. What has arrived is kept: the same command goes on there.")
            raise


def describe(draft: OfferedDraft) -> str:
    """A draft in words."""
    runtime = next((words for name, words in RUNTIME_NAMES.items() if name == draft.runtime), draft.runtime)
    rate = draft.acceptance
    accepted = "acceptance not measured" if rate is None else f"{rate * 100:.0f} % of its tokens are accepted"
    other = ", another tokenizer" if draft.tokenizer is not None else ""
    size = f"{draft.size_bytes / 1e6:,.1f} MB"
    return f"{draft.precision}, {runtime} on the {draft.device.upper()}, {size}, {accepted}{other}"


def show_offered(console: Console, offered: DraftList, judged: list[Judged], url: str) -> None:
    """Prints the server's drafts as a table, with what runs here."""
    print_line(console, f"{offered.model} at {url} has {counted(len(judged), 'draft')}.")
    if not judged:
        return
    table = Table(
        Column("draft", overflow="fold"),
        *(
            Column(name, no_wrap=True, overflow="fold")
            for name in ("device", "runtime", "precision", "size", "accepted")
        ),
        Column("here", overflow="fold"),
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for each in judged:
        draft = each.draft
        rate = "-" if draft.acceptance is None else f"{draft.acceptance * 100:.0f} %"
        row = (draft.name, draft.device, draft.runtime, draft.precision, f"{draft.size_bytes / 1e6:,.1f} MB", rate)
        table.add_row(*(escape(visible(cell)) for cell in (*row, each.runs_not or each.why_not or "yes")))
    console.print(table, highlight=False)
