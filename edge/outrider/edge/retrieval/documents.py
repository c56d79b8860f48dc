"""Reads the documents of a directory: UTF-8 text, bounded in size and number. Cuts documents into passages.

What cannot be read is left out and named once. Links that lead out of the directory are not followed, and no link to a
directory is. Hidden files are left out: they often hold keys.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.models.cache_folder import expanded
from outrider.models.errors import ConfigError

DOCS_TOKENS: Final = 512
"""Tokens of passages in one prompt, at most, where nobody says otherwise."""
SUFFIXES: Final = (
    *(".md", ".markdown", ".txt", ".text", ".rst"),
    *(".py", ".pyi", ".js", ".ts", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".java", ".kt", ".rb", ".rs"),
    *(".sh", ".sql", ".swift"),
)
"""Text, Markdown and program text. Not configuration files, which often hold keys."""


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """max_files: documents. max_file_bytes: of one. max_total_bytes: of all. max_entries: names that are looked at."""

    max_files: int = 2000
    max_file_bytes: int = 1 << 20
    max_total_bytes: int = 1 << 26
    max_entries: int = 100_000


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its name: a path below the directory, with "/", or what a request calls it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents in the order of their names. left_out: one sentence for each kind of what is missing."""

    documents: tuple[Document, ...]
    left_out: tuple[str, ...] = ()


class _Unfit(Exception):
    """Why a file is left out."""


def read_documents(root: Path, limits: DocumentLimits | None = None) -> Documents:
    """The documents below `root`. Raises ConfigError where it is no directory, or has no document."""
    limits = limits or DocumentLimits()
    try:
        inside = expanded(root).resolve(strict=True)
    except OSError as error:
        raise ConfigError(f"the documents' directory {root} cannot be read: {error.strerror}") from None
    if not inside.is_dir():
        raise ConfigError(f"{root} is no directory; give --docs the directory of the documents")
    found: list[Document] = []
    unfit: dict[str, list[str]] = {}
    num_bytes = 0
    for path in _candidates(inside, limits, unfit):
        name = path.relative_to(inside).as_posix()
        try:
            if len(found) >= limits.max_files:
                raise _Unfit(f"more than {limits.max_files} files")
            content = _read(path, inside, limits.max_file_bytes)
            if num_bytes + len(content) > limits.max_total_bytes:
                raise _Unfit(f"more than {limits.max_total_bytes >> 20} MiB in all")
            found.append(Document(name, _decoded(content)))
            num_bytes += len(content)
        except _Unfit as reason:
            unfit.setdefault(str(reason), []).append(name)
    left_out = tuple(_sentence(reason, names) for reason, names in unfit.items())
    if not found:
        why = f" ({left_out[0]})" if left_out else ""
        raise ConfigError(
            f"{root} has no document{why}; expected UTF-8 files that end in .md, .txt or the suffix of a program text"
        )
    return Documents(tuple(found), left_out)


def _candidates(inside: Path, limits: DocumentLimits, unfit: dict[str, list[str]]) -> Iterator[Path]:
    """Files with a fitting name, sorted; directories that cannot be listed are named."""
    num_seen = 0

    def on_error(error: OSError) -> None:
        name = Path(error.filename or "?")
        unfit.setdefault(error.strerror or "unreadable", []).append(
            name.relative_to(inside).as_posix() if name.is_relative_to(inside) else name.name
        )

    for folder, folders, files in os.walk(inside, onerror=on_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        num_seen += 1
        for name in sorted(files):
            num_seen += 1
            if num_seen > limits.max_entries:
                unfit.setdefault(f"more than {limits.max_entries} files and directories to look at", []).append(name)
                return
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield Path(folder) / name


def _read(path: Path, inside: Path, max_bytes: int) -> bytes:
    """The file's bytes. Raises _Unfit."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(inside):
            raise _Unfit("links that lead out of the directory")
        if any(part.startswith(".") for part in real.relative_to(inside).parts):
            raise _Unfit("links to hidden files")
        # Opened first and judged then: what has been judged by name could be replaced before it is opened. Without
        # waiting: nobody may ever write to a pipe.
        handle = os.open(real, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | _BINARY)
        with os.fdopen(handle, "rb") as file:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise _Unfit("no regular files")
            content = file.read(max_bytes + 1)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise _Unfit(getattr(error, "strerror", None) or "unreadable") from None
    if len(content) > max_bytes:
        raise _Unfit(f"larger than {max_bytes >> 10} KiB")
    return content


_BINARY: Final = getattr(os, "O_BINARY", 0)


def _decoded(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _Unfit("not UTF-8") from None
    if "\0" in text:
        raise _Unfit("not text")
    return text.replace("\r\n", "\n")


_MAX_NAMED: Final = 5


def _sentence(reason: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"left out, {reason}: {', '.join(names[:_MAX_NAMED])}{more}"


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
