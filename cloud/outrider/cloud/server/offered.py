"""Finds the drafts that a server offers for its target: bundles in the directory of `--drafts`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from outrider.cloud.api.state import DraftFiles
from outrider.models.bundle.bundle import Bundle, hash_file
from outrider.models.bundle.manifest import MANIFEST_NAME
from outrider.models.counted import counted
from outrider.models.errors import BundleError, ConfigError
from outrider.models.visible import visible
from outrider.models.wire.protocol import DRAFT_NAME, OfferedDraft, OfferedFile

_log = logging.getLogger("outrider.cloud")

JUDGED_AT: Final = 0.8
"""The temperature whose acceptance judges a draft, as on its card."""
MAX_LIST_BYTES: Final = 1 << 17
"""Of the list as JSON: a device reads no more than twice that."""


def find_offered(directory: Path, tokenizer: str, target: str) -> tuple[DraftFiles, ...]:
    """The drafts in `directory`, each in a directory of its own, that have this tokenizer's fingerprint.

    `directory` may be one bundle itself. Every file is checked against its hash. What is left out is logged with the
    reason. target: the target's name, for acceptance rates. Raises ConfigError where there is no such directory, or
    too many drafts.
    """
    if not directory.is_dir():
        raise ConfigError(f"--drafts {directory} is not a directory; expected one that holds draft bundles")
    directory = directory.resolve()
    found = []
    for root in _bundles(directory):
        try:
            found.append(_offer(root, tokenizer, target))
        except BundleError as error:
            _log.warning("draft %s is not offered: %s", visible(root.name), visible(str(error)))
    size = sum(len(each.entry.model_dump_json()) for each in found)
    if size > MAX_LIST_BYTES:
        raise ConfigError(
            f"--drafts {directory} has {len(found)} drafts, whose list is {size} bytes long; at most {MAX_LIST_BYTES} "
            "are allowed: offer fewer drafts"
        )
    names = ", ".join(each.entry.name for each in found) or "none"
    _log.info("%s offered: %s", f"{counted(len(found), 'draft')} {'is' if len(found) == 1 else 'are'}", names)
    return tuple(found)


def _bundles(directory: Path) -> Iterator[Path]:
    if (directory / MANIFEST_NAME).is_file():
        yield directory
        return
    yield from sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))


def _offer(root: Path, tokenizer: str, target: str) -> DraftFiles:
    """Raises BundleError for what is not to be offered."""
    if root.is_symlink():
        raise BundleError("it is a link; move the bundle here")
    if not re.fullmatch(DRAFT_NAME, root.name):
        raise BundleError("a draft's directory needs a name of up to 100 letters, digits, '.', '_' and '-'; rename it")
    manifest = Bundle.open(root, verify=False).manifest
    if manifest.role != "draft":
        raise BundleError(f"it is a {manifest.role} bundle; expected a draft")
    if manifest.tokenizer_fingerprint != tokenizer:
        raise BundleError(
            f"its tokenizer is {manifest.tokenizer_fingerprint[:12]}, the target's is {tokenizer[:12]}; export a draft "
            "for this target"
        )
    Bundle.open(root)  # after what is cheap: this reads all files
    own = root / MANIFEST_NAME
    files = [OfferedFile(path=MANIFEST_NAME, size=own.stat().st_size, sha256=hash_file(own))]
    files += [OfferedFile(path=each.path, size=each.size, sha256=each.sha256) for each in manifest.files]
    judged = [m.rate for m in manifest.report.acceptance if m.target == target and m.temperature == JUDGED_AT]
    entry = OfferedDraft(
        name=root.name,
        model=manifest.name,
        device=manifest.device,
        runtime=manifest.runtime,
        precision=manifest.precision,
        size_bytes=sum(file.size for file in files),
        acceptance=judged[0] if judged else None,
        files=files,
    )
    return DraftFiles(entry, root, {file.path: file for file in files})
