"""Defines what a request may ask between the logits and the pick, besides sampling, and its form on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.models.errors import SamplingError
from outrider.models.wire.fields import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_MIN_TOKENS,
    MAX_PENALTY,
    MAX_REPETITION,
    MIN_REPETITION,
    ProcessorFields,
    require_ids,
)

_RANGES: Final = {
    "repetition_penalty": (MIN_REPETITION, MAX_REPETITION),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "min_tokens": (0, MAX_MIN_TOKENS),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """Rules of one request that change its rows of logits. Plain values: they cross processes, and travel to devices.

    repetition_penalty: divides positive logits of tokens in prompt or text and multiplies negative ones (CTRL, Keskar
    et al. 2019, arXiv 1909.05858), in [0.01, 100]; 1 is off. presence_penalty, frequency_penalty: as OpenAI defines
    them, over the text only, in [-2, 2]; 0 is off. logit_bias: (id, addend in [-100, 100]), at most 1024, each id once.
    bad_words: token sequences that never occur in the text, at most 256 of 1 to 32 tokens. min_tokens: no stop id
    before so many tokens of text. allowed_ids: no other id, at most 8192, at least one; None allows all. typical_p:
    locally typical sampling (Meister et al. 2022, arXiv 2202.00666), in (0, 1]; 1 is off. xtc_probability,
    xtc_threshold: of "exclude top choices", both in [0, 1]; probability 0 or a threshold over 0.5 is off.

    Raises SamplingError on anything else, NaN included. The message begins with the name that the field has on the
    wire: `allowed_token_ids` for allowed_ids, else its own.
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

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            _in_range(name, getattr(self, name), least, most)
        if not 0.0 < self.typical_p <= 1.0:
            raise SamplingError(f"typical_p is {self.typical_p!r}; expected more than 0, up to 1 (off)")
        _at_most("logit_bias", len(self.logit_bias), MAX_BIASES, "ids")
        for _, addend in self.logit_bias:
            _in_range("logit_bias", addend, -MAX_BIAS, MAX_BIAS)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise SamplingError("logit_bias has an id twice; expected each id once")
        _ids("logit_bias", [token for token, _ in self.logit_bias])
        _at_most("bad_words", len(self.bad_words), MAX_BAD_WORDS, "sequences")
        for word in self.bad_words:
            if not word:
                raise SamplingError("bad_words has an empty sequence; expected at least one token in each")
            _at_most("bad_words", len(word), MAX_BAD_WORD_TOKENS, "tokens in a sequence")
            _ids("bad_words", word)
        if self.allowed_ids is not None:
            if not self.allowed_ids:
                raise SamplingError("allowed_token_ids is empty; expected at least one id")
            _at_most("allowed_token_ids", len(self.allowed_ids), MAX_ALLOWED_IDS, "ids")
            _ids("allowed_token_ids", self.allowed_ids)
            object.__setattr__(self, "allowed_ids", _lean(self.allowed_ids))
        object.__setattr__(self, "bad_words", tuple(map(_lean, self.bad_words)))
        object.__setattr__(self, "logit_bias", tuple((*_lean([token]), addend) for token, addend in self.logit_bias))

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is on, so that tokens are counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def changes_rows(self) -> bool:
        """Whether a row of logits may change."""
        masks = bool(self.bad_words) or self.min_tokens > 0 or self.allowed_ids is not None
        return self.penalizes or bool(self.logit_bias) or masks

    @property
    def narrows(self) -> bool:
        """Whether the distribution may be truncated beyond top-k, top-p and min-p."""
        return self.typical_p < 1.0 or (self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5)

    @property
    def narrowing_only(self) -> ProcessorOptions:
        """Those of `narrows` alone: for who has no more use of the ids, which may take a quarter of a megabyte."""
        return ProcessorOptions(
            typical_p=self.typical_p, xtc_probability=self.xtc_probability, xtc_threshold=self.xtc_threshold
        )

    @property
    def num_ids(self) -> int:
        """Token ids that they hold."""
        return len(self.logit_bias) + sum(map(len, self.bad_words)) + len(self.allowed_ids or ())

    def require_ids(self, vocab_size: int) -> None:
        """Raises RequestError 400 `token_out_of_range`, about the field on the wire, for ids beyond the vocabulary."""
        require_ids([token for token, _ in self.logit_bias], "logit_bias", vocab_size)
        require_ids([token for word in self.bad_words for token in word], "bad_words", vocab_size)
        require_ids(self.allowed_ids or (), "allowed_token_ids", vocab_size)


def _in_range(name: str, found: float, least: float, most: float) -> None:
    if not least <= found <= most:  # NaN compares false with everything
        raise SamplingError(f"{name} is {found!r}; expected {least:g} to {most:g}")


def _at_most(name: str, found: int, most: int, what: str) -> None:
    if found > most:
        raise SamplingError(f"{name} has {found} {what}; expected at most {most}")


_MAX_SHARED: Final = 1 << 17
_shared: Final[dict[int, int]] = {}


def _lean(tokens: Iterable[int]) -> tuple[int, ...]:
    """The same ids, those below `_MAX_SHARED` as objects that all requests share: 8 bytes each in place of 36.

    What is shared stays: at most 15 MB.
    """
    return tuple([_shared.setdefault(token, int(token)) if token < _MAX_SHARED else token for token in tokens])


def _ids(name: str, tokens: Sequence[int]) -> None:
    if tokens and min(tokens) < 0:
        raise SamplingError(f"{name} has token id {min(tokens)}; expected 0 or more")


PLAIN = ProcessorOptions()
"""No rule."""


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


def bad_word_ids(encode: Callable[[str], list[int]], words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word, and of the word after a space where that is another first token of as many, as in vLLM.

    encode: without special tokens.
    """
    found: list[list[int]] = []
    for word in words:
        stem = word.lstrip()
        plain = encode(stem or word)  # white space as it is
        spaced = encode(" " + stem) if stem else []
        if plain:
            found.append(plain)
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            found.append(spaced)
    return found
