"""Exports the reference pair once per machine, into the user's cache; the demo starts from it.

A directory's name is a hash of everything that decides the bytes, so another model, option or version has another
directory, and nothing is ever stale. A target is exported once, whichever drafts are exported for it. What nobody asked
for in a while is removed when another pair is exported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from outrider.export.make.build import package_versions
from outrider.export.make.pair import DEFAULT_OPTIONS, PairOptions, PairPaths, export_draft_for, reference_directories
from outrider.export.make.pipeline import export_model
from outrider.export.make.stage_store import discard
from outrider.export.progress import Progress, silent
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import identify
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import SCHEMA_VERSION, Precision
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError

_FORGOTTEN_AFTER_S: Final = 60 * 24 * 3600.0
"""A pair that nobody asked for in this time is most likely of versions that are no longer installed."""


def export_reference_pair(
    cache_dir: str | Path | None = None,
    *,
    widen_mb: float | None = None,
    target_precision: Precision = "fp32",
    draft: ExportOptions = DEFAULT_OPTIONS.draft,
    source: PairPaths | None = None,
    progress: Progress = silent,
) -> PairPaths:
    """The bundles of the reference pair (or of `source`), exported if this cache has no intact ones.

    Safe to call from several processes at once: one exports, the others wait and use the result. `progress`
    is not called when the cache has them. draft: how the draft is exported. Raises what `export_model` and
    `export_draft_for` raise.
    """
    directories = source or reference_directories()
    target = ExportOptions("target", target_precision, widen_mb=widen_mb, overwrite=True)
    options = PairOptions(replace(draft, overwrite=True), target)
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    place = root / "pairs" / _key(directories.target, options.target)
    pair = PairPaths(place / _key(directories.draft, options.draft) / "draft", place / "target")
    with contextlib.suppress(OSError):  # not there yet, or another user's
        os.utime(place)  # before the look at it, so that nobody removes it meanwhile
    if _is_intact(pair.draft) and _is_intact(pair.target):
        return pair
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place.with_suffix(".lock"))  # the system drops it if this process is killed; the small file stays
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        print("Another process is exporting the reference pair; waiting for it.", file=sys.stderr, flush=True)
        held = lock.acquire()
    with held:
        _forget_others(place)  # first: it makes room
        for damaged in (pair.target, pair.draft):
            if not _is_intact(damaged):
                with contextlib.suppress(OSError):  # not to be written: the export says so
                    discard(damaged)  # this cache's own, and no bundle to a writer where the manifest is damaged
        if not _is_intact(pair.target):
            export_model(directories.target, pair.target, options.target, progress)
        if not _is_intact(pair.draft):
            made = Bundle.open(pair.target)
            export_draft_for(made, directories.target, directories.draft, pair.draft, options, progress)
    return pair


def _forget_others(place: Path) -> None:
    """Removes old pairs beside this one: each upgrade of a tool makes another, of hundreds of megabytes."""
    oldest = time.time() - _FORGOTTEN_AFTER_S
    for other in place.parent.iterdir():
        with contextlib.suppress(OSError):  # another process was faster, or it is another user's
            if other == place or not other.is_dir() or other.stat().st_mtime >= oldest:
                continue
            key = other.name.strip(".").partition(".")[0]  # also of what a killed process has begun to remove
            with contextlib.suppress(Timeout), FileLock(place.with_name(f"{key}.lock"), timeout=0):
                if other.stat().st_mtime < oldest:
                    discard(other)


def _key(directory: Path, options: ExportOptions) -> str:
    source, fingerprint = identify(directory)
    # One key for a default and for its name.
    named = replace(options, runtime=options.resolved_runtime, precision=options.resolved_precision, num_threads=0)
    what = {
        "schema": SCHEMA_VERSION,
        "source": source.model_dump() | {"tokenizer": fingerprint},
        "options": repr(named),
        "versions": package_versions(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _is_intact(bundle: Path) -> bool:
    try:
        Bundle.open(bundle)
    except BundleError:
        return False  # absent, or damaged: exported again over what is there
    return True
