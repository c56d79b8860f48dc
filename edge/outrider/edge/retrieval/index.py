"""Finds passages by their words (BM25, with the library bm25s); keeps an index in the user's cache, by content.

The cache holds words and scores, no document: passages are cut from the documents again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.edge.retrieval.documents import PASSAGE_CHARS, Document, Passage, cut_passages
from outrider.models.cache_folder import default_cache_dir
from outrider.models.process.extras import require_packages

_WORD: Final = re.compile(r"[^\W_]+")
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Scripts that put no blanks between words: pairs of characters stand for words.
_UNSPACED: Final = re.compile(r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+)")
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
    parts = (part.casefold() for match in _WORD.finditer(text) for part in _HUMP.split(match[0]))
    return [word for part in parts for word in _words(part) if word not in _COMMON]


def _words(part: str) -> list[str]:
    words: list[str] = []
    for index, piece in enumerate(_UNSPACED.split(part)):  # every second one is of such a script
        words += [piece[at : at + 2] for at in range(max(1, len(piece) - 1))] if index % 2 else [piece]
    return [word[:_MAX_CHARS] for word in words if word]


_log = logging.getLogger(__name__)

_FORMAT: Final = 1
_MAX_KEPT: Final = 8
"""Indexes in the cache; the one used longest ago gives way."""


class PassageIndex:
    """The passages of documents, found by words. Immutable: threads can share one.

    cache: where indexes are kept; None keeps none. Raises RuntimeUnavailable without bm25s.
    """

    def __init__(self, documents: Sequence[Document], cache: Path | None = None) -> None:
        require_packages(["bm25s"], "finding passages in documents", "docs")
        self.documents = tuple(documents)
        self.passages = [passage for index, each in enumerate(documents) for passage in cut_passages(each, index)]
        place = cache / content_hash(documents) if cache is not None else None
        self._scorer: Any = _load(place, len(self.passages)) if place is not None and place.is_dir() else None
        self.was_cached = self._scorer is not None
        if self._scorer is None:
            self._scorer = _build(self.passages)
            if place is not None and self._scorer is not None:
                _save(self._scorer, place)

    def search(self, query: str, most: int) -> list[Passage]:
        """The passages that share words with the query, best first, at most `most`."""
        words = list(dict.fromkeys(words_of(query)))
        if self._scorer is None or not words:
            return []
        scores = self._scorer.get_scores(words)
        # Stable, so that equal scores come in the documents' order on every machine.
        order = np.argsort(-scores, kind="stable")[:most]
        return [self.passages[index] for index in order if scores[index] > 0.0]


def default_index_cache() -> Path:
    """Where indexes are kept."""
    return default_cache_dir() / "documents"


def content_hash(documents: Sequence[Document]) -> str:
    """Equal for equal documents, and for the same way to index them."""
    digest = hashlib.sha256(f"{_FORMAT} {version('bm25s')} {PASSAGE_CHARS}".encode())
    for document in documents:
        for part in (document.name, document.text):
            # A file's name may be no UTF-8.
            digest.update(hashlib.sha256(part.encode("utf-8", "surrogateescape")).digest())
    return digest.hexdigest()[:32]


def _build(passages: Sequence[Passage]) -> Any:
    """A scorer; None where no passage has a word."""
    import bm25s

    words = [words_of(f"{passage.name}\n{passage.text}") for passage in passages]
    if not any(words):
        return None
    scorer = bm25s.BM25(backend="numpy")
    scorer.index(words, show_progress=False)
    return scorer


def _save(scorer: Any, place: Path) -> None:
    """Keeps an index: under another name first. A full disk is no reason to stop."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=place.parent))
        try:
            scorer.save(partial, show_progress=False)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        kept = sorted(place.parent.glob("[0-9a-f]*"), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in kept[_MAX_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        _log.info("the index of the documents was not kept: %s", error)


def _load(place: Path, num_passages: int) -> Any:
    """The kept scorer; None where it is damaged."""
    import bm25s

    try:
        scorer = bm25s.BM25.load(place, show_progress=False, backend="numpy")
        scores = scorer.get_scores(["outrider", *list(scorer.vocab_dict)[:1]])
        if scores.shape != (num_passages,) or not np.isfinite(scores).all():
            raise ValueError("its scores are of other passages")
        os.utime(place)
    except (OSError, ValueError, TypeError, LookupError, EOFError, AttributeError) as error:
        _log.info("the kept index is damaged and made anew: %s", error)
        shutil.rmtree(place, ignore_errors=True)
        return None
    return scorer
