"""Checks draft bundles: manifest, digests, tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.edge.doctor.findings import Finding, fault, ok, warning
from outrider.models.bundle import Bundle
from outrider.models.errors import OutriderError
from outrider.models.manifest import MANIFEST_NAME
from outrider.models.reference_export import REFERENCE

MAX_DEPTH: Final = 5
MAX_BUNDLES: Final = 12
"""So many of the cache are read whole; further ones are only counted."""


@dataclass(frozen=True, slots=True)
class CheckedBundle:
    """A bundle, if it is intact, and what was found."""

    finding: Finding
    bundle: Bundle | None = None

    @property
    def size_bytes(self) -> int:
        """Of its files."""
        return sum(entry.size for entry in self.bundle.manifest.files) if self.bundle is not None else 0


def check_bundle(path: Path, *, is_used: bool) -> CheckedBundle:
    """Reads and hashes a draft bundle. is_used: a damaged one is a fault; in the cache only it is a warning."""
    name = "draft" if is_used else "bundle"
    report = fault if is_used else warning
    try:
        bundle = Bundle.open(path)
        manifest = bundle.manifest
        if manifest.role != "draft":
            advice = "name a draft, as outrider-export writes it"
            return CheckedBundle(report(name, f"{path} is a {manifest.role} bundle; expected a draft", advice))
        bundle.tokenizer()
    except OutriderError as error:
        problem, _, advice = str(error).rpartition("; ")
        return CheckedBundle(report(name, problem or advice, advice if problem else "export or copy it again"))
    except OSError as error:
        return CheckedBundle(report(name, f"{path} cannot be read ({error.strerror})", "correct its permissions"))
    made = f"{manifest.runtime} on {manifest.device}, {manifest.precision}"
    found = f"{manifest.name} at {path}: intact, {len(manifest.files)} files, for {made}"
    return CheckedBundle(ok(name, found), bundle)


def cached_drafts(cache: Path) -> list[Path]:
    """Directories of draft bundles below the cache, sorted; nothing is hashed."""
    found: list[Path] = []
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
                found.append(Path(folder))
    return found


class Bundles:
    """The draft in use and those in the cache. Run `findings` first."""

    def __init__(self, draft: str, cache: Path) -> None:
        self._draft = draft
        self._cache = cache
        self.intact: list[CheckedBundle] = []
        self.is_broken = False

    def findings(self) -> Iterator[Finding]:
        """One for each bundle."""
        is_reference = self._draft == REFERENCE
        named = None if is_reference else Path(self._draft).expanduser()
        if named is not None:
            yield from self._check(named, is_used=True)
        cached = [path for path in cached_drafts(self._cache) if named is None or path.resolve() != named.resolve()]
        for path in cached[:MAX_BUNDLES]:
            yield from self._check(path, is_used=False)
        if len(cached) > MAX_BUNDLES:
            yield ok("bundle", f"{len(cached) - MAX_BUNDLES} more in {self._cache} were not read")
        if is_reference and not self.intact:
            yield ok("draft", "the reference draft; it is exported when it is first used")

    def for_tokenizer(self, fingerprint: str | None) -> CheckedBundle | None:
        """The draft in use: the named one, or of the reference drafts the first that fits."""
        if self._draft != REFERENCE:
            return None if self.is_broken else next(iter(self.intact), None)
        fits = [
            each
            for each in self.intact
            if each.bundle is not None
            and (fingerprint is None or each.bundle.manifest.tokenizer_fingerprint == fingerprint)
        ]
        return next(iter(fits), None)

    def _check(self, path: Path, *, is_used: bool) -> Iterator[Finding]:
        checked = check_bundle(path, is_used=is_used)
        if checked.bundle is not None:
            self.intact.append(checked)
        elif is_used:
            self.is_broken = True
        yield checked.finding
