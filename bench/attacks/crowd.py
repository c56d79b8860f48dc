"""Opens many sessions at once and counts their tokens; one thread reads all streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.bare_http import HOST, Wire, request_bytes, wait_for

from outrider.models.errors import CloudError


@dataclass(eq=False, slots=True)
class Stream:
    """One session's stream: (time, number of tokens) of each commit. refusal: what the server answered instead."""

    began_s: float = 0.0
    commits: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    session: str = ""
    refusal: str = ""
    is_over: bool = False

    @property
    def first_token_s(self) -> float | None:
        """Time to the first token."""
        return self.commits[0][0] - self.began_s if self.commits else None

    def take(self, event: dict[str, Any]) -> None:
        """Notes what was read."""
        self.session = event.get("session") or self.session
        if tokens := event.get("tokens"):
            self.commits.append((time.perf_counter(), len(tokens)))
            self.tokens += [token["id"] if isinstance(token, dict) else token for token in tokens]


class Crowd:
    """Sessions of one owner, until it is closed. keeps: a session that ends is opened again, so that as many stay open.

    address: the owner's. path: what opens one: the verifier's sessions, or the texts of the local endpoint's page.
    """

    def __init__(
        self,
        port: int,
        bodies: Sequence[dict[str, Any]],
        *,
        key: str | None = None,
        address: str = HOST,
        keeps: bool = False,
        path: str = "/v1/sessions",
    ) -> None:
        self._port, self._key, self._address, self._keeps, self._path = port, key, address, keeps, path
        self._is_closed = False
        self._tasks = set[asyncio.Task[None]]()
        self.streams = [Stream() for _ in bodies]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read_all(bodies)), daemon=True)
        self._thread.start()

    def running(self) -> Stream:
        """The crowd's only session, once it has a token. Raises NotMeasured."""
        stream = self.streams[0]
        wait_for("the session had no token", lambda: bool(stream.commits), 10.0, 0.002)
        return stream

    def require_running(self, count: int, timeout_s: float = 30.0) -> None:
        """Returns once so many have a token and have not ended. Raises NotMeasured."""
        what = f"of {len(self.streams)} sessions {count} did not run"
        wait_for(what, lambda: self.num_running() >= count, timeout_s, 0.002)

    def num_running(self) -> int:
        """Sessions that have a token and have not ended."""
        return sum(bool(stream.commits) and not stream.is_over for stream in self.streams)

    def num_commits(self) -> int:
        """Of all sessions so far."""
        return sum(len(stream.commits) for stream in self.streams)

    def tokens_per_s(self, duration_s: float) -> float:
        """Tokens of all sessions together in the next `duration_s`, per second."""
        began_s = time.perf_counter()
        time.sleep(duration_s)
        end_s = time.perf_counter()
        count = sum(n for stream in self.streams for at, n in stream.commits if began_s <= at < end_s)
        return count / (end_s - began_s)

    def gaps(self) -> list[tuple[float, float]]:
        """When each time between commits of one session began and ended, by perf_counter, of all sessions."""
        return [gap for stream in self.streams for gap in pairwise([at for at, _ in stream.commits])]

    def close(self) -> None:
        """Closes every stream, which ends the sessions."""
        self._is_closed = True
        self._thread.join()

    async def _read_all(self, bodies: Sequence[dict[str, Any]]) -> None:
        for stream, body in zip(list(self.streams), bodies, strict=True):
            self._tasks.add(asyncio.create_task(self._read(stream, body)))
        while not self._is_closed:
            await asyncio.sleep(0.01)

    async def _read(self, stream: Stream, body: dict[str, Any]) -> None:
        request = request_bytes(self._port, "POST", self._path, body, self._key)
        stream.began_s = time.perf_counter()
        try:
            async with Wire(f"http://{HOST}:{self._port}", self._address) as wire:
                await wire.send(request)
                while (event := await wire.event()) is not None and event.get("type") != "end":
                    stream.take(event)
        except (CloudError, OSError) as error:
            stream.refusal = str(error)
        stream.is_over = True
        if self._keeps and not stream.refusal:
            self.streams.append(stream := Stream())
            self._tasks.add(asyncio.create_task(self._read(stream, body)))
