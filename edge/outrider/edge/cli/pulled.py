"""Finds the pulled draft that fits the server of `outrider run`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from outrider.edge.devices.placement import DraftChoice
from outrider.edge.link.client import ClientOptions, CloudClient
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.errors import EndpointLost
from outrider.edge.store.shelf import Pulled, Shelf, find_pulled
from outrider.models.errors import RequestError
from outrider.models.protocol import ModelFacts


def pulled_draft(
    urls: Sequence[str], api_key: str | None, choice: DraftChoice, note: Callable[[str], None]
) -> Pulled | None:
    """The pulled draft for the target that these servers have. Asks none of them where nothing was pulled.

    Raises CloudError where no server answers, RequestError where it wants another key.
    """
    shelf = Shelf()
    if next(shelf.drafts(), None) is None:
        return None
    facts = asyncio.run(_served(urls, api_key, note))
    return None if facts is None else find_pulled(facts, choice, shelf)


async def _served(urls: Sequence[str], api_key: str | None, note: Callable[[str], None]) -> ModelFacts | None:
    """What the first server that answers serves; None where it does not say, as some gateways."""

    async def ask(client: CloudClient) -> ModelFacts | None:
        try:
            return await client.model_facts()
        except EndpointLost as error:
            if error.status == 404:
                return None
            raise
        except RequestError as error:
            if error.status == 401:
                raise
            return None

    async with AsyncExitStack() as stack:
        options = ClientOptions(api_key=api_key)
        clients = [await stack.enter_async_context(CloudClient(url, options)) for url in urls]
        return await Endpoints(clients, on_trouble=note).call(ask)
