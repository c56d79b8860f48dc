"""Makes a network worse than slow: cuts connections, holds or alters what they carry, limits the rate, counts bytes."""

from __future__ import annotations

import asyncio
import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.edge.lab.proxy import DelayProxy
from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """rtt_ms: delay added to a round trip, half each way. cut_chance: chance, 0 to 1, that a chunk from the server
    closes its connection instead of being delivered, drawn from `seed`.
    """

    rtt_ms: float = 0.0
    cut_chance: float = 0.0
    seed: int = 0


class FaultyProxy(DelayProxy):
    """bytes_up, bytes_down: raw bytes read from clients and from the server."""

    def __init__(self, host: str, port: int, options: ProxyOptions | None = None, listen_port: int = 0) -> None:
        options = options or ProxyOptions()
        super().__init__(host, port, options.rtt_ms, listen_port)
        self._cut_chance = options.cut_chance
        self._kbit_s = 0.0
        self._random = random.Random(options.seed)
        self._free_at = {True: 0.0, False: 0.0}  # when the link has carried all before: up, down
        self._mark, self._cuts = b"", deque[int]()
        self._num_flips, self._is_planting, self._is_held = 0, False, False
        self.bytes_up = self.bytes_down = self.num_cuts = 0

    def cut(self) -> None:
        """Closes every open connection both ways; what was under way is lost. New ones are served as before."""
        self._loop.call_soon_threadsafe(self._cut_all)

    def cut_after(self, mark: bytes, *nums: int) -> None:
        """Cuts once `mark` has come from the server so many times, at least 1; the next number counts from there.

        All up to it is sent on, what follows is lost: so a cut hits the middle of an answer however late its reader
        is. Replaces what was asked before. A mark that two reads share is not seen.
        """
        self._loop.call_soon_threadsafe(self._set_cuts, mark, nums)

    def hold(self) -> None:
        """From now on nothing comes through, either way, and no connection is closed: a link that is dead."""
        self._is_held = True

    def throttle(self, kbit_s: float) -> None:
        """Limits the link's rate each way, shared by all connections, for what comes from now on; 0 ends the limit."""
        self._kbit_s = kbit_s

    def flip(self, num: int) -> None:
        """Flips a bit in each of the next `num` reads, of any connection and either way."""
        self._num_flips = num

    def plant(self) -> None:
        """Changes the first token of the next commit to its neighbour; all lengths stay. Without TLS nobody can see
        that it is not the server's.
        """
        self._is_planting = True

    @property
    def is_done(self) -> bool:
        """Whether what was asked has been done, flips too."""
        return not self._is_planting and not self._num_flips

    def _cut_all(self) -> None:
        self.num_cuts += len(self._connections)
        super()._cut_all()

    def _set_cuts(self, mark: bytes, nums: Sequence[int]) -> None:
        self._mark, self._cuts = mark, deque(nums)

    def _parts(self, data: bytes, *, is_up: bool) -> Sequence[bytes | None]:
        if is_up:
            self.bytes_up += len(data)
        else:
            self.bytes_down += len(data)
            if self._cut_chance and self._random.random() < self._cut_chance:
                self.num_cuts += 1
                raise ConnectionResetError("cut on purpose")
        if self._is_held:
            return []
        if self._num_flips:
            self._num_flips -= 1
            at = self._random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
        if self._is_planting and not is_up and (token := re.search(rb'"tokens":\[\d*(\d)', data)):
            self._is_planting = False
            data = data[: token.start(1)] + bytes([token[1][0] ^ 1]) + data[token.end(1) :]
        return [data] if is_up else self._up_to_cut(data)

    def _up_to_cut(self, data: bytes) -> Sequence[bytes | None]:
        """What is delivered of bytes from the server, and the cut that comes after it."""
        end = 0
        while self._cuts and (at := data.find(self._mark, end)) >= 0:
            end = at + len(self._mark)
            self._cuts[0] -= 1
            if not self._cuts[0]:
                self._cuts.popleft()
                return [data[:end], None]
        return [data]

    def _due(self, num_bytes: int, *, is_up: bool) -> float:
        """Behind all that the link has yet to carry."""
        sent_at = self._loop.time()
        if self._kbit_s:
            sent_at = self._free_at[is_up] = max(sent_at, self._free_at[is_up]) + num_bytes * 8 / (self._kbit_s * 1e3)
        return sent_at + self._delay_s


class AgainstLongRequests(FaultyProxy):
    """A proxy that passes no long request of drafts. how: "buffers" waits for the end of the body, "refuses" has the
    server see a transfer coding that it answers 501, "cuts" closes the connection in the middle of a message, after so
    many reads.

    num_met: long requests that came by.
    """

    def __init__(
        self, how: str, host: str, port: int, options: ProxyOptions | None = None, *, num_reads: int = 1
    ) -> None:
        super().__init__(host, port, options)
        self._how, self._num_reads = how, num_reads
        self.num_met = 0

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        while is_up and (first := await reader.read(1 << 16)):
            if DRAFTS_MEDIA_TYPE.encode() in first:
                self.num_met += 1
                if self._how == "buffers":
                    while await reader.read(1 << 16):
                        pass
                    return
                if self._how == "cuts":
                    for _ in range(self._num_reads):
                        writer.write(first)
                        first = await reader.read(1 << 16)
                    writer.write(first[:-1])
                    raise ConnectionResetError("cut on purpose")
                first = first.replace(b"chunked", b"gzip")
            writer.write(first)
        await super()._forward(reader, writer, is_up=is_up)
