"""Exports the reference pair once per machine, into the user's cache; the demo starts from it.

A directory's name is a hash of everything that decides the bytes, so another model, option or version has another
directory, and nothing is ever stale. A target is exported once, whichever drafts are exported for it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from outrider.export.make.build import package_versions
from outrider.export.make.pair import DEFAULT_OPTIONS, PairOptions, PairPaths, export_draft_for, reference_directories
from outrider.export.make.pipeline import export_model
from outrider.export.progress import Progress, silent
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import read_source
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import SCHEMA_VERSION, Precision
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError


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
        if not _is_intact(pair.target):
            export_model(directories.target, pair.target, options.target, progress)
        if not _is_intact(pair.draft):
            made = Bundle.open(pair.target)
            export_draft_for(made, directories.target, directories.draft, pair.draft, options, progress)
    return pair


def _key(directory: Path, options: ExportOptions) -> str:
    source = read_source(directory)
    # One key for a default and for its name.
    named = replace(options, runtime=options.resolved_runtime, precision=options.resolved_precision, num_threads=0)
    what = {
        "schema": SCHEMA_VERSION,
        "source": source.describe().model_dump() | {"tokenizer": source.tokenizer.fingerprint},
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
