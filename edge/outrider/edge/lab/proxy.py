"""Delays TCP connections on loopback: the network that a test machine does not have.

Adds half a round trip to every chunk each way, in order, each at its own due time. It runs its own event loop in its
own thread on select(), whose timeouts are exact to tens of microseconds; epoll's are whole milliseconds. For
measurements run it as a process of its own: `python -m outrider.edge.lab.proxy --target HOST:PORT --rtt-ms 50`.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Self

import typer

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
        self.port = listen_port  # 0 until it is entered
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._stop = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            listener = socket.create_server(("127.0.0.1", self.port))
        except OSError as error:
            self._loop.close()
            raise RuntimeUnavailable(f"the delaying proxy cannot listen: {error}") from error
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="outrider-proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def set_rtt_ms(self, rtt_ms: float) -> None:
        """Changes the round trip of the bytes to come; none overtakes those under way. Raises ConfigError."""
        if not 0.0 <= rtt_ms <= 60_000.0:
            raise ConfigError(f"rtt_ms is {rtt_ms!r}; expected 0 to 60000")
        self._delay_s = rtt_ms / 2e3

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._main(listener))

    async def _main(self, listener: socket.socket) -> None:
        with listener:
            listener.setblocking(False)
            # Neither asyncio.start_server nor sock_accept: each loses a connection that comes while it is being closed.
            self._loop.add_reader(listener, self._accept, listener)
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
        late: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()  # none is a cut, empty is the end
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(late, writer))
            while data := await reader.read(_CHUNK_BYTES):
                for part in self._parts(data, is_up=is_up):
                    late.put_nowait((self._due(len(part or b""), is_up=is_up), part))
            late.put_nowait((self._due(0, is_up=is_up), b""))

    def _parts(self, data: bytes, *, is_up: bool) -> Sequence[bytes | None]:
        """What is delivered of bytes that were read; None cuts all connections. Tests make faults here."""
        return [data]

    def _due(self, num_bytes: int, *, is_up: bool) -> float:
        """When bytes that are sent now arrive."""
        return self._loop.time() + self._delay_s

    async def _deliver(self, late: asyncio.Queue[tuple[float, bytes | None]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await late.get()
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


def serve(
    target: Annotated[str, typer.Option(help="HOST:PORT to forward to")],
    rtt_ms: float = 0.0,
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes a free one")] = 0,
) -> None:
    """Delays a TCP connection: prints the URL to connect to and serves until it is interrupted."""
    host, _, number = target.rpartition(":")
    with DelayProxy(host, int(number), rtt_ms, port) as proxy, contextlib.suppress(KeyboardInterrupt):
        print(proxy.url, flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    typer.run(serve)
