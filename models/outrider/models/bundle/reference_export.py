"""Exports the reference pair by the exporter's own command, started as a child process.

For the two commands that need the pair and must not import the exporter: `outrider` (demo, and the default draft of
run) and `outrider-cloud serve reference`. Both ask with the same arguments, so the pair is exported once. Where it is
then is noted in the cache, because the exporter takes seconds to say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import BundleError
from outrider.models.process import with_parent
from outrider.models.process.child_command import run_child_command

REFERENCE: Final = "reference"
"""The word that stands for the reference pair where a model or a bundle is expected."""
AUTO: Final = "auto"
"""The word for the pulled draft that fits the verifier's target, or else the reference draft."""

WIDENED_MB: Final = 700.0
"""Size of the widened reference target in FP32, 10^6 bytes."""

EXPORTER_PACKAGES: Final = ("outrider.export", "outrider.reference", "torch", "transformers", "optimum", "nncf")
"""The packages that the export needs."""

DEFAULT_VERIFIER_URL: Final = "http://127.0.0.1:8000"
"""Where `outrider-cloud serve` listens and `outrider run` asks, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ReferencePair:
    """Where the two bundles are."""

    draft: Path
    target: Path


def export_reference_pair(
    widen_mb: float = WIDENED_MB,
    draft_device: str = "cpu",
    draft_runtime: str | None = None,
    draft_shapes: StaticShapes | None = None,
) -> ReferencePair:
    """The pair's bundles in the user's cache, exported if they are not there yet; progress on standard error.

    widen_mb: size of the target; 0 leaves it as it is. draft_runtime, draft_shapes: None takes the device's default.
    Raises RuntimeUnavailable where the exporter fails.
    """
    arguments = export_arguments(widen_mb, draft_device, draft_runtime, draft_shapes)
    if (kept := _kept_pair(arguments)) is not None:
        return kept
    place = default_cache_dir()
    print(
        f"The reference pair is looked for in {place}. What is not there is exported, in one to three minutes.",
        file=sys.stderr,
        flush=True,
    )
    printed = run_child_command(
        ["-P", "-m", with_parent.__name__, "outrider.export.cli", *arguments],
        "the reference pair was not exported; the lines above say why",
    )
    places = json.loads(printed)
    note = _note_of(arguments)
    with contextlib.suppress(OSError):  # then the exporter is asked again
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(places | {"made_by": _makers()}), encoding="utf-8")
        part.replace(note)
    return ReferencePair(Path(places["draft"]), Path(places["target"]))


def _kept_pair(arguments: Sequence[str]) -> ReferencePair | None:
    """The pair that `export_arguments` of these packages gave before, if both bundles are intact."""
    try:
        noted = json.loads(_note_of(arguments).read_text(encoding="utf-8"))
        if noted["made_by"] != _makers():
            return None
        pair = ReferencePair(Path(noted["draft"]), Path(noted["target"]))
        os.utime(pair.target.parent)  # the exporter removes what nobody asked for
        Bundle.open(pair.draft)
        Bundle.open(pair.target)
    except (OSError, ValueError, KeyError, TypeError, BundleError):
        return None
    return pair


def _note_of(arguments: Sequence[str]) -> Path:
    name = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:16]
    return default_cache_dir() / "pairs" / f"{name}.json"


def _makers() -> str:
    """What a pair depends on beside its arguments: all installed packages, and the files of the reference models and of
    the exporter, which change without a version in a checkout.
    """
    packages = sorted(f"{each.name} {each.version}" for each in importlib.metadata.distributions())
    specs = [importlib.util.find_spec(name) for name in ("outrider.reference", "outrider.export")]
    roots = [Path(root) for spec in specs if spec is not None for root in spec.submodule_search_locations or ()]
    files = sorted(path for root in roots for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([packages, facts]).encode()).hexdigest()


def export_arguments(
    widen_mb: float, draft_device: str, draft_runtime: str | None, draft_shapes: StaticShapes | None
) -> Sequence[str]:
    """Arguments of `outrider-export` for that pair."""
    arguments = ["pair", REFERENCE, "--cached", "--json", "--widen", f"{widen_mb:g}", "--draft-device", draft_device]
    if draft_runtime is not None:
        arguments += ["--draft-runtime", draft_runtime]
    if draft_shapes is not None:
        arguments += ["--prompt-len", str(draft_shapes.prompt_len), "--response-len", str(draft_shapes.response_len)]
    return arguments
