"""Puts passages before a prompt, within a budget of tokens, and gives their documents to the draft.

The layout, before the user's own words:

    Passages from documents:

    [1] notes/release.md, lines 3-9
    The text of the passage.

    [2] ...

    End of the passages.

A document cannot speak for others: the spellings of special tokens, such as the end of a turn, are broken up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

from outrider.edge.retrieval.documents import DOCS_TOKENS, Passage
from outrider.edge.retrieval.index import PassageIndex
from outrider.models.runtimes.ngram import QuotedText
from outrider.models.text.tokenizer import Tokenizer

HEAD: Final = "Passages from documents:\n\n"
TAIL: Final = "End of the passages.\n\n"
MAX_PASSAGES: Final = 8
_MAX_FOUND: Final = 24  # passages looked at: shorter ones may fit where a better one does not
_MAX_QUERY_CHARS: Final = 2000  # the end of a long prompt is what is being asked
_MAX_QUOTED: Final = 4  # documents that a text is drafted from
_QUOTED_CHARS: Final = 60_000  # of one of them
_BEFORE_CHARS: Final = 4_000  # of these, those before the passage
_MAX_KEPT: Final = 32  # documents whose tokens are kept


@dataclass(frozen=True, slots=True)
class Grounding:
    """What documents give to one prompt.

    before: text for the prompt's beginning; "" where no passage was found. num_tokens: of it. passages: those in it.
    quoted: documents that the answer may quote: drafted from, never sent.
    """

    before: str = ""
    num_tokens: int = 0
    passages: tuple[Passage, ...] = ()
    quoted: tuple[QuotedText, ...] = ()

    def as_json(self) -> list[dict[str, object]]:
        """The passages as plain data: document, characters, lines."""
        return [
            {
                "document": passage.name,
                "start": passage.start,
                "end": passage.end,
                "first_line": passage.first_line,
                "last_line": passage.last_line,
            }
            for passage in self.passages
        ]


class Library:
    """Indexed documents, and a tokenizer to count with. Threads can share one.

    max_tokens: of the passages of one prompt, headings included.
    """

    def __init__(self, index: PassageIndex, tokenizer: Tokenizer, max_tokens: int = DOCS_TOKENS) -> None:
        self.index = index
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer
        self._special = [
            spelling for each in sorted(tokenizer.special_ids) if (spelling := tokenizer.token(each)) is not None
        ]
        # Without `self`, which would be its own: a request's library goes at once.
        self._quoted_text = lru_cache(_MAX_KEPT)(partial(_quoted_text, index, tokenizer))

    def ground(self, query: str, max_tokens: int | None = None) -> Grounding:
        """Passages for a prompt. max_tokens: where fewer fit than `self.max_tokens`."""
        budget = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        found = self.index.search(query[-_MAX_QUERY_CHARS:], _MAX_FOUND)
        taken: list[Passage] = []
        for passage in found:
            if len(taken) == MAX_PASSAGES:
                break
            if self._count(self._layout([*taken, passage])) <= budget:
                taken.append(passage)
        before = self._layout(taken) if taken else ""
        quoted = self._quoted_of([*taken, *(passage for passage in found if passage not in taken)])
        return Grounding(before, self._count(before) if taken else 0, tuple(taken), quoted)

    def _layout(self, passages: Sequence[Passage]) -> str:
        entries = [
            f"[{number}] {self._plain(passage.where)}\n{self._plain(passage.text)}\n\n"
            for number, passage in enumerate(passages, 1)
        ]
        return "".join([HEAD, *entries, TAIL])

    def _plain(self, text: str) -> str:
        """Text whose tokens are none of the special ones."""
        for spelling in self._special:
            if spelling and spelling in text:
                text = text.replace(spelling, f"{spelling[0]} {spelling[1:]}")
        return text

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def _quoted_of(self, passages: Sequence[Passage]) -> tuple[QuotedText, ...]:
        """The documents of the passages, the best first; of a long one the part around the passage."""
        places: dict[tuple[int, int], None] = {}
        for passage in passages:
            text = self.index.documents[passage.document].text
            is_long = len(text) > _QUOTED_CHARS
            places[passage.document, max(0, passage.start - _BEFORE_CHARS) if is_long else 0] = None
        return tuple(self._quoted_text(*place) for place in list(places)[:_MAX_QUOTED])


def _quoted_text(index: PassageIndex, tokenizer: Tokenizer, document: int, start: int) -> QuotedText:
    text = index.documents[document].text[start : start + _QUOTED_CHARS]
    return QuotedText(tokenizer.encode(text, add_special_tokens=False))
