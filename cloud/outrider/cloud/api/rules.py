"""Reads the acceptance rule of a /v1/verify item, and labels its result with it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud.api.state import ServerSettings
from outrider.models.acceptance import DEFAULT_DELTA, Rule, RuleTerms
from outrider.models.errors import RequestError
from outrider.models.http.errors import FieldError
from outrider.models.protocol import VerifyItem
from outrider.models.rejection import Evidence, SparseDistribution


def item_terms(item: VerifyItem, settings: ServerSettings) -> RuleTerms:
    """The rule of a verify item. Raises RequestError `tolerance_not_allowed`, `invalid_parameter`."""
    _require_tolerance(item.rule, "delta", item.delta)
    _require_allowed(item.rule, settings)
    return RuleTerms(item.rule, _delta(item.delta))


def evidence_of(qs: Sequence[Sequence[int]] | None, log_qs: Sequence[float] | None) -> tuple[Evidence, ...]:
    """What came with drafted tokens in JSON. The engine checks that it is what the rule needs."""
    if qs is not None and log_qs is not None:
        raise FieldError(
            "invalid_parameter", "draft_q and draft_log_q are both given; expected one of them", param="draft_log_q"
        )
    if log_qs is not None:
        return tuple(log_qs)
    for q in qs or ():
        if len(q) % 2:
            raise FieldError(
                "invalid_parameter",
                f"a distribution of draft_q has {len(q)} numbers; expected ids, each followed by its weight",
                param="draft_q",
            )
    return tuple(SparseDistribution(tuple(q[::2]), tuple(q[1::2])) for q in qs or ())


def name_of(terms: RuleTerms) -> str | None:
    """The label of an answer: a rule that needs evidence."""
    return terms.rule.value if terms.rule.needs_evidence else None


def lossy_of(terms: RuleTerms) -> bool | None:
    """True where the text may not be the target's, else None: the field is left out."""
    return True if terms.is_lossy else None


def _require_tolerance(rule: Rule, name: str, value: float | None) -> None:
    if value is not None and rule is not Rule.TOLERANCE:
        raise FieldError(
            "invalid_parameter", f"{name} is given, and the rule is {rule.value}; leave it out", param=name
        )


def _require_allowed(rule: Rule, settings: ServerSettings) -> None:
    if rule is Rule.TOLERANCE and not settings.allow_tolerance:
        raise RequestError(
            "tolerance_not_allowed",
            "the rule tolerance is lossy, and this server does not allow it; use coupled or rejection",
            status=403,
        )


def _delta(given: float | None) -> float:
    return DEFAULT_DELTA if given is None else given
