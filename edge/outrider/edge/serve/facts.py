"""Says which model answers a request: the target or, where no cloud answers and the user allows it, the draft."""

from __future__ import annotations

from outrider.edge.serve.faults import NO_VERIFIER, as_request_error
from outrider.edge.serve.state import LocalCore
from outrider.models.errors import OutriderError, RequestError
from outrider.models.http.answers import require_model
from outrider.models.wire.protocol import ModelFacts


async def target_facts(core: LocalCore, model: str | None = None) -> ModelFacts:
    """The target's facts. model: the one that a request names. Raises RequestError, also where it is another."""
    try:
        facts = await core.upstream.facts()
        if model and model != facts.name:
            facts = await core.upstream.facts(is_fresh=True)
    except OutriderError as error:
        raise as_request_error(error, shows_details=core.settings.shows_details) from None
    if model:
        require_model(facts.name, model)
    return facts


async def facts_or_draft(core: LocalCore, model: str | None = None) -> tuple[ModelFacts, bool]:
    """The target's facts, and whether a cloud answers. Without one, with --offline-ok, the draft's."""
    try:
        return await target_facts(core, model), True
    except RequestError as error:
        if error.code != NO_VERIFIER or core.offline is None:
            raise
        return core.offline_facts, False
