"""Finds what a server offers for download: drafts for its target, bundles in the directory of `--drafts`; and the
target's tokenizer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from outrider.cloud.api.state import DraftFiles, SharedFile
from outrider.models.bundle.bundle import Bundle, hash_file
from outrider.models.bundle.manifest import MANIFEST_NAME
from outrider.models.counted import counted
from outrider.models.errors import BundleError, ConfigError
from outrider.models.text.tokenizer import MAX_SHARED_BYTES, SHARED_FILES, own_file
from outrider.models.visible import visible
from outrider.models.wire.offered import DRAFT_NAME, OfferedDraft, OfferedFile

_log = logging.getLogger("outrider.cloud")

JUDGED_AT: Final = 0.8
"""The temperature whose acceptance judges a draft, as on its card."""
MAX_LIST_BYTES: Final = 1 << 17
"""Of the list as JSON: a device reads no more than twice that."""


def find_offered(directory: Path, tokenizer: str, target: str, *, shares_tokenizer: bool) -> tuple[DraftFiles, ...]:
    """The drafts in `directory`, each in a directory of its own.

    `directory` may be one bundle itself. Every file is checked against its hash. What is left out is logged with the
    reason. tokenizer: fingerprint of the target's. target: the target's name, for acceptance rates. shares_tokenizer:
    devices can download the target's, so drafts with another one are of use to them. Raises ConfigError where there is
    no such directory, or too many drafts.
    """
    if not directory.is_dir():
        raise ConfigError(f"--drafts {directory} is not a directory; expected one that holds draft bundles")
    directory = directory.resolve()
    found = []
    for root in _bundles(directory):
        try:
            found.append(_offer(root, tokenizer, target, shares_tokenizer=shares_tokenizer))
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


def find_tokenizer_files(directory: Path) -> Mapping[str, SharedFile] | None:
    """The files of the tokenizer in `directory` that devices may download, by name.

    None where they are not to be shared, which is logged with the reason: only drafts with another tokenizer need them.
    """
    try:
        places = {name: _place_of(directory, name) for name in SHARED_FILES if (directory / name).is_file()}
        size = sum(place.stat().st_size for place in places.values())
        if size > MAX_SHARED_BYTES:
            raise ConfigError(f"its files have {size} bytes; at most {MAX_SHARED_BYTES} are shared")
        return {name: SharedFile(_listed(name, place), place) for name, place in places.items()}
    except (OSError, ConfigError) as error:
        _log.warning("the target's tokenizer is not shared: %s", visible(str(error)))
        return None


def _place_of(directory: Path, name: str) -> Path:
    """Where the file lies. Raises ConfigError for a link to a place that is not the model's."""
    place = own_file(directory, name)
    if place is None:
        raise ConfigError(f"{name} is a link that leads out of the model's directory; copy the file there")
    return place


def _listed(path: str, place: Path) -> OfferedFile:
    return OfferedFile(path=path, size=place.stat().st_size, sha256=hash_file(place))


def _bundles(directory: Path) -> Iterator[Path]:
    if (directory / MANIFEST_NAME).is_file():
        yield directory
        return
    yield from sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))


def _offer(root: Path, tokenizer: str, target: str, *, shares_tokenizer: bool) -> DraftFiles:
    """Raises BundleError for what is not to be offered."""
    if root.is_symlink():
        raise BundleError("it is a link; move the bundle here")
    if not re.fullmatch(DRAFT_NAME, root.name):
        raise BundleError("a draft's directory needs a name of up to 100 letters, digits, '.', '_' and '-'; rename it")
    manifest = Bundle.open(root, verify=False).manifest
    if manifest.role != "draft":
        raise BundleError(f"it is a {manifest.role} bundle; expected a draft")
    other = manifest.tokenizer_fingerprint if manifest.tokenizer_fingerprint != tokenizer else None
    if other is not None and not shares_tokenizer:
        raise BundleError(
            f"its tokenizer is {other[:12]}, the target's is {tokenizer[:12]} and not shared, so no device could use "
            "it; export a draft for this target"
        )
    Bundle.open(root)  # after what is cheap: this reads all files
    own = root / MANIFEST_NAME
    files = [_listed(MANIFEST_NAME, own)]
    files += [OfferedFile(path=each.path, size=each.size, sha256=each.sha256) for each in manifest.files]
    judged = [m.rate for m in manifest.report.acceptance if m.target == target and m.temperature == JUDGED_AT]
    entry = OfferedDraft(
        name=root.name,
        model=manifest.name,
        device=manifest.device,
        runtime=manifest.runtime,
        precision=manifest.precision,
        tokenizer=other,
        size_bytes=sum(file.size for file in files),
        acceptance=judged[0] if judged else None,
        files=files,
    )
    return DraftFiles(entry, {file.path: SharedFile(file, root / file.path) for file in files})
