"""Cuts text into the words that passages are found by."""

from __future__ import annotations

import re
from typing import Final

_WORD: Final = re.compile(r"[^\W_]+")
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Scripts that put no blanks between words: pairs of characters stand for words.
_UNSPACED: Final = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_MAX_CHARS: Final = 40
_COMMON: Final = frozenset(
    word
    for line in (
        "a an and are as at be by can do does for from has have how i if in into is it its me my no not of on or so",
        "that the their them then there these they this to was we what when where which who why will with you your",
    )
    for word in line.split()
)


def words_of(text: str) -> list[str]:
    """Lower-case words, with the parts of names such as `max_tokens` and `maxTokens`; very common ones left out."""
    found: list[str] = []
    for match in _WORD.finditer(text):
        for part in _HUMP.split(match[0]):
            found += _words(part.casefold())
    return [word for word in found if word not in _COMMON]


def _words(part: str) -> list[str]:
    words: list[str] = []
    at = 0
    for run in _UNSPACED.finditer(part):
        words.append(part[at : run.start()])
        script = run[0]
        words += [script[index : index + 2] for index in range(max(1, len(script) - 1))]
        at = run.end()
    words.append(part[at:])
    return [word[:_MAX_CHARS] for word in words if word]
