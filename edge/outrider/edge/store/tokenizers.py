"""Gets the tokenizer of a server's target, for drafts that have another one, and keeps it in the user's cache."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outrider.edge.link.downloads import DraftClient
from outrider.edge.store.shelf import KEY_CHARS
from outrider.models.cache_folder import default_cache_dir
from outrider.models.client.client import ClientOptions
from outrider.models.errors import BundleError, CloudError, OutriderError, RequestError, TokenizerError
from outrider.models.text.tokenizer import TOKENIZER_FILES, Tokenizer
from outrider.models.wire.protocol import OfferedFile

MAX_BYTES: Final = 64 << 20
"""Of all files. The largest tokenizer.json known has 33 MB."""
TIMEOUT_S: Final = 60.0
_WANTED: Final = (*TOKENIZER_FILES, "config.json")


async def target_tokenizer(clouds: Sequence[tuple[str, ClientOptions]], fingerprint: str) -> Tokenizer:
    """The tokenizer with this fingerprint: from the cache, else from the first of these servers that shares it.

    Raises BundleError where none does, or what comes is not that tokenizer.
    """
    reasons: list[str] = []
    for url, options in clouds:
        async with DraftClient(url, options) as client:
            try:
                return await fetch_tokenizer(client, fingerprint)
            except (CloudError, RequestError, BundleError) as error:
                reasons.append(str(error))
    raise BundleError(
        f"the draft has another tokenizer than the target, so the target's is needed, and no server gives it "
        f"({'; '.join(reasons)}). Give its directory with --tokenizer, or take a draft with the target's tokenizer"
    )


def named_tokenizer(directory: Path, fingerprint: str, target: str) -> Tokenizer:
    """The tokenizer in a directory that the user names. Raises TokenizerError, also if it is not that of the target."""
    found = Tokenizer.from_dir(directory)
    if found.fingerprint != fingerprint:
        raise TokenizerError(
            f"--tokenizer {directory} is tokenizer {found.fingerprint[:12]}, that of {target} is {fingerprint[:12]}; "
            "name the directory that the target was exported from"
        )
    return found


def _kept(place: Path, fingerprint: str) -> Tokenizer | None:
    try:
        found = Tokenizer.from_dir(place)
        return found if found.fingerprint == fingerprint else None
    except OutriderError:
        return None  # not here, or damaged: it is fetched again


async def fetch_tokenizer(client: DraftClient, fingerprint: str) -> Tokenizer:
    """The tokenizer of a server's target, from the cache if it is there.

    Raises BundleError for what is not that tokenizer, CloudError and RequestError where the server does not give it.
    """
    place = default_cache_dir() / "tokenizers" / fingerprint[:KEY_CHARS]
    if (kept := await asyncio.to_thread(_kept, place, fingerprint)) is not None:
        return kept
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _fetch(client, fingerprint, place)
    except TimeoutError:
        raise CloudError(f"{client.url} did not send its tokenizer within {TIMEOUT_S:g} s; try again") from None


async def _fetch(client: DraftClient, fingerprint: str, place: Path) -> Tokenizer:
    listed = await client.tokenizer_files()
    files = [file for file in listed.files if file.path in _WANTED]
    if (size := sum(file.size for file in files)) > MAX_BYTES:
        raise BundleError(f"the tokenizer at {client.url} has {size} bytes; at most {MAX_BYTES} are taken")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as folder:
        for file in files:
            (Path(folder) / file.path).write_bytes(await _content(client, file))
        found = await asyncio.to_thread(_kept, Path(folder), fingerprint)
        if found is None:
            raise BundleError(f"what {client.url} shares is not the tokenizer {fingerprint[:12]} of its target")
        place.mkdir(exist_ok=True)
        for file in files:  # each whole; another process may do the same
            (Path(folder) / file.path).replace(place / file.path)
    return Tokenizer.from_dir(place)


async def _content(client: DraftClient, file: OfferedFile) -> bytes:
    async with client.tokenizer_file(file) as (_, pieces):
        content = b"".join([piece async for piece in pieces])
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise BundleError(f"{file.path} of the tokenizer at {client.url} arrived damaged; try again")
    return content
