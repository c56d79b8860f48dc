"""Pulls the draft that fits this machine from a server, into the cache or a directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.edge.link.downloads import DraftClient
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.store.choice import Judged, OfferChoice, Wishes, choose, judge
from outrider.edge.store.fetch import BundleFetch, Progress, locked, manifest_of
from outrider.edge.store.shelf import PulledFor, Shelf
from outrider.edge.store.tokenizers import fetch_tokenizer
from outrider.models.bundle.bundle import Bundle, hash_file
from outrider.models.bundle.manifest import MANIFEST_NAME
from outrider.models.cache_folder import expanded
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost, EndpointUnfit
from outrider.models.errors import BundleError, CloudError, OutriderError, RequestError
from outrider.models.wire.offered import DraftList


@dataclass(frozen=True, slots=True)
class PullResult:
    """The bundle, and whether anything had to be fetched."""

    path: Path
    is_new: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """A server's list, each draft judged, and the one to take from there."""

    client: DraftClient
    offered: DraftList
    judged: list[Judged]
    chosen: OfferChoice


async def list_offered(client: DraftClient, note: Callable[[str], None], retry: RetryPolicy | None = None) -> DraftList:
    """The server's drafts. A server on this machine that still loads is waited for. Raises CloudError."""
    return await Endpoints([client], retry, on_trouble=note).call(_listed)


async def find_offer(
    clients: Sequence[DraftClient],
    wishes: Wishes,
    note: Callable[[str], None],
    retry: RetryPolicy | None = None,
) -> Offer:
    """The best draft of the first server that has one which fits. note: called where a server is passed over.

    Raises BundleError where no draft fits, CloudError where no server is left that could have one.
    """
    refusals: dict[str, OutriderError] = {}

    async def ask(client: VerifierClient) -> Offer:
        assert isinstance(client, DraftClient)
        judged: list[Judged] = []
        try:
            offered = await _listed(client)
            judged = judge(offered.drafts, wishes)
            return Offer(client, offered, judged, choose(judged, client.url))
        except EndpointLost:
            raise
        except (RequestError, CloudError, BundleError) as error:
            refusals[client.url] = error
            if isinstance(error, RequestError):
                if error.status == 401:
                    raise
                what = "refuses to list drafts"
            elif isinstance(error, CloudError):
                what = "offers no drafts for download"
            else:
                what = "has no draft that fits" if judged else "has no drafts for its target"
        raise EndpointUnfit(f"{client.url} {what}")

    try:
        return await Endpoints(clients, retry, on_trouble=note).call(ask)
    except CloudError:
        if len(refusals) < len(clients):
            raise
        if len(refusals) == 1:
            raise next(iter(refusals.values())) from None
        raise BundleError(f"no cloud has a draft that fits: {'; '.join(map(str, refusals.values()))}") from None


async def _listed(client: VerifierClient) -> DraftList:
    """Raises CloudError where there is no such route: the server is older, or another program."""
    assert isinstance(client, DraftClient)
    try:
        return await client.draft_list()
    except EndpointLost as error:
        if error.status != 404:
            raise
    raise CloudError(
        f"the server at {client.url} offers no drafts for download: it is older than this device, or no Outrider "
        "server. Copy a bundle from where it was exported, and name it with --draft"
    )


async def pull_draft(
    client: DraftClient,
    offered: DraftList,
    chosen: OfferChoice,
    progress: Progress,
    to: Path | None = None,
    shelf: Shelf | None = None,
) -> PullResult:
    """Brings the chosen draft here: to `to`, or to its place in the cache, where `find_pulled` finds it.

    What is here already is checked against its hashes and not fetched again; a damaged bundle in the cache is mended.
    """
    shelf = shelf or Shelf()
    sha256 = manifest_of(chosen.draft).sha256
    destination = shelf.place(sha256) if to is None else expanded(to).absolute()
    own_tokenizer = chosen.draft.tokenizer or offered.tokenizer
    fetch = BundleFetch(client, chosen.draft, own_tokenizer, destination, progress)
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
                PulledFor(
                    model=offered.model,
                    server=client.url,
                    name=chosen.draft.name,
                    at_s=time.time(),
                    tokenizer=offered.tokenizer,
                ),
            )
    if own_tokenizer != offered.tokenizer:
        try:
            await fetch_tokenizer(client, offered.tokenizer)  # now, while a server that shares it is at hand
        except (CloudError, RequestError, BundleError) as error:
            progress.note(f"{error}. `outrider run` asks for the target's tokenizer again.")
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
