"""Exports the reference pair once per machine, into the user's cache; the demo starts from it.

The directory's name is a hash of everything that decides the bytes, so another model, option or version has another
directory, and nothing is ever stale.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from outrider.export.make.build import package_versions
from outrider.export.make.pair import PairPaths, export_pair, reference_directories
from outrider.export.progress import Progress, silent
from outrider.export.recipes import ExportOptions, RuntimeName
from outrider.export.source.model_source import read_source
from outrider.models.bundle import Bundle
from outrider.models.errors import BundleError
from outrider.models.manifest import SCHEMA_VERSION, Device, Precision, StaticShapes
from outrider.models.places import default_cache_dir


def export_reference_pair(
    cache_dir: str | Path | None = None,
    *,
    widen_mb: float | None = None,
    target_precision: Precision = "fp32",
    draft_precision: Precision | None = None,
    draft_device: Device = "cpu",
    draft_runtime: RuntimeName | None = None,
    draft_shapes: StaticShapes | None = None,
    source: PairPaths | None = None,
    progress: Progress = silent,
) -> PairPaths:
    """The bundles of the reference pair (or of `source`), exported if this cache has no intact ones.

    Safe to call from several processes at once: one exports, the others wait and use the result. `progress`
    is not called when the cache has them. draft_precision, draft_runtime, draft_shapes (of a draft for an NPU): None
    takes the device's default. Raises what `export_pair` raises.
    """
    directories = source or reference_directories()
    draft_options = ExportOptions(
        "draft", draft_precision, draft_runtime, device=draft_device, static_shapes=draft_shapes, overwrite=True
    )
    target_options = ExportOptions("target", target_precision, widen_mb=widen_mb, overwrite=True)
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    place = root / "pairs" / _key(directories, draft_options, target_options)
    place.parent.mkdir(parents=True, exist_ok=True)
    pair = PairPaths(place / "draft", place / "target")
    # The system drops the lock of a process that is killed; the small file stays.
    with FileLock(place.with_suffix(".lock")):
        if not _is_intact(pair):
            export_pair(
                directories.draft,
                directories.target,
                place,
                draft_options=draft_options,
                target_options=target_options,
                progress=progress,
            )
    return pair


def _key(directories: PairPaths, *options: ExportOptions) -> str:
    what = {
        "schema": SCHEMA_VERSION,
        "sources": [
            read_source(path).describe().model_dump() | {"tokenizer": read_source(path).tokenizer.fingerprint}
            for path in (directories.draft, directories.target)
        ],
        "options": [repr(replace(option, num_threads=0)) for option in options],
        "versions": package_versions(),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _is_intact(pair: PairPaths) -> bool:
    try:
        Bundle.open(pair.draft)
        Bundle.open(pair.target)
    except BundleError:
        return False  # absent, or damaged: exported again over what is there
    return True
