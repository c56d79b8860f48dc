"""Lists a server's drafts and downloads their files, and its target's tokenizer. Knows no disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from urllib.parse import quote

import httpx

from outrider.models.client.client import PLAIN, VerifierClient
from outrider.models.client.errors import ProtocolBroken, short
from outrider.models.client.exchange import Exchange
from outrider.models.client.http_endpoint import Headers
from outrider.models.wire.offered import DraftList, OfferedFile, TokenizerFiles

Content = tuple[int, AsyncGenerator[bytes, None]]
"""The place of the first byte, and the bytes from there on."""


class DraftClient(VerifierClient):
    """A client of one server that also downloads; raises as `VerifierClient` does."""

    async def draft_list(self) -> DraftList:
        """GET /v1/drafts. Raises ProtocolBroken where a draft's size is not that of its files: it is what the user sees
        and what room is made for.
        """
        offered = self._parse(DraftList, await self._exchange("GET", "/v1/drafts", headers=PLAIN))
        for draft in offered.drafts:
            if (num_bytes := sum(file.size for file in draft.files)) != draft.size_bytes:
                raise ProtocolBroken(
                    self.url,
                    f"the files of its draft {draft.name} have {num_bytes} bytes in all, and {draft.size_bytes} are "
                    "announced",
                    "ask the server's operator",
                )
        return offered

    async def tokenizer_files(self) -> TokenizerFiles:
        """GET /v1/tokenizer."""
        return self._parse(TokenizerFiles, await self._exchange("GET", "/v1/tokenizer", headers=PLAIN))

    def download(self, draft: str, file: OfferedFile, start: int = 0) -> AbstractAsyncContextManager[Content]:
        """GET /v1/drafts/{draft}/{path}, from byte `start` on if the server can; it may also begin at 0."""
        return self._file(f"/v1/drafts/{quote(draft)}", file, start)

    def tokenizer_file(self, file: OfferedFile) -> AbstractAsyncContextManager[Content]:
        """GET /v1/tokenizer/{path}."""
        return self._file("/v1/tokenizer", file, 0)

    @asynccontextmanager
    async def _file(self, folder: str, file: OfferedFile, start: int) -> AsyncIterator[Content]:
        """A file's bytes from `start` on.

        Gives the first byte's place, and the bytes from there on in pieces, as they come. These never exceed the
        announced size; fewer bytes are no error here.
        """
        headers: Headers = list(PLAIN)  # compressed, a file's hash would be of other bytes
        if start:
            # Without If-Range the rest of another file could be appended.
            headers += [("Range", f"bytes={start}-"), ("If-Range", f'"{file.sha256}"')]
        exchange = Exchange(self._left, is_traced=self._is_traced)
        request = self._build("GET", f"{folder}/{quote(file.path)}", exchange, headers=headers)
        try:
            response = await self._head(exchange, request)
            first = self._first_byte(response, file, start)
            async with aclosing(self._pieces(exchange, file.size - first)) as pieces:
                yield first, pieces
        finally:
            await exchange.aclose()

    def _first_byte(self, response: httpx.Response, file: OfferedFile, start: int) -> int:
        if response.status_code == 200:
            return 0
        found, expected = response.headers.get("content-range", "missing"), f"bytes {start}-{file.size - 1}/{file.size}"
        if response.status_code != 206 or found != expected:
            raise ProtocolBroken(
                self.url,
                f"it answered HTTP {response.status_code} with Content-Range {short(found)!r}; expected {expected!r}",
            )
        return start

    async def _pieces(self, exchange: Exchange, left: int) -> AsyncGenerator[bytes, None]:
        while True:
            async with self._deadline(self._silence_s):
                chunk = await exchange.next_chunk()
            if not chunk:
                return
            left -= len(chunk)
            if left < 0:
                raise ProtocolBroken(self.url, "a file has more bytes than it announced")
            self.wire.body_down += len(chunk)
            yield chunk
