"""Delays TCP connections on loopback: the network that a test machine does not have.

Adds half a round trip to every chunk each way, in order, each at its own due time. It runs its own event loop in its
own thread on select(), whose timeouts are exact to tens of microseconds; epoll's are whole milliseconds. For
measurements run it as a process of its own: `python -m outrider.edge.lab.proxy --target HOST:PORT --rtt-ms 50`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from outrider.models.errors import ConfigError, RuntimeUnavailable

_CHUNK_BYTES = 1 << 16


class DelayProxy:
    """Forwards to one host and port. A plain context manager; usable from any thread.

    rtt_ms: delay added to a round trip, half each way. A connection counts no delay of its own: only bytes are late, so
    a TCP handshake costs nothing here. Raises ConfigError, and RuntimeUnavailable where it cannot listen.
    """

    def __init__(self, host: str, port: int, rtt_ms: float = 0.0, listen_port: int = 0) -> None:
        self._target = host, port
        self.set_rtt_ms(rtt_ms)
        self._listen_port = listen_port
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._serve, name="outrider-proxy", daemon=True)
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._error: OSError | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise RuntimeUnavailable(f"the delaying proxy cannot listen: {self._error}") from self._error
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def set_rtt_ms(self, rtt_ms: float) -> None:
        """Changes the round trip of the bytes to come; none overtakes those under way. Raises ConfigError."""
        if not 0.0 <= rtt_ms <= 60_000.0:
            raise ConfigError(f"rtt_ms is {rtt_ms!r}; expected 0 to 60000")
        self._delay_s = rtt_ms / 2e3

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

    def _cut_all(self) -> None:
        for task in self._connections:
            task.cancel()

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
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(late, arrived, writer))
            while data := await reader.read(_CHUNK_BYTES):
                for part in self._parts(data, is_up=is_up):
                    late.append((self._due(len(part or b""), is_up=is_up), part))
                    arrived.set()
            late.append((self._due(0, is_up=is_up), b""))
            arrived.set()

    def _parts(self, data: bytes, *, is_up: bool) -> Sequence[bytes | None]:
        """What is delivered of bytes that were read; None cuts all connections. Tests make faults here."""
        return [data]

    def _due(self, num_bytes: int, *, is_up: bool) -> float:
        """When bytes that are sent now arrive."""
        return self._loop.time() + self._delay_s

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
    with DelayProxy(host, int(port), args.rtt_ms, args.port) as proxy:
        print(proxy.url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
