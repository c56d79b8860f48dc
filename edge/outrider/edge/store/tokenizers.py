"""Gets the tokenizer of a server's target, for drafts that have another one, and keeps it in the user's cache.

A directory of the cache holds what one list of files says, by the list's hash: the fingerprint does not cover chat
template and end ids, so what one server shares must not serve for another.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from outrider.edge.link.downloads import DraftClient
from outrider.edge.store.shelf import KEY_CHARS
from outrider.models.cache_folder import default_cache_dir
from outrider.models.client.client import ClientOptions
from outrider.models.errors import BundleError, CloudError, RequestError, TokenizerError
from outrider.models.text.tokenizer import MAX_SHARED_BYTES, SHARED_FILES, Tokenizer
from outrider.models.text.vocabulary_map import MAX_IDS
from outrider.models.wire.offered import OfferedFile

TIMEOUT_S: Final = 600.0


async def target_tokenizer(clouds: Sequence[tuple[str, ClientOptions]], fingerprint: str) -> Tokenizer:
    """The tokenizer with this fingerprint, from the first of these servers that shares it; from the cache where all
    connections are lost.

    Raises BundleError where none does, or what comes is not that tokenizer.
    """
    reasons: list[str] = []
    is_lost = True
    for url, options in clouds:
        async with DraftClient(url, options) as client:
            try:
                return await fetch_tokenizer(client, fingerprint)
            except (CloudError, RequestError, BundleError) as error:
                reasons.append(str(error))
                is_lost = is_lost and isinstance(error, CloudError) and getattr(error, "status", None) != 404
    if is_lost and (kept := last_tokenizer(fingerprint)) is not None:
        return kept
    raise BundleError(
        f"the draft has another tokenizer than the target, so the target's is needed, and no server gives it "
        f"({'; '.join(reasons)}). Give its directory with --tokenizer, or take a draft with the target's tokenizer"
    )


async def fetch_tokenizer(client: DraftClient, fingerprint: str) -> Tokenizer:
    """The tokenizer of a server's target; its files come from the cache if they are there.

    Raises BundleError for what is not that tokenizer, CloudError and RequestError where the server does not give it.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _fetch(client, fingerprint)
    except TimeoutError:
        raise CloudError(f"{client.url} did not send its tokenizer within {TIMEOUT_S:g} s; try again") from None
    except OSError as error:
        raise BundleError(f"the tokenizer cannot be kept at {_root()}: {error.strerror or error}") from None


def last_tokenizer(fingerprint: str) -> Tokenizer | None:
    """The one with this fingerprint that was fetched last, from whichever server: for where none answers."""
    places = sorted(_root().glob(f"{fingerprint[:KEY_CHARS]}-*"), key=lambda place: place.stat().st_mtime)
    return next((found for place in reversed(places) if (found := _kept(place, fingerprint)) is not None), None)


def named_tokenizer(directory: Path, fingerprint: str | None, target: str) -> Tokenizer:
    """The tokenizer in a directory that the user names.

    fingerprint: None: the target's is not known. Raises TokenizerError, also if it is not that of the target.
    """
    found = Tokenizer.from_dir(directory)
    if fingerprint is not None and found.fingerprint != fingerprint:
        raise TokenizerError(
            f"--tokenizer {directory} is tokenizer {found.fingerprint[:12]}, that of {target} is {fingerprint[:12]}; "
            "name the directory that the target was exported from"
        )
    return found


def _root() -> Path:
    return default_cache_dir() / "tokenizers"


def _kept(place: Path, fingerprint: str) -> Tokenizer | None:
    """The tokenizer in a directory; None for another one, or one that cannot be used: a server may send anything."""
    try:
        found = Tokenizer.from_dir(place)
        if found.fingerprint != fingerprint or found.size > MAX_IDS:
            return None
        found.further.encode("a b")
        found.encode("a b")
        _ = found.eos_token_ids, found.has_chat_template
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the library panics, and JSON may be nested too deeply
        return None
    return found


async def _fetch(client: DraftClient, fingerprint: str) -> Tokenizer:
    listed = await client.tokenizer_files()
    if listed.tokenizer != fingerprint:
        raise BundleError(f"{client.url} has the tokenizer {listed.tokenizer[:12]}, not {fingerprint[:12]}")
    files = {file.path: file for file in listed.files if file.path in SHARED_FILES}
    if (size := sum(file.size for file in files.values())) > MAX_SHARED_BYTES:
        raise BundleError(f"the tokenizer at {client.url} has {size} bytes; at most {MAX_SHARED_BYTES} are taken")
    content = "\n".join(f"{path} {file.sha256}" for path, file in sorted(files.items()))
    key = hashlib.sha256(content.encode()).hexdigest()[:KEY_CHARS]
    place = _root() / f"{fingerprint[:KEY_CHARS]}-{key}"
    if (kept := await asyncio.to_thread(_kept, place, fingerprint)) is not None:
        place.touch()  # the latest counts where no server answers
        return kept
    _root().mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=_root(), prefix=".partial-"))
    try:
        for path, file in files.items():
            (partial / path).write_bytes(await _content(client, file))
        if await asyncio.to_thread(_kept, partial, fingerprint) is None:
            raise BundleError(
                f"what {client.url} shares is not the tokenizer {fingerprint[:12]} of its target, or cannot be used"
            )
        if await asyncio.to_thread(_kept, place, fingerprint) is None:  # else another process was faster
            shutil.rmtree(place, ignore_errors=True)  # one that is damaged
            partial.replace(place)
        return Tokenizer.from_dir(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


async def _content(client: DraftClient, file: OfferedFile) -> bytes:
    async with client.tokenizer_file(file) as (_, pieces):
        content = b"".join([piece async for piece in pieces])
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise BundleError(f"{file.path} of the tokenizer at {client.url} arrived damaged; try again")
    return content
