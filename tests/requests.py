"""Makes requests to an engine from flat values, as most tests and benches have them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from outrider.cloud.seam import Asker, DraftHints, GenerateRequest, PickOptions
from outrider.models.picks.sampling import SamplingParams

_PICK, _HINTS, _ASKER = ({each.name for each in fields(kind)} for kind in (PickOptions, DraftHints, Asker))


def flat_request(
    prompt: tuple[int, ...],
    params: SamplingParams,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    **values: Any,
) -> GenerateRequest:
    """A request. values: any other field of it, or of its options, hints and asker."""
    parts: list[dict[str, Any]] = [{}, {}, {}, {}]
    for name, value in values.items():
        parts[next((at for at, names in enumerate((_PICK, _HINTS, _ASKER)) if name in names), 3)][name] = value
    pick, hints, asker, others = parts
    return GenerateRequest(
        prompt, PickOptions(params, **pick), max_tokens, stop_ids, DraftHints(**hints), Asker(**asker), **others
    )
