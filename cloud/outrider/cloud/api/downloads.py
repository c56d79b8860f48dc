"""Offers drafts for the served target, and the target's tokenizer: their lists, and their files.

Only files that were listed at the start are served, looked up by their exact names; no link is followed. Files are read
in pieces in other threads, and the number of downloads at a time is bounded, so that no client slows the others.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.cloud.api.state import Core, SharedFile
from outrider.models.errors import RequestError
from outrider.models.http.errors import MAX_PARAM_CHARS, error_response
from outrider.models.http.security import ANYBODY, OWNER
from outrider.models.http.sse import until_gone
from outrider.models.wire.offered import DraftList, OfferedFile, TokenizerFiles

CHUNK_BYTES: Final = 256 << 10
"""Read and written at a time: other events go between two of them."""
_READERS: Final = 2
# One range; anything else is answered with the whole file, which RFC 9110 (14.2) allows.
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_LINK_REFUSED: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_BYTES: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_CONTENT: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": _BYTES},
    206: {"content": _BYTES, "description": "The range asked for"},
}
_Answer = Callable[[Request, SharedFile, Callable[[], RequestError]], Response]


def download_routes(core: Core) -> APIRouter:
    """The list of drafts, the target's tokenizer, and their files."""
    router = APIRouter(tags=["drafts"])
    answer = partial(_answer, core, asyncio.Semaphore(_READERS))
    _add_drafts(router, core, answer)
    _add_tokenizer(router, core, answer)
    return router


def _add_drafts(router: APIRouter, core: Core, answer: _Answer) -> None:
    offered = {each.entry.name: each for each in core.drafts}
    listed = DraftList(
        model=core.model.name,
        target=core.model.target,
        tokenizer=core.model.tokenizer.fingerprint,
        drafts=[each.entry for each in core.drafts],
    )
    document = listed.model_dump_json().encode()

    @router.get("/v1/drafts", response_model=DraftList)
    async def list_drafts() -> Response:
        """The drafts that this server has for its target."""
        return Response(document, media_type="application/json")

    @router.head("/v1/drafts/{name}/{path:path}", include_in_schema=False)
    @router.get("/v1/drafts/{name}/{path:path}", response_class=Response, responses=_CONTENT)
    async def download(name: str, path: str, request: Request) -> Response:
        """A file of a draft, or the range of it that `Range` asks for."""
        draft = offered.get(name)
        file = draft.files.get(path) if draft is not None else None
        if file is None:
            raise RequestError(
                "unknown_draft",
                f"there is no {request.url.path[:MAX_PARAM_CHARS]}; GET /v1/drafts lists drafts and files",
                status=404,
            )
        return answer(request, file, partial(_draft_changed, name, path))


def _add_tokenizer(router: APIRouter, core: Core, answer: _Answer) -> None:
    files, document = core.tokenizer_files, b""
    if files is not None:
        listed = TokenizerFiles(
            model=core.model.name,
            target=core.model.target,
            tokenizer=core.model.tokenizer.fingerprint,
            files=[each.entry for each in files.values()],
        )
        document = listed.model_dump_json().encode()

    @router.get("/v1/tokenizer", response_model=TokenizerFiles)
    async def list_tokenizer() -> Response:
        """The files of the target's tokenizer."""
        _require_shared(files)
        return Response(document, media_type="application/json")

    @router.head("/v1/tokenizer/{path:path}", include_in_schema=False)
    @router.get("/v1/tokenizer/{path:path}", response_class=Response, responses=_CONTENT)
    async def download_tokenizer(path: str, request: Request) -> Response:
        """A file of the target's tokenizer, or the range of it that `Range` asks for."""
        file = _require_shared(files).get(path)
        if file is None:
            raise RequestError(
                "unknown_file",
                f"there is no {request.url.path[:MAX_PARAM_CHARS]}; GET /v1/tokenizer lists the files",
                status=404,
            )
        return answer(request, file, partial(_tokenizer_changed, path))


def _require_shared(files: Mapping[str, SharedFile] | None) -> Mapping[str, SharedFile]:
    if files is None:
        raise RequestError(
            "tokenizer_not_shared",
            "this server does not share its target's tokenizer: its operator started it with --no-share-tokenizer, or "
            "its log has the reason. Give the device the tokenizer's directory with --tokenizer DIR",
            status=404,
        )
    return files


def _draft_changed(name: str, path: str) -> RequestError:
    return RequestError(
        "draft_changed",
        f"{path} of the draft {name} has changed on the server's disk since it started; its operator should start it "
        "again",
        status=410,
    )


