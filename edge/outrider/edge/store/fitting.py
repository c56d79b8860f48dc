"""Finds the pulled draft that fits the server behind given endpoints."""

from __future__ import annotations

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.link.client import CloudClient
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.errors import EndpointLost
from outrider.edge.store.shelf import Pulled, Shelf, find_all_pulled
from outrider.models.errors import RequestError
from outrider.models.protocol import ModelFacts


async def find_for_server(
    endpoints: Endpoints, choice: DraftChoice = AS_BUNDLED, shelf: Shelf | None = None
) -> list[Pulled]:
    """The pulled drafts for the target of the first endpoint that answers; see `find_all_pulled`.

    Asks no endpoint where nothing was pulled. Its files are not yet checked: `open_draft_bundle` does. Raises
    CloudError where no endpoint answers, RequestError where it wants another key.
    """
    shelf = shelf or Shelf()
    if next(shelf.drafts(), None) is None:
        return []
    served = await endpoints.call(_facts)
    return [] if served is None else find_all_pulled(served.tokenizer, served.target, choice, shelf)


async def _facts(client: CloudClient) -> ModelFacts | None:
    """What is served there; None where it does not say, as some gateways."""
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
