"""Removes pulled drafts that no server offers any longer, and none that is in use."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from outrider.edge.store.fetch import manifest_of
from outrider.edge.store.shelf import KEY_CHARS, Pulled, Shelf, unused
from outrider.models.wire.offered import DraftList

_REMOVED = ".removed"


def size_of(place: Path) -> int:
    """Bytes of the files below a directory."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def find_outdated(shelf: Shelf, lists: Mapping[str, DraftList]) -> list[Pulled]:
    """The drafts that were pulled for a target of these servers, or from them, and that they offer no longer.

    lists: what each server offers now, by its address. A draft stays where nothing that is offered for its target is
    here in its place, and where it was also pulled for another target from another server.
    """
    offered = {
        (listed.target, manifest_of(draft).sha256[:KEY_CHARS]) for listed in lists.values() for draft in listed.drafts
    }
    drafts = list(shelf.drafts())
    replaced = {target for target, key in offered if any(each.bundle.path.name == key for each in drafts)}
    changed = {url for url, listed in lists.items() if listed.target in replaced}

    def is_outdated(pulled: Pulled) -> bool:
        key = pulled.bundle.path.name
        return bool(pulled.record.targets) and all(
            (target, key) not in offered and (target in replaced or each.server in changed)
            for target, each in pulled.record.targets.items()
        )

    return [each for each in drafts if is_outdated(each)]


def prune(shelf: Shelf, outdated: list[Pulled], note: Callable[[str], None]) -> list[Pulled]:
    """Removes these drafts; those that were removed. note: called with a sentence for each that stays, and why."""
    for left in shelf.root.glob(f".*{_REMOVED}"):
        shutil.rmtree(left, ignore_errors=True)
    return [each for each in outdated if _remove(shelf, each, note)]


def _remove(shelf: Shelf, pulled: Pulled, note: Callable[[str], None]) -> bool:
    place = pulled.bundle.path
    aside = place.with_name(f".{place.name}{_REMOVED}")
    lock = FileLock(shelf.lock(place.name))
    try:
        with lock.acquire(timeout=0), unused(place):
            place.rename(aside)  # at once, so that nobody finds half of it
            shelf.forget(place.name)
    except Timeout:
        note(f"{pulled.words}, stays: another process pulls it.")
        return False
    except OSError as error:  # on Windows, also where a process has it open
        note(f"{pulled.words}, stays: {error.strerror or error}.")
        return False
    with contextlib.suppress(OSError):
        shutil.rmtree(aside)  # what remains goes with the next prune
    return True
