"""Checks draft bundles: manifest, digests, tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.doctor.findings import Finding, Status, from_error, ok, warning
from outrider.edge.doctor.probe import find_pulled_draft
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import MANIFEST_NAME
from outrider.models.bundle.reference_export import AUTO, EXPORTER_PACKAGES, REFERENCE
from outrider.models.cache_folder import expanded
from outrider.models.counted import counted
from outrider.models.errors import OutriderError
from outrider.models.process.extras import is_installed

MAX_DEPTH: Final = 5
MAX_BUNDLES: Final = 12
"""So many of the cache are read whole; further ones are only counted."""
_CHOSEN: Final = (AUTO, REFERENCE)
"""Values of `--draft` that leave the choice to the command."""


def check_bundle(path: Path, *, is_used: bool) -> tuple[Finding, Bundle | None]:
    """Reads and hashes a draft bundle, which is given if it is intact.

    is_used: a damaged one is a fault; in the cache only it is a warning.
    """
    name = "draft" if is_used else "bundle"
    status: Status = "fault" if is_used else "warning"
    try:
        bundle = Bundle.open(path)
        manifest = bundle.manifest
        if manifest.role != "draft":
            return Finding(
                status,
                name,
                f"{path} is a {manifest.role} bundle; expected a draft",
                "name a draft, as outrider-export writes it",
            ), None
        bundle.tokenizer()
    except OutriderError as error:
        return from_error(name, error, status, "export or copy it again"), None
    except OSError as error:
        return Finding(status, name, f"{path} cannot be read ({error.strerror})", "correct its permissions"), None
    made = f"{manifest.runtime} on {manifest.device}, {manifest.precision}"
    return ok(name, f"{manifest.name} at {path}: intact, {counted(len(manifest.files), 'file')}, for {made}"), bundle


def cached_drafts(cache: Path) -> Iterator[Path]:
    """Directories of draft bundles below the cache, sorted; nothing is hashed."""
    for folder, below, files in os.walk(cache):
        depth = len(Path(folder).relative_to(cache).parts)
        below[:] = sorted(name for name in below if depth < MAX_DEPTH and not name.startswith("."))
        if MANIFEST_NAME in files:
            below.clear()
            try:
                is_target = Bundle.open(folder, verify=False).manifest.role == "target"
            except OutriderError:
                is_target = Path(folder).name == "target"
            if not is_target:
                yield Path(folder)


@dataclass(slots=True)
class Bundles:
    """The draft in use and those in the cache. Run `findings` first. draft, choice: the options of the command."""

    draft: str
    cache: Path
    choice: DraftChoice = AS_BUNDLED
    _pulled: dict[tuple[str, str | None], Path | None] = field(default_factory=dict)
    _named: Bundle | None = None
    _cached: list[Bundle] = field(default_factory=list)

    def findings(self) -> Iterator[Finding]:
        """One for each bundle."""
        named = None if self.draft in _CHOSEN else expanded(self.draft)
        if named is not None:
            finding, self._named = check_bundle(named, is_used=True)
            yield finding
        cached = [path for path in cached_drafts(self.cache) if named is None or path.resolve() != named.resolve()]
        for path in cached[:MAX_BUNDLES]:
            finding, bundle = check_bundle(path, is_used=False)
            yield finding
            if bundle is not None:
                self._cached.append(bundle)
        if len(cached) > MAX_BUNDLES:
            yield ok("bundle", f"{len(cached) - MAX_BUNDLES} more in {self.cache} were not read")
        if named is None and not self._cached:
            missing = next((name for name in EXPORTER_PACKAGES if not is_installed(name)), None)
            if missing is not None:
                yield warning(
                    "draft",
                    f"none is here, and the reference draft cannot be exported: {missing} is not installed",
                    "run `outrider pull`",
                )
                return
            yield ok(
                "draft",
                "the reference draft; it is exported when it is first used",
                "`outrider pull` brings one that was made for your server's target" if self.draft == AUTO else "",
            )

    def for_target(self, tokenizer: str | None, target: str | None = None) -> Bundle | None:
        """The draft in use for a target: the named one, the one pulled for it, or the reference draft.

        tokenizer: the target's fingerprint; None: unknown. A draft with another tokenizer shows why nothing fits.
        """
        if self.draft not in _CHOSEN:
            return self._named
        if (pulled := self.pulled_for(tokenizer, target)) is not None:
            return next((each for each in self._cached if each.path == pulled), None)
        exported = [each for each in self._cached if not each.path.is_relative_to(self.cache / "drafts")]
        fitting = (each for each in exported if tokenizer in (None, each.manifest.tokenizer_fingerprint))
        return next(fitting, next(iter(exported), None))

    def pulled_for(self, tokenizer: str | None, target: str | None = None) -> Path | None:
        """The place of the pulled draft that is in use for a target, intact or not."""
        shelf = Shelf(self.cache / "drafts")
        if self.draft != AUTO or tokenizer is None or next(shelf.drafts(), None) is None:
            return None
        if (tokenizer, target) not in self._pulled:
            self._pulled[tokenizer, target] = find_pulled_draft(shelf.root, tokenizer, target, self.choice)
        return self._pulled[tokenizer, target]
