"""Finds the pulled draft that fits the server behind given endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.edge.store.shelf import Pulled, Shelf, find_all_pulled
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.errors import CloudError, RequestError
from outrider.models.wire.protocol import ModelFacts


async def find_for_server(
    clients: Sequence[VerifierClient],
    choice: DraftChoice = AS_BUNDLED,
    shelf: Shelf | None = None,
    retry: RetryPolicy | None = None,
    note: Callable[[str], None] = lambda words: None,
) -> list[Pulled]:
    """The pulled drafts for the target of the first server that says what it serves; see `find_all_pulled`.

    Asks no server where nothing was pulled. Its files are not yet checked: `open_draft_bundle` does. Raises as
    `served_facts`.
    """
    shelf = shelf or Shelf()
    if next(shelf.drafts(), None) is None:
        return []
    served = await served_facts(clients, retry, note)
    return find_all_pulled(served.tokenizer, served.target, choice, shelf) if served is not None else []


async def served_facts(
    clients: Sequence[VerifierClient],
    retry: RetryPolicy | None = None,
    note: Callable[[str], None] = lambda words: None,
) -> ModelFacts | None:
    """What the first server serves that says so; None where none says. Raises CloudError where no server answers,
    RequestError where one wants another key.
    """
    left = list(clients)
    while left:
        try:
            asked, served = await Endpoints(left, retry, on_trouble=note).call(_facts)
        except CloudError:
            if len(left) == len(clients):
                raise
            break  # a gateway has answered, so texts may work
        if served is not None:
            return served
        index = left.index(asked)
        left = left[index + 1 :] + left[:index]
    return None


async def _facts(client: VerifierClient) -> tuple[VerifierClient, ModelFacts | None]:
    """What is served there; None where it does not say, as some gateways."""
    try:
        return client, await client.model_facts()
    except EndpointLost as error:
        if error.status == 404:
            return client, None
        raise
    except RequestError as error:
        if error.status == 401:
            raise
        return client, None
