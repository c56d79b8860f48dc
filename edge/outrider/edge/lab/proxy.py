"""Delays TCP connections on loopback: the network that a test machine does not have.

Adds half a round trip to every chunk each way, in order, each at its own due time, limits the rate where asked to, and
counts the bytes. It runs its own event loop in its own thread on select(), whose timeouts are exact to tens of
microseconds; epoll's are whole milliseconds. For measurements run it as a process of its own:
`python -m outrider.edge.lab.proxy --target HOST:PORT --rtt-ms 50`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from outrider.models.errors import ConfigError, RuntimeUnavailable

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """rtt_ms: delay added to a round trip, half each way. cut_chance: chance, 0 to 1, that a chunk from the server
    closes its connection instead of being delivered, drawn from `seed`. kbit_s: rate of the link each way, shared by
    all connections; 0 is no limit.
    """

    rtt_ms: float = 0.0
    cut_chance: float = 0.0
    seed: int = 0
    kbit_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rtt_ms <= 60_000.0:
            raise ConfigError(f"rtt_ms is {self.rtt_ms!r}; expected 0 to 60000")
        if not 0.0 <= self.cut_chance <= 1.0:
            raise ConfigError(f"cut_chance is {self.cut_chance!r}; expected a chance, 0 to 1")
        if not self.kbit_s >= 0.0:
            raise ConfigError(f"kbit_s is {self.kbit_s!r}; expected at least 0")


class DelayProxy:
    """Forwards to one host and port. A plain context manager; usable from any thread.

    bytes_up, bytes_down: raw bytes read from clients and from the server. A connection counts no delay of its own: only
    bytes are late, so a TCP handshake costs nothing here.
    """

    def __init__(self, host: str, port: int, options: ProxyOptions | None = None, listen_port: int = 0) -> None:
        self._target = host, port
        self._options = options or ProxyOptions()
        self._listen_port = listen_port
        self._random = random.Random(self._options.seed)
        self._free_at = {True: 0.0, False: 0.0}  # when the link has carried all before: up, down
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._serve, name="outrider-proxy", daemon=True)
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._error: OSError | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.num_connections = 0
        self.num_cuts = 0
        self._is_held = False
        self._mark = b""
        self._cuts: deque[int] = deque()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> DelayProxy:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise RuntimeUnavailable(f"the delaying proxy cannot listen: {self._error}") from self._error
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def cut(self) -> None:
        """Closes every open connection both ways; what was under way is lost. New ones are served as before."""
        self._loop.call_soon_threadsafe(self._cut_all)

    def cut_after(self, mark: bytes, *nums: int) -> None:
        """Cuts once `mark` has come from the server so many times, at least 1; the next number counts from there.

        All up to it is sent on, what follows is lost: so a cut hits the middle of an answer however late its reader
        is. Replaces what was asked before. A mark that two reads share is not seen. Raises ConfigError.
        """
        if not mark or min(nums, default=1) < 1:
            raise ConfigError(f"the mark is {mark!r} and comes {nums} times; expected one byte or more, 1 time or more")
        self._loop.call_soon_threadsafe(self._set_cuts, mark, nums)

    def hold(self) -> None:
        """From now on nothing comes through, either way, and no connection is closed: a link that is dead."""
        self._is_held = True

    def set_rtt_ms(self, rtt_ms: float) -> None:
        """Changes the round trip of the bytes to come; none overtakes those under way. Raises ConfigError."""
        self._options = replace(self._options, rtt_ms=rtt_ms)

    def throttle(self, kbit_s: float) -> None:
        """Changes the link's rate, for what comes from now on; 0 ends the limit."""
        self._options = replace(self._options, kbit_s=kbit_s)

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()
            self._started.set()

    async def _main(self) -> None:
        try:
            listener = socket.create_server(("127.0.0.1", self._listen_port))
        except OSError as e:
            self._error = e
            return
        with listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            # Neither asyncio.start_server nor sock_accept: each loses a connection that comes while it is being closed.
            self._loop.add_reader(listener, self._accept, listener)
            self._started.set()
            await self._stop.wait()
            self._loop.remove_reader(listener)
        while self._connections:
            self._cut_all()
            await asyncio.wait(self._connections)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            client, _ = listener.accept()
            task = self._loop.create_task(self._connect(client))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            # A task that is cancelled before it began never runs its own clean-up.
            task.add_done_callback(lambda _: client.close())
            self.num_connections += 1

    def _cut_all(self) -> None:
        for task in self._connections:
            task.cancel()
            self.num_cuts += 1

    def _set_cuts(self, mark: bytes, nums: Sequence[int]) -> None:
        self._mark, self._cuts = mark, deque(nums)

    def _up_to_cut(self, data: bytes) -> tuple[bytes, bool]:
        """What is delivered of bytes from the server, and whether a cut comes after it."""
        end = 0
        while self._cuts and (at := data.find(self._mark, end)) >= 0:
            end = at + len(self._mark)
            self._cuts[0] -= 1
            if not self._cuts[0]:
                self._cuts.popleft()
                return data[:end], True
        return data, False

    async def _connect(self, client: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            reader, writer = await asyncio.open_connection(sock=client)
            writers.append(writer)
            server_reader, server_writer = await asyncio.open_connection(*self._target)
            writers.append(server_writer)
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._forward(reader, server_writer, is_up=True))
                both_ways.create_task(self._forward(server_reader, writer, is_up=False))
        except (asyncio.CancelledError, OSError, ExceptionGroup):
            pass  # cut on command, refused by the server, or broken by either side: all end both connections
        finally:
            for each in writers:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool) -> None:
        """Reads at once and writes each chunk at its due time; the two never wait for each other."""
        late: deque[tuple[float, bytes | None]] = deque()  # none is a cut, empty is the end
        arrived = asyncio.Event()
        is_cut = False
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(late, arrived, writer))
            while data := await reader.read(_CHUNK_BYTES):
                if is_up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                    if self._options.cut_chance and self._random.random() < self._options.cut_chance:
                        self.num_cuts += 1
                        raise ConnectionResetError("cut on purpose")
                if self._is_held:
                    continue
                if not is_up:
                    data, is_cut = self._up_to_cut(data)
                late.append((self._due(len(data), is_up=is_up), data))
                arrived.set()
                if is_cut:
                    break
            late.append((self._due(0, is_up=is_up), None if is_cut else b""))
            arrived.set()

    def _due(self, num_bytes: int, *, is_up: bool) -> float:
        """When bytes that are sent now arrive: behind all that the link has yet to carry."""
        sent_at = self._loop.time()
        if kbit_s := self._options.kbit_s:
            sent_at = self._free_at[is_up] = max(sent_at, self._free_at[is_up]) + num_bytes * 8 / (kbit_s * 1e3)
        return sent_at + self._options.rtt_ms / 2e3

    async def _deliver(
        self, late: deque[tuple[float, bytes | None]], arrived: asyncio.Event, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            while not late:
                arrived.clear()
                await arrived.wait()
            due, data = late.popleft()
            if (wait_s := due - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if data is None:
                self._cut_all()
                return
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


def main() -> None:
    """`python -m outrider.edge.lab.proxy`: prints the URL to connect to and serves until it is interrupted."""
    cli = argparse.ArgumentParser(description="Delays a TCP connection.")
    cli.add_argument("--target", required=True, help="HOST:PORT to forward to")
    cli.add_argument("--rtt-ms", type=float, default=0.0)
    cli.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    args = cli.parse_args()
    host, _, port = args.target.rpartition(":")
    with DelayProxy(host, int(port), ProxyOptions(args.rtt_ms), args.port) as proxy:
        print(proxy.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
