"""Cuts documents into passages: whole paragraphs where they are short enough, else whole lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from outrider.edge.retrieval.documents import Document

PASSAGE_CHARS: Final = 800
"""Longest passage. About 200 tokens of English."""
_MEAN_CHARS: Final = 80
_MANY: Final = 64
"""Headings begin passages in so many, and then while the passages have _MEAN_CHARS on average: a document of nothing
but headings would have a hundred thousand."""
_HEADING: Final = re.compile(r"#{1,6} |(?:class|def|async def|fn|func|pub fn|function|impl|struct|interface) ")


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document: the characters from `start` to `end`, the lines `first_line` to `last_line`, from 1.

    document: its index.
    """

    document: int
    name: str
    start: int
    end: int
    first_line: int
    last_line: int
    text: str

    @property
    def where(self) -> str:
        """For people: notes.md, lines 3-9."""
        first, last = self.first_line, self.last_line
        return f"{self.name}, line {first}" if first == last else f"{self.name}, lines {first}-{last}"


def cut_passages(document: Document, index: int = 0, longest: int = PASSAGE_CHARS) -> list[Passage]:
    """The passages of a document, in order; what they leave out is blank. index: of the document."""
    text = document.text
    spans: list[tuple[int, int]] = []
    for start, end in _pieces(text, longest):
        is_heading = len(spans) < _MANY + start // _MEAN_CHARS and _HEADING.match(text, start)
        joins = spans and end - spans[-1][0] <= longest and not is_heading
        if joins:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    passages: list[Passage] = []
    line, at = 1, 0
    for start, end in spans:
        line += text.count("\n", at, start)
        body = text[start:end].rstrip("\n")
        last = line + body.count("\n")
        passages.append(Passage(index, document.name, start, start + len(body), line, last, body))
        at = start
    return passages


def _pieces(text: str, longest: int) -> Iterator[tuple[int, int]]:
    """Paragraphs, those that are too long cut at lines, and lines that are too long cut anywhere."""
    for start, end in _paragraphs(text):
        while end - start > longest:
            cut = text.rfind("\n", start, start + longest) + 1
            if cut <= start:
                cut = start + longest
            if text[start:cut].strip():
                yield start, cut
            start = cut
        if text[start:end].strip():
            yield start, end


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    """Lines in a row that are not blank. In one pass: a pattern would take quadratic time on a long line of blanks."""
    start, at = None, 0
    while at < len(text):
        end = text.find("\n", at) + 1 or len(text)
        if text[at:end].isspace():
            if start is not None:
                yield start, at
                start = None
        elif start is None:
            start = at
        at = end
    if start is not None:
        yield start, at
