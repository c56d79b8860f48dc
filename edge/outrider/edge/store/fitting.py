"""Finds what the servers behind given endpoints serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.edge.link.endpoints import Endpoints, RetryPolicy
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.errors import CloudError, RequestError
from outrider.models.wire.protocol import ModelFacts


async def facts_of(
    clients: Sequence[VerifierClient],
    retry: RetryPolicy | None = None,
    note: Callable[[str], None] = lambda words: None,
) -> ModelFacts | None:
    """What the first server serves that says so; None where none says. Raises CloudError where no server answers,
    RequestError where each that is left wants another key.
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