def _tokenizer_changed(path: str) -> RequestError:
    return RequestError(
        "tokenizer_changed",
        f"{path} of the target's tokenizer has changed on the server's disk since it started; its operator should "
        "start it again",
        status=410,
    )


def _answer(
    core: Core, readers: asyncio.Semaphore, request: Request, file: SharedFile, changed: Callable[[], RequestError]
) -> Response:
    """Sends what the request asks for of the file. changed: the error where it is no longer as it was listed."""
    part = _choose_answer(request, file.entry)
    if isinstance(part, Response):
        return part
    if core.is_draining:
        raise RequestError("shutting_down", "the server is shutting down; use another server", status=503)
    return _FileAnswer(core, file, part, readers, changed)


def _choose_answer(request: Request, file: OfferedFile) -> Response | range:
    """The bytes of the file to send; or the answer, where none are to be sent."""
    headers, etag = request.headers, _etag(file)
    known = headers.get("if-none-match", "")
    if known == "*" or etag in (each.strip().removeprefix("W/") for each in known.split(",")):
        return Response(status_code=304, headers={"etag": etag})
    whole = range(file.size)
    asked = _RANGE.fullmatch(headers.get("range", "").replace(" ", ""))
    if asked is None or asked[0] == "bytes=-" or headers.get("if-range", etag) != etag:
        chosen = whole
    elif not asked[1]:
        chosen = whole[max(0, file.size - int(asked[2])) :]
    else:
        chosen = whole[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None]
    if not chosen and chosen != whole:
        refusal = RequestError(
            "range_not_satisfiable", f"the file has {file.size} bytes; ask for a range within them", status=416
        )
        return error_response(request.scope, refusal, {"content-range": f"bytes */{file.size}"})
    if request.method == "HEAD":
        return Response(headers=_headers(file, whole))
    return chosen


def _etag(file: OfferedFile) -> str:
    return f'"{file.sha256}"'


def _headers(file: OfferedFile, part: range) -> dict[str, str]:
    headers = {
        "content-length": str(len(part)),
        "content-type": "application/octet-stream",
        "content-disposition": "attachment",  # a browser shows nothing of it
        "x-content-type-options": "nosniff",
        "accept-ranges": "bytes",
        "etag": _etag(file),
    }
    if len(part) != file.size:
        headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{file.size}"
    return headers


class _FileAnswer(Response):
    """Sends a part of a file. Holds a place and an open file until it ends."""

    def __init__(
        self,
        core: Core,
        file: SharedFile,
        part: range,
        readers: asyncio.Semaphore,
        changed: Callable[[], RequestError],
    ) -> None:
        super().__init__(status_code=200 if len(part) == file.entry.size else 206, headers=_headers(file.entry, part))
        self._core = core
        self._file = file
        self._part = part
        self._readers = readers
        self._changed = changed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        async with self._core.downloads.place(scope.get(OWNER, ANYBODY)):
            content = await asyncio.to_thread(open_unlinked, self._file.place, self._file.entry.size)
            if content is None:
                raise self._changed()
            left = asyncio.ensure_future(until_gone(receive))
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send_part(content, send, left)
            finally:
                left.cancel()
                await asyncio.to_thread(content.close)

    async def _send_part(self, content: FileIO, send: Send, left: asyncio.Future[None]) -> None:
        """Returns before the end where the client has left, is too slow, or the server shuts down.

        The connection is then closed, as the answer is not complete.
        """
        loop, limits = asyncio.get_running_loop(), self._core.settings.download_limits
        began_s, num_sent = loop.time(), 0
        await asyncio.to_thread(content.seek, self._part.start)
        while not (left.done() or self._core.is_draining):
            async with self._readers:
                chunk = await asyncio.to_thread(content.read, min(CHUNK_BYTES, len(self._part) - num_sent))
            num_sent += len(chunk)
            is_last = num_sent == len(self._part)
            if not chunk and not is_last:
                return  # truncated since it was opened
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
            if is_last or num_sent < (loop.time() - began_s - limits.grace_s) * limits.min_rate:
                return


def open_unlinked(place: Path, size: int) -> FileIO | None:
    """The file at `place`, which is absolute; None where it is missing or has another size, or a part of its path is a
    link.
    """
    with suppress(OSError):
        if place.resolve(strict=True) != place:
            return None
        file = FileIO(place, opener=lambda name, flags: os.open(name, flags | _LINK_REFUSED))
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_size == size:
            return file
        file.close()
    return None
