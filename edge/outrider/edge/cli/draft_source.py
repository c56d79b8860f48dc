"""Finds the draft to use: the named one, else the one pulled for the verifier's target, else the reference draft."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from outrider.edge.cli.exporter import default_draft
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.link.client import ClientOptions, CloudClient, verifier_url
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.auto import AUTO
from outrider.edge.store.fitting import find_for_server
from outrider.edge.store.shelf import Pulled, find_pulled_from
from outrider.models.bundle import Bundle
from outrider.models.command_line import print_line
from outrider.models.errors import BundleError, CloudError
from outrider.models.reference_export import REFERENCE

MAX_LOADING_S: Final = 2.0
"""How long to wait for a verifier on this machine where none is needed yet."""
Clouds = Sequence[tuple[str, ClientOptions]]
"""Addresses, each with its own key."""


def clouds_of(urls: Sequence[str], keys: Keys) -> Clouds:
    """The addresses with their keys. Raises ConfigError for an address or a key file that cannot be used."""
    for url in urls:
        verifier_url(url)
    return [(url, ClientOptions(api_key=keys.for_url(url, urls))) for url in urls]


def find_draft(
    draft: str, choice: DraftChoice, clouds: Clouds, about: Console, *, needs_server: bool = True
) -> str | Path:
    """Where the draft's bundle is. Raises as `find_for_server` and `default_draft` do.

    draft: the option's value. needs_server: where no server answers, False takes what was last pulled from one.
    """
    if draft not in (AUTO, REFERENCE):
        return draft
    if draft == AUTO:
        note = partial(print_line, about, style="yellow")
        retry = None if needs_server else RetryPolicy(max_failures=max(2, len(clouds)), max_loading_s=MAX_LOADING_S)
        try:
            found = asyncio.run(_find_pulled(choice, clouds, note, retry))
        except CloudError as error:
            if needs_server:
                raise
            note(f"{error}.")
            found = find_pulled_from([url for url, _ in clouds], choice)
        if found is not None:
            print_line(about, f"draft: {found.words}", "dim")
            return _checked(found.bundle.path)
    return default_draft(choice)


async def _find_pulled(
    choice: DraftChoice, clouds: Clouds, note: Callable[[str], None], retry: RetryPolicy | None
) -> Pulled | None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(CloudClient(url, each)) for url, each in clouds]
        return await find_for_server(Endpoints(clients, retry, on_trouble=note), choice)


def _checked(pulled: Path) -> Path:
    """The place of a pulled draft that is whole. Raises BundleError with the command that mends it."""
    try:
        Bundle.open(pulled)
    except BundleError as error:
        damage = str(error).rpartition("; ")[0]  # without the advice for bundles that were copied
        raise BundleError(f"the pulled draft is damaged: {damage}; run `outrider pull` again") from None
    return pulled
