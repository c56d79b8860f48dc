"""Measures how well a draft with another tokenizer than its target's can write the target's text. Runs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.models.bundle.manifest import TokenMapping
from outrider.models.runtimes.base import num_shared
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.text.vocabulary_map import VocabularyMap

_PROBES: Final = {
    "upper case": "a B",
    "line breaks": "a\nb",
    "runs of spaces": "a  b",
    "punctuation": "f(x).y",
    "accents": "a é",
}
"""Texts that a tokenizer gives back, unless it changes what their name says."""
_CHANGES_ELSE: Final = ("some characters",)


def measure_mapping(
    mapping: VocabularyMap, target: Tokenizer, draft: Tokenizer, texts: Sequence[Sequence[int]]
) -> TokenMapping:
    """texts: the target's ids. mapping: of these two tokenizers."""
    kept = share_kept(draft, [target.decode(text) for text in texts])
    changes = tuple(name for name, probe in _PROBES.items() if _given_back(draft, probe) != probe)
    return TokenMapping(
        target_tokenizer=target.fingerprint,
        ids_covered=round(float((mapping.token_of < mapping.num_tokens).mean()), 4),
        text_covered=round(mapping.covered([index for text in texts for index in text]), 4),
        text_kept=round(kept, 4),
        changes=changes or (_CHANGES_ELSE if kept < 1.0 else ()),
    )


def share_kept(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """The share of the texts' characters that encoding and decoding gives back; 1 for no text.

    Of a line that is changed, its beginning and its end count, up to the first change from either side.
    """
    num_kept = num_all = 0
    for line in (line for text in texts for line in text.splitlines(keepends=True)):
        # A tokenizer may drop a space at the very start, and here lines go on with a text: a letter goes before each.
        found = _given_back(tokenizer, "a" + line).removeprefix("a")
        ours, theirs = [*map(ord, line)], [*map(ord, found)]
        from_both_ends = num_shared(ours, theirs) + num_shared(ours[::-1], theirs[::-1])
        num_kept += min(from_both_ends, len(line), len(found))
        num_all += len(line)
    return num_kept / num_all if num_all else 1.0


def _given_back(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
