"""Writes bundles atomically: whatever happens, the destination is what it was or the whole new bundle.

Writes to a hidden directory beside the destination; `commit` writes the manifest, flushes everything to the disk and
renames last. An interrupted writer does not touch the destination.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path
from types import TracebackType

from outrider.models.bundle.build_site import BuildSite
from outrider.models.bundle.bundle import Bundle, hash_file, is_finder_file, refuse_unsafe
from outrider.models.bundle.manifest import MANIFEST_NAME, FileEntry, Manifest
from outrider.models.errors import BundleError


class BundleWriter:
    """Builds one bundle; use as a context manager, put files into `directory`, then call `commit` once.

    Leaving the context without a commit removes the hidden directory and the parent directories made for it. Entering
    it removes what killed writers of the same destination left, and puts back a bundle that they had set aside.
    Raises BundleError if the destination exists and `overwrite` is off, or is a directory without a bundle.
    """

    def __init__(self, destination: str | Path, *, overwrite: bool = False) -> None:
        self._destination = Path(destination).absolute()
        self._overwrite = overwrite
        self._site = BuildSite(self._destination)
        self.directory = self._site.path("partial")
        self._made: list[Path] = []  # directories that were missing above the destination, the deepest first
        self._sealed: Manifest | None = None

    def __enter__(self) -> BundleWriter:
        self.check_destination()
        self._made = list(itertools.takewhile(lambda path: not path.exists(), self._destination.parents))
        self._destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self._site.open():
                self.check_destination()
            self.directory.mkdir()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._site.close()
        with contextlib.suppress(OSError):  # stops at the first that is not empty
            for path in self._made:
                path.rmdir()

    def list_files(self) -> tuple[FileEntry, ...]:
        """Size and SHA-256 of every file built so far, sorted by path."""
        paths = sorted(
            path
            for path in self.directory.rglob("*")
            if path.is_file() and path.name != MANIFEST_NAME and not is_finder_file(path)
        )
        names = [path.relative_to(self.directory).as_posix() for path in paths]
        for name in names:
            refuse_unsafe(name, set(names))
        return tuple(
            FileEntry(path=name, size=path.stat().st_size, sha256=hash_file(path))
            for name, path in zip(names, paths, strict=True)
        )

    def seal(self, manifest: Manifest) -> None:
        """Writes the manifest and waits until everything is on the disk: all of a commit that is likely to fail.

        Seal all bundles before the first commit where several belong together. `manifest.files` must be what
        `list_files` gives.
        """
        (self.directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8", newline="\n")
        flush_tree(self.directory)
        self._sealed = manifest

    def commit(self, manifest: Manifest) -> Bundle:
        """Seals the bundle, unless that is done, and renames it to the destination.

        Raises BundleError if a destination that may not be replaced has appeared meanwhile.
        """
        if self._sealed != manifest:
            self.seal(manifest)
        self.check_destination()
        self._site.swap()
        flush(self._destination.parent)
        return Bundle(self._destination, manifest)

    def check_destination(self) -> None:
        """Raises BundleError if the destination exists and may not be replaced."""
        if not self._destination.exists():
            return
        if not self._overwrite:
            raise BundleError(f"{self._destination} exists already; replace it with --overwrite")
        is_empty = self._destination.is_dir() and not any(self._destination.iterdir())
        if not is_empty and not _has_bundle(self._destination):
            raise BundleError(
                f"{self._destination} exists and is not a bundle, so it is not replaced; choose another place"
            )


def _has_bundle(place: Path) -> bool:
    """Whether a bundle's manifest is there, of any version: other programs have a manifest.json of their own."""
    try:
        found = json.loads((place / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    kinds = {"schema_version": int, "tokenizer_fingerprint": str}
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())


def flush_tree(directory: Path) -> None:
    """Waits until a directory and everything in it is on the disk: the rename must come after it."""
    for path in sorted(directory.rglob("*")):
        flush(path)
    flush(directory)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle to flush for a directory
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
