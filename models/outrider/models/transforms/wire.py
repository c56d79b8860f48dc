"""Translates rules between their wire form and `RowRules`."""

from __future__ import annotations

from typing import Any

from outrider.models.transforms.rules import PLAIN, RowRules
from outrider.models.wire.rule_fields import RuleFields


def rules_of(fields: RuleFields) -> RowRules:
    """The rules of a session or of an item to verify. Raises SamplingError."""
    if fields.model_fields_set.isdisjoint(RuleFields.model_fields):
        return PLAIN
    allowed = fields.allowed_token_ids
    return RowRules(
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


def fields_of(rules: RowRules, num_generated: int) -> dict[str, Any]:
    """What a message says of them: nothing without rules, so that older servers take it.

    num_generated: tokens before the first new one that belong to the text.
    """
    if rules == PLAIN:
        return {}
    return {
        "repetition_penalty": rules.repetition_penalty,
        "presence_penalty": rules.presence_penalty,
        "frequency_penalty": rules.frequency_penalty,
        "logit_bias": dict(rules.logit_bias),
        "bad_words": [list(word) for word in rules.bad_words],
        "min_tokens": rules.min_tokens,
        "allowed_token_ids": None if rules.allowed_ids is None else list(rules.allowed_ids),
        "typical_p": rules.typical_p,
        "xtc_probability": rules.xtc_probability,
        "xtc_threshold": rules.xtc_threshold,
        "generated": num_generated,
    }
