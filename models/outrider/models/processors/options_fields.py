"""Translates logit processors between their wire form and `ProcessorOptions`."""

from __future__ import annotations

from typing import Any

from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.wire.processor_fields import ProcessorFields


def processors_of(fields: ProcessorFields) -> ProcessorOptions:
    """The processors of a session or of an item to verify. Raises SamplingError."""
    if fields.model_fields_set.isdisjoint(ProcessorFields.model_fields):
        return PLAIN
    allowed = fields.allowed_token_ids
    return ProcessorOptions(
        fields.repetition_penalty,
        fields.presence_penalty,
        fields.frequency_penalty,
        tuple(fields.logit_bias.items()),
        tuple(map(tuple, fields.bad_words)),
        fields.min_tokens,
        None if allowed is None else tuple(allowed),
        fields.typical_p,
        fields.xtc_probability,
        fields.xtc_threshold,
    )


def fields_of(processors: ProcessorOptions, num_generated: int) -> dict[str, Any]:
    """What a message says of them: nothing without them, so that older servers take it.

    num_generated: tokens before the first new one that belong to the text.
    """
    if processors == PLAIN:
        return {}
    return {
        "repetition_penalty": processors.repetition_penalty,
        "presence_penalty": processors.presence_penalty,
        "frequency_penalty": processors.frequency_penalty,
        "logit_bias": dict(processors.logit_bias),
        "bad_words": [list(word) for word in processors.bad_words],
        "min_tokens": processors.min_tokens,
        "allowed_token_ids": None if processors.allowed_ids is None else list(processors.allowed_ids),
        "typical_p": processors.typical_p,
        "xtc_probability": processors.xtc_probability,
        "xtc_threshold": processors.xtc_threshold,
        "generated": num_generated,
    }
