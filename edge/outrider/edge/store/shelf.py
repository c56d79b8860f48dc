"""Keeps pulled drafts in the user's cache, finds the one that fits a server, and marks those in use.

A bundle's directory is named by the hash of its manifest, which covers every file. Beside it lies a record of the
targets that it was pulled for. The mark is a shared lock on the bundle's manifest, which the system drops when a
process ends: no other process removes the draft. On Windows the open file is the mark: its directory cannot be renamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice, place_draft
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import MANIFEST_NAME
from outrider.models.cache_folder import default_cache_dir
from outrider.models.client.address import split_login, verifier_url
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable

if sys.platform != "win32":
    import fcntl

KEY_CHARS: Final = 16


class PulledFor(BaseModel):
    """A target that a draft was pulled for. server: its address; name: the draft's there; at_s: when, Unix time.

    tokenizer: the target's fingerprint; None in records of earlier versions.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    server: Annotated[str, AfterValidator(lambda url: split_login(url)[0])]  # records once held passwords
    name: str
    at_s: float
    tokenizer: str | None = None


class Record(BaseModel):
    """Why a draft is here: the targets that it was pulled for, by identity."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    targets: dict[str, PulledFor] = {}


@dataclass(frozen=True, slots=True)
class Pulled:
    """A draft in the cache. Its files are not yet checked: whoever uses it opens the bundle."""

    bundle: Bundle
    record: Record

    @property
    def words(self) -> str:
        """Its name, and where it came from."""
        latest = max(self.record.targets.values(), key=lambda each: each.at_s, default=None)
        return f"{latest.name}, pulled from {latest.server}" if latest else f"{self.bundle.manifest.name}, pulled"

    def pulled_for(self, target: str | None) -> PulledFor | None:
        """The latest pull for the target."""
        return self.record.targets.get(target or "")

    def latest_s(self, target: str | None) -> tuple[bool, float]:
        """Sorts drafts: those pulled for this target after all others, then by time."""
        mine = self.pulled_for(target)
        times = [each.at_s for each in self.record.targets.values()]
        return mine is not None, mine.at_s if mine is not None else max(times, default=0.0)


@dataclass(frozen=True, slots=True)
class Shelf:
    """The directory of pulled drafts."""

    root: Path = field(default_factory=lambda: default_cache_dir() / "drafts")

    def place(self, sha256: str) -> Path:
        """Where the bundle whose manifest has this hash lies, or will."""
        return self.root / sha256[:KEY_CHARS]

    def lock(self, sha256: str) -> Path:
        """The file to lock while that bundle is pulled, wherever to."""
        return self.root / f".{sha256[:KEY_CHARS]}.lock"

    def note(self, sha256: str, target: str, pulled: PulledFor) -> None:
        """Records a pull. Call it with the lock held."""
        path = self._record_path(self.place(sha256))
        record = _read_record(path)
        text = Record(targets=record.targets | {target: pulled}).model_dump_json(indent=2)
        partial = path.with_suffix(".part")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)

    def forget(self, sha256: str) -> None:
        """Removes the record of a bundle that is removed. Call it with the lock held."""
        self._record_path(self.place(sha256)).unlink(missing_ok=True)

    def drafts(self) -> Iterator[Pulled]:
        """Every draft whose manifest can be read."""
        if not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            if path.is_dir() and re.fullmatch(rf"[0-9a-f]{{{KEY_CHARS}}}", path.name):
                try:
                    yield Pulled(Bundle.open(path, verify=False), _read_record(self._record_path(path)))
                except BundleError:
                    continue  # damaged: `pull` mends it

    def _record_path(self, place: Path) -> Path:
        return place.with_name(f"{place.name}.json")


def find_pulled(
    tokenizer: str, target: str | None, choice: DraftChoice = AS_BUNDLED, shelf: Shelf | None = None
) -> Pulled | None:
    """The pulled draft to use with a server, if there is one that `choice` can run here.

    tokenizer: its fingerprint; target: the identity of what the server serves. Both as `GET /v1/model` has them.
    The last one pulled for this target; else the last one pulled for another target with this tokenizer. Asks the
    runtimes of candidates for their devices; no file is checked.
    """
    return next(iter(find_all_pulled(tokenizer, target, choice, shelf)), None)


def find_all_pulled(
    tokenizer: str, target: str | None, choice: DraftChoice = AS_BUNDLED, shelf: Shelf | None = None
) -> list[Pulled]:
    """As `find_pulled`: all that were pulled for this target, the latest first; else the latest with its tokenizer."""
    fitting = [
        each
        for each in (shelf or Shelf()).drafts()
        if (each.bundle.manifest.tokenizer_fingerprint == tokenizer or each.pulled_for(target) is not None)
        and _can_run(each.bundle, choice)
    ]
    fitting.sort(key=lambda each: each.latest_s(target), reverse=True)
    return [each for each in fitting if each.pulled_for(target) is not None] or fitting[:1]


def find_pulled_from(
    urls: Sequence[str], choice: DraftChoice = AS_BUNDLED, shelf: Shelf | None = None
) -> Pulled | None:
    """The draft that was pulled last from one of these servers, and that `choice` can run here: none is asked."""
    servers = {split_login(verifier_url(url))[0] for url in urls}
    found = [
        (pulled.at_s, each.bundle.path.name, each)
        for each in (shelf or Shelf()).drafts()
        for pulled in each.record.targets.values()
        if pulled.server in servers and _can_run(each.bundle, choice)
    ]
    return max(found)[-1] if found else None


def _can_run(bundle: Bundle, choice: DraftChoice) -> bool:
    try:
        place_draft(bundle.manifest, choice)
    except (ConfigError, RuntimeUnavailable, BundleError):
        return False
    return bundle.manifest.role == "draft"


def _read_record(path: Path) -> Record:
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Record()  # lost: the bundle itself says what it is for


@contextlib.contextmanager
def in_use(place: Path) -> Iterator[None]:
    """Marks the bundle at `place` as in use. One that is missing is not marked: whoever opens it reports that."""
    try:
        descriptor = os.open(place / MANIFEST_NAME, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unused(place: Path) -> Iterator[None]:
    """Keeps other processes from marking the bundle. Raises OSError where one has, or where that is unknown."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(place / MANIFEST_NAME, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, "a running process uses it") from None
        yield
    finally:
        os.close(descriptor)
