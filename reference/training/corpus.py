"""Reads the text that the reference pair is trained on: the source of the Python standard library.

Every Python installation has it, so nothing is downloaded. Tests, tables of data and other projects' code are left out.
Whole files are held out, chosen by a hash of their name, so that the choice is the same on every machine and cannot be
tuned. Knows nothing of tokens or models.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__", "_bundled",
     "_vendor", "pydoc_data", "msilib"}
)  # fmt: skip
"""Folder names anywhere in a path that hold tests, other projects' code, build products or data."""

EXCLUDED_FILES = frozenset({"html/entities.py", "this.py", "stringprep.py", "__phello__.spam.py"})
"""Single files that are tables of data rather than code."""

HELDOUT_FILES = 28
"""How many whole files are held out."""

HELDOUT_MIN_CHARS = 6_000
HELDOUT_MAX_CHARS = 60_000
"""A held-out file is neither a stub nor a large share of the corpus."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source file: its path below the library's root, with forward slashes, and its text."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The two disjoint halves of the library, each sorted by path."""

    train: tuple[SourceFile, ...]
    heldout: tuple[SourceFile, ...]

    def fingerprint(self) -> str:
        """SHA-256 over every path and text of both halves: equal fingerprints mean equal data."""
        digest = hashlib.sha256()
        for half in (self.train, self.heldout):
            for file in half:
                digest.update(json.dumps([file.path, file.text]).encode())
            digest.update(b"|")
        return digest.hexdigest()


def is_wanted(path: str) -> bool:
    """Whether a file of the library, given by its path below the root, is code worth learning from."""
    parts = PurePosixPath(path).parts
    if any(part in EXCLUDED_FOLDERS or part.startswith("config-") for part in parts[:-1]):
        return False
    return path not in EXCLUDED_FILES and not parts[-1].startswith("_sysconfigdata")


def is_table(text: str) -> bool:
    """Whether a file is a table of data: a character map, or mostly digits and escapes."""
    if "decoding_table" in text or "decoding_map" in text:
        return True
    return sum(character.isdigit() or character == "\\" for character in text) > 0.12 * len(text)


def read_library(root: Path | None = None) -> tuple[SourceFile, ...]:
    """Reads the files worth learning from below `root` (default: the running Python's library), sorted by path.

    Raises `FileNotFoundError` when `root` holds no Python source, as in a Python that ships only byte code.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found: list[SourceFile] = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if not is_wanted(path):
            continue
        try:
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip() and not is_table(text):
            found.append(SourceFile(path, text))
    if not found:
        raise FileNotFoundError(f"no Python source below {root}; expected a library with its .py files")
    return tuple(sorted(found, key=lambda file: file.path))


def path_rank(path: str) -> str:
    """The key that orders files for holding out: SHA-256 of the path, in hexadecimal."""
    return hashlib.sha256(path.encode()).hexdigest()


def split(files: Iterable[SourceFile], num_heldout: int = HELDOUT_FILES) -> Corpus:
    """Holds out the `num_heldout` files of ordinary size whose paths hash lowest; the rest is for training."""
    files = tuple(files)
    eligible = [file for file in files if HELDOUT_MIN_CHARS <= len(file.text) <= HELDOUT_MAX_CHARS]
    chosen = {file.path for file in sorted(eligible, key=lambda file: path_rank(file.path))[:num_heldout]}
    return Corpus(
        train=tuple(file for file in files if file.path not in chosen),
        heldout=tuple(file for file in files if file.path in chosen),
    )


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads and splits the library: the one call that training needs."""
    return split(read_library(root))
