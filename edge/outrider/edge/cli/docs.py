"""Reads and indexes the documents of `--docs`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from outrider.edge.retrieval.documents import read_documents
from outrider.edge.retrieval.grounding import Library
from outrider.edge.retrieval.index import PassageIndex, default_index_cache
from outrider.models.process.command_line import print_line
from outrider.models.text.tokenizer import Tokenizer


def open_library(docs: Path, tokenizer: Tokenizer, about: Console) -> Library:
    """Reads and indexes the documents; says what is left out. Raises ConfigError, and RuntimeUnavailable."""
    found = read_documents(docs)
    index = PassageIndex(found.documents, default_index_cache())
    for sentence in found.left_out:
        print_line(about, f"documents {sentence}", "yellow")
    how = "read from the cache" if index.was_cached else "made"
    print_line(
        about, f"documents: {len(found.documents)}, in {len(index.passages)} passages; the index was {how}", "dim"
    )
    return Library(index, tokenizer)
