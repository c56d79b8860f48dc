"""Pulls the draft that fits this machine from a server, into the cache or a directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.edge.link.downloads import DraftClient
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.errors import EndpointLost
from outrider.edge.store.choice import Chosen
from outrider.edge.store.fetch import BundleFetch, Progress, locked, manifest_of
from outrider.edge.store.shelf import PulledFor, Shelf, now_s
from outrider.models.bundle import Bundle, hash_file
from outrider.models.errors import BundleError, CloudError
from outrider.models.manifest import MANIFEST_NAME
from outrider.models.protocol import DraftList


@dataclass(frozen=True, slots=True)
class PullResult:
    """The bundle, and whether anything had to be fetched."""

    path: Path
    is_new: bool


async def list_offered(client: DraftClient, note: Callable[[str], None]) -> DraftList:
    """The server's drafts. A server on this machine that still loads is waited for. Raises CloudError."""

    async def ask(_: object) -> DraftList | None:
        try:
            return await client.draft_list()
        except EndpointLost as error:
            if error.status == 404:
                return None
            raise

    listed = await Endpoints([client], on_trouble=note).call(ask)
    if listed is None:
        raise CloudError(
            f"the server at {client.url} offers no drafts for download: it is older than this device, or no Outrider "
            "server. Copy a bundle from where it was exported, and name it with --draft"
        )
    return listed


async def pull_draft(
    client: DraftClient,
    offered: DraftList,
    chosen: Chosen,
    progress: Progress,
    to: Path | None = None,
    shelf: Shelf | None = None,
) -> PullResult:
    """Brings the chosen draft here: to `to`, or to its place in the cache, where `find_pulled` finds it.

    What is here already is checked against its hashes and not fetched again; a damaged bundle in the cache is mended.
    """
    shelf = shelf or Shelf()
    sha256 = manifest_of(chosen.draft).sha256
    destination = shelf.place(sha256) if to is None else to.absolute()
    fetch = BundleFetch(client, chosen.draft, offered.tokenizer, destination, progress)
    async with locked(shelf.lock(sha256), progress.note):
        is_new = not _is_here(destination, sha256, progress.note if to is None else None)
        if is_new:
            if to is None and destination.exists():
                fetch.reuse()
            await fetch.run()
        if to is None and offered.target is not None:
            shelf.note(
                sha256,
                offered.target,
                PulledFor(model=offered.model, server=client.url, name=chosen.draft.name, at_s=now_s()),
            )
    return PullResult(destination, is_new)


def _is_here(place: Path, sha256: str, note: Callable[[str], None] | None) -> bool:
    """Whether the bundle lies there, whole. note: takes the damage of one that may be mended; without it, raises
    BundleError for what is there and is not this bundle.
    """
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return False
    try:
        Bundle.open(place)
        if hash_file(place / MANIFEST_NAME) == sha256:
            return True
        damage = f"{place} is another bundle"
    except BundleError as error:
        damage = str(error)
    if note is None:
        raise BundleError(f"{damage}. It is not replaced: choose another place with --to")
    note(f"{damage}. Fetching what is damaged again.")
    return False
