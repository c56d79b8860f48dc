"""Builds the prompt of a text between a prefix and a suffix, where the model has tokens for it (fill in the middle).

Bavarian et al. 2022, arXiv 2207.14255.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.models.http.errors import FieldError
from outrider.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Format:
    """Tokens before the prefix, before the suffix, and after both. is_suffix_first: the suffix comes first."""

    prefix: str
    suffix: str
    middle: str | None
    is_suffix_first: bool = False


_FORMATS: Final = (
    _Format("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Format("[PREFIX]", "[SUFFIX]", None, is_suffix_first=True),  # Codestral
)


def fill_in_prompt(tokenizer: Tokenizer, prefix: str | list[int], suffix: str) -> list[int]:
    """The token ids of a prompt for the text between both. Raises FieldError where the model has no such tokens."""
    for each in _FORMATS:
        ids = [tokenizer.token_id(name) for name in (each.prefix, each.suffix, each.middle) if name is not None]
        known = [index for index in ids if index is not None]
        if len(known) == len(ids):
            break
    else:
        raise FieldError(
            "unsupported_parameter",
            f"suffix is not supported: {tokenizer.name} has no tokens to fill in text, such as <|fim_middle|>; leave "
            "it out",
            param="suffix",
        )
    before = prefix if isinstance(prefix, list) else tokenizer.encode(prefix, add_special_tokens=False)
    after = tokenizer.encode(suffix, add_special_tokens=False)
    first = [tokenizer.bos_token_id] if tokenizer.begins_with_bos and tokenizer.bos_token_id is not None else []
    if each.is_suffix_first:
        return [*first, known[1], *after, known[0], *before]
    return [*first, known[0], *before, known[1], *after, *known[2:]]
