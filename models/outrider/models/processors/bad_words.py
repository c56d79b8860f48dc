"""Turns words that a text must not have into token sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def bad_word_ids(encode: Callable[[str], list[int]], words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word, and of the word after a space where that is another first token of as many, as in vLLM.

    encode: without special tokens.
    """
    found: list[list[int]] = []
    for word in words:
        plain = encode(word.lstrip())
        spaced = encode(" " + word.lstrip())
        if plain:
            found.append(plain)
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            found.append(spaced)
    return found
