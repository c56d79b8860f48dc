"""Lists the error codes of each endpoint for the OpenAPI document. docs/protocol.md says when each is sent."""

from __future__ import annotations

from typing import Final

Codes = dict[int, tuple[str, ...]]
"""Stable codes by HTTP status."""

_ANY: Final[Codes] = {
    400: ("malformed_http", "invalid_request"),
    404: ("not_found", "unsupported_endpoint"),
    405: ("method_not_allowed",),
    408: ("request_timeout",),
    413: ("body_too_large",),
    431: ("headers_too_large",),
    500: ("internal_error",),
    501: ("unsupported_transfer_encoding",),
    503: ("too_many_connections", "too_many_bytes", "no_replica"),
}
_GATE: Final[Codes] = {401: ("unauthorized",), 403: ("scope_missing", "host_not_allowed", "origin_not_allowed")}
_JSON: Final[Codes] = {400: ("malformed_json", "invalid_parameter"), 415: ("unsupported_media_type",)}
_RATE: Final[Codes] = {429: ("rate_limited",)}
_ENGINE: Final[Codes] = {
    400: ("context_length_exceeded", "empty_prompt", "token_out_of_range"),
    429: ("too_many_sessions", "tokens_exhausted"),
    503: ("overloaded", "engine_failed", "shutting_down"),
    504: ("deadline_exceeded",),
}
_FAULT: Final[Codes] = {500: ("model_fault",)}
_TOKENIZER: Final[Codes] = {409: ("tokenizer_mismatch",)}
_PREFIX: Final[Codes] = {409: ("prefix_not_held",)}
_SESSION: Final[Codes] = {404: ("unknown_session",)}
_OPENAI: Final[Codes] = {400: ("unsupported_parameter", "answer_too_large"), 404: ("model_not_found",)}
_TEMPLATE: Final[Codes] = {400: ("no_chat_template", "chat_template_refused")}
_RULES: Final[Codes] = {400: ("unsupported_rule",), 403: ("tolerance_not_allowed",)}
_GRAMMAR: Final[Codes] = {
    400: ("invalid_grammar", "grammar_too_complex", "grammar_excluded"),
    429: ("too_many_grammars",),
}
_CASCADE: Final[Codes] = {502: ("upstream_refused",), 503: ("upstream_lost",)}
_EVIDENCE: Final[Codes] = {400: ("wrong_evidence",)}
_DRAFTS: Final[Codes] = {
    400: ("draft_ahead", "token_out_of_range"),
    409: ("stale_draft",),
    429: ("rate_limited",),
    503: ("draft_not_taken",),
}
_DOWNLOAD: Final[Codes] = {
    404: ("unknown_draft",),
    410: ("draft_changed",),
    416: ("range_not_satisfiable",),
    429: ("too_many_downloads",),
    503: ("too_many_downloads", "shutting_down"),
}

_OWN: Final[dict[tuple[str, str], tuple[Codes, ...]]] = {
    ("post", "/v1/sessions"): (_JSON, _RATE, _ENGINE, _RULES, _GRAMMAR, _CASCADE, _TOKENIZER, _PREFIX),
    ("post", "/v1/sessions/{session_id}/drafts"): (_JSON, _SESSION, _DRAFTS, _EVIDENCE),
    ("delete", "/v1/sessions/{session_id}"): (_SESSION,),
    ("post", "/v1/verify"): (
        *(_JSON, _RATE, _ENGINE, _RULES, _GRAMMAR, _CASCADE),
        *(_EVIDENCE, _FAULT, _TOKENIZER, _PREFIX),
    ),
    ("post", "/v1/completions"): (_JSON, _RATE, _ENGINE, _GRAMMAR, _CASCADE, _FAULT, _OPENAI),
    ("post", "/v1/chat/completions"): (_JSON, _RATE, _ENGINE, _GRAMMAR, _CASCADE, _FAULT, _OPENAI, _TEMPLATE),
    ("post", "/v1/render"): (_JSON, _RATE, _TOKENIZER, _TEMPLATE, {400: ("context_length_exceeded", "empty_prompt")}),
    ("get", "/v1/models/{model}"): ({404: ("model_not_found",)},),
    ("get", "/v1/drafts/{name}/{path}"): (_DOWNLOAD,),
}


def own_codes(method: str, path: str) -> Codes:
    """The codes of an endpoint, without those that every endpoint may answer."""
    return _merged(_OWN.get((method, path), ()))


def shared_codes(*, needs_key: bool) -> Codes:
    """The codes that any endpoint may answer. needs_key: not a health probe or the OpenAPI document."""
    return _merged((_ANY, _GATE) if needs_key else (_ANY,))


def _merged(parts: tuple[Codes, ...]) -> Codes:
    statuses = sorted({status for part in parts for status in part})
    # Each code once, in the order of the parts.
    return {
        status: tuple(dict.fromkeys(code for part in parts for code in part.get(status, ()))) for status in statuses
    }
