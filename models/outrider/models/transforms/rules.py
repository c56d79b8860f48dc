"""Defines what a request may ask between the logits and the pick, besides sampling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowRules:
    """Rules of one request that change its rows of logits. Plain values: they cross processes, and travel to devices.

    repetition_penalty: divides positive logits of tokens in prompt or text and multiplies negative ones (CTRL, Keskar
    et al. 2019, arXiv 1909.05858); 1 is off. presence_penalty, frequency_penalty: as OpenAI defines them, over the text
    only; 0 is off. logit_bias: (id, addend). bad_words: token sequences that never occur in the text. min_tokens: no
    stop id before so many tokens of text. allowed_ids: no other id; None allows all. typical_p: locally typical
    sampling (Meister et al. 2022, arXiv 2202.00666); 1 is off. xtc_probability, xtc_threshold: of "exclude top
    choices"; probability 0 is off.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    allowed_ids: tuple[int, ...] | None = None
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


PLAIN = RowRules()
"""No rule."""
