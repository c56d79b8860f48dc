"""Downloads one bundle: resumes what was interrupted, checks every hash, puts the bundle in place at once.

Files arrive in a hidden directory beside the destination, which becomes the destination by a rename once all are
complete and checked. Nothing of a bundle is executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import AsyncFileLock, Timeout

from outrider.edge.link.downloads import DraftClient
from outrider.edge.store.shelf import KEY_CHARS
from outrider.models.bundle.bundle import DATA_SUFFIXES, Bundle, hash_file, refuse_unsafe
from outrider.models.bundle.bundle_writer import flush, flush_tree
from outrider.models.bundle.manifest import MANIFEST_NAME, Manifest
from outrider.models.client.errors import EndpointLost, EndpointUnfit
from outrider.models.errors import BundleError, CloudError
from outrider.models.wire.offered import OfferedDraft, OfferedFile

MAX_MANIFEST_BYTES: Final = 4 << 20
"""A manifest is read whole. The largest seen has 30 KB."""
MAX_FAILURES: Final = 6
"""Attempts in a row that brought no byte, after which a download is given up."""
FIRST_PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 8.0
LOCK_PAUSE_S: Final = 0.1
_GONE: Final = (404, 410)


@dataclass(slots=True)
class Progress:
    """Bytes that are here of all that the bundle has. on_change: called after every change. note: for sentences."""

    total: int
    on_change: Callable[[int], None] = lambda done: None
    note: Callable[[str], None] = lambda words: None
    done: int = 0

    def add(self, num_bytes: int) -> None:
        """More bytes are here, or fewer."""
        self.done += num_bytes
        self.on_change(self.done)


class BundleFetch:
    """One bundle on its way to `destination`. Hold its lock (`locked`) while it runs.

    tokenizer: the fingerprint that the bundle must have.
    """

    def __init__(
        self,
        client: DraftClient,
        draft: OfferedDraft,
        tokenizer: str,
        destination: Path,
        progress: Progress,
    ) -> None:
        self._client = client
        self._draft = draft
        self._tokenizer = tokenizer
        self._destination = destination
        self._progress = progress
        key = manifest_of(draft).sha256[:KEY_CHARS]
        name = key if destination.name == key else f"{destination.name}.{key}"
        self._partial = destination.with_name(f".{name}.partial")

    async def run(self) -> Bundle:
        """The bundle at the destination. Raises BundleError for what is no such bundle, CloudError where the server
        cannot be had; what has arrived stays for the next attempt.
        """
        manifest_file = manifest_of(self._draft)
        if manifest_file.size > MAX_MANIFEST_BYTES:
            raise BundleError(f"the manifest of {self._draft.name} has {manifest_file.size} bytes; it is not taken")
        self._partial.mkdir(parents=True, exist_ok=True)
        self._require_room()
        await self._fetch(manifest_file)
        manifest = Bundle.open(self._partial, verify=False).manifest
        self._require_announced(manifest)
        self._remove_strangers(manifest)
        for entry in manifest.files:
            await self._fetch(OfferedFile(path=entry.path, size=entry.size, sha256=entry.sha256))
        await asyncio.to_thread(Bundle.open, self._partial)
        await asyncio.to_thread(flush_tree, self._partial)
        self._put_in_place()
        return Bundle(self._destination, manifest)

    def reuse(self) -> None:
        """Takes over the files of a damaged bundle at the destination: those that are intact are not fetched again."""
        if self._partial.exists():
            shutil.rmtree(self._destination)
            return
        self._destination.rename(self._partial)
        sizes = {self._partial / file.path: file.size for file in self._draft.files}
        for path in self._partial.rglob("*"):
            if path.is_file() and path.stat().st_size != sizes.get(path):
                path.unlink()  # a shorter one is not the beginning of the right one

    def _require_room(self) -> None:
        has = sum(path.stat().st_size for path in self._partial.rglob("*") if path.is_file())
        needed, free = self._draft.size_bytes - has, shutil.disk_usage(self._partial).free
        if needed > free:
            raise BundleError(
                f"{self._draft.name} needs {needed / 1e6:,.1f} MB more at {self._destination.parent}, and "
                f"{free / 1e6:,.1f} MB are free; free some space, or choose another disk with --to or OUTRIDER_CACHE"
            )

    def _require_announced(self, manifest: Manifest) -> None:
        """Raises BundleError for a bundle that is not the one in the server's list, before its files are fetched."""
        name = self._draft.name
        if manifest.role != "draft":
            raise BundleError(f"{name} is a {manifest.role} bundle; expected a draft: ask the server's operator")
        if manifest.tokenizer_fingerprint != self._tokenizer:
            raise BundleError(
                f"{name} has the tokenizer {manifest.tokenizer_fingerprint[:12]}, the server's list says "
                f"{self._tokenizer[:12]}: it was made for another target. Ask the server's operator"
            )
        announced = {(file.path, file.size, file.sha256) for file in self._draft.files if file.path != MANIFEST_NAME}
        if announced != {(file.path, file.size, file.sha256) for file in manifest.files}:
            raise BundleError(f"the manifest of {name} lists other files than the server; ask the server's operator")
        listed = {file.path for file in manifest.files}
        for path in sorted(listed):
            refuse_unsafe(path, listed)
            if Path(path).suffix.lower() not in DATA_SUFFIXES:
                raise BundleError(f"{name} has the file {path}, whose format is not allowed; it is not fetched")

    def _remove_strangers(self, manifest: Manifest) -> None:
        """Removes what a damaged bundle had beside its files: the new one would be refused with it."""
        kept = {self._partial / file.path for file in manifest.files} | {self._partial / MANIFEST_NAME}
        for path in self._partial.rglob("*"):
            if path not in kept and not path.is_dir():
                path.unlink()

    async def _fetch(self, file: OfferedFile) -> None:
        """Completes a file; one that is here and whole is only hashed."""
        path = self._partial / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        has = path.stat().st_size if path.is_file() else 0
        is_whole = path.is_file() and has == file.size and await asyncio.to_thread(hash_file, path) == file.sha256
        if has >= file.size and not is_whole:
            path.unlink(missing_ok=True)
            has = 0
        self._progress.add(has)
        if is_whole:
            return
        found = await self._download(file, path)
        if found != file.sha256 and has:
            self._drop(file, path)
            self._progress.note(f"{file.path} is damaged: what was here of it did not belong to it. Fetching it again.")
            found = await self._download(file, path)
        if found != file.sha256:
            self._drop(file, path)
            raise BundleError(
                f"{file.path} of {self._draft.name} arrived damaged: its SHA-256 is {found[:16]}..., announced was "
                f"{file.sha256[:16]}...; this file was removed, the others are kept. Run `outrider pull` again"
            )

    def _drop(self, file: OfferedFile, path: Path) -> None:
        path.unlink()
        self._progress.add(-file.size)

    async def _download(self, file: OfferedFile, path: Path) -> str:
        """Appends to `path` until it has the announced size; gives its hash. Tries again as long as that helps."""
        num_failures = 0
        while True:
            has = path.stat().st_size if path.is_file() else 0
            cause = f"{self._client.url} closed the connection"
            try:
                await self._append(file, path, has)
            except EndpointUnfit:
                raise
            except EndpointLost as lost:
                if lost.status in _GONE:
                    raise CloudError(f"{lost}. Run `outrider pull` again: the server may have another draft") from None
                cause = str(lost)
            now_has = path.stat().st_size if path.is_file() else 0
            if now_has == file.size:
                return await asyncio.to_thread(hash_file, path)
            num_failures = 0 if now_has > has else num_failures + 1
            if num_failures >= MAX_FAILURES:
                raise CloudError(
                    f"the download of {file.path} broke off after {self._progress.done / 1e6:,.1f} of "
                    f"{self._progress.total / 1e6:,.1f} MB: {cause}. Run `outrider pull` again to go on"
                )
            if num_failures <= 1:
                self._progress.note(f"{cause}; going on at {self._progress.done / 1e6:,.1f} MB")
            await asyncio.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2**num_failures))

    async def _append(self, file: OfferedFile, path: Path, has: int) -> None:
        """One attempt."""
        async with self._client.download(self._draft.name, file, has) as (start, pieces):
            with _naming_a_full_disk(self._destination), path.open("ab") as out:
                if start != has:
                    self._progress.add(start - has)
                    out.truncate(start)
                async for piece in pieces:
                    out.write(piece)
                    self._progress.add(len(piece))

    def _put_in_place(self) -> None:
        if self._destination.is_dir() and not any(self._destination.iterdir()):
            self._destination.rmdir()  # Windows renames over nothing
        try:
            self._partial.rename(self._destination)
        except OSError as error:
            raise BundleError(
                f"{self._destination} cannot be made ({error.strerror}): what was fetched stays at {self._partial}. "
                "Choose another place with --to"
            ) from error
        with contextlib.suppress(OSError):  # the rename is done
            flush(self._destination.parent)


def manifest_of(draft: OfferedDraft) -> OfferedFile:
    """The manifest among the draft's files. Raises BundleError where the server lists none."""
    found = next((file for file in draft.files if file.path == MANIFEST_NAME), None)
    if found is None:
        raise BundleError(f"the server lists {draft.name} without {MANIFEST_NAME}; ask the server's operator")
    return found


@contextlib.asynccontextmanager
async def locked(path: Path, note: Callable[[str], None]) -> AsyncIterator[None]:
    """Holds the lock on `path`; waits for another process that has it. The system drops a dead process's lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = AsyncFileLock(path, thread_local=False, run_in_executor=False)
    try:
        await lock.acquire(timeout=0)
    except Timeout:
        note("Another process pulls this draft; waiting for it.")
        await lock.acquire(poll_interval=LOCK_PAUSE_S)
    try:
        yield
    finally:
        await lock.release()


@contextlib.contextmanager
def _naming_a_full_disk(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BundleError(
            f"the disk of {place.parent} is full; free some space and run `outrider pull` again to go on"
        ) from error
