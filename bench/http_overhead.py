"""Measures what HTTP costs the server: CPU time of its event loop per drafts message and per commit event.

With a single core the event loop shares it with the model, so each microsecond here costs tokens. A server process runs
the fake runtime; this process talks to it over a plain socket with the headers that httpx sends. Counts only the CPU
time of the server's event-loop thread, not of the engine's thread.

    python bench/http_overhead.py [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.fake_runtime import FakeBatchRuntime

from outrider.cloud.api.app import create_app
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import ServedModel, ServerSettings
from outrider.cloud.engine import EngineThread
from outrider.models.http.security import KeyRing
from outrider.models.ingress.sockets import open_socket
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.text.tokenizer import Tokenizer

REFERENCE = Path(__file__).parents[1] / "reference/outrider/reference/target"
KEY = "a-key-for-the-benchmark"
HOLD = 7
"""A prompt that ends in this token keeps the engine's thread waiting: the session is open and nothing else happens."""


def serve(step_s: float) -> None:
    """The server's process: prints its port, then the ids of its event-loop thread, and runs until it is killed."""
    hold = threading.Event()

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        if any(list(item.tokens)[-1] == HOLD and item.past == 0 for item in batch):
            hold.wait()
        time.sleep(step_s)

    runtime = FakeBatchRuntime(vocab_size=4096, max_positions=65536, num_blocks=4096, on_step=on_step)
    engine = EngineThread(runtime)
    engine.start()
    model = ServedModel("fake", Tokenizer.from_dir(REFERENCE), frozenset())
    app = create_app(engine, model, ServerSettings(keys=KeyRing([KEY])))
    sock = open_socket("127.0.0.1", 0)
    print(sock.getsockname()[1], threading.get_native_id(), flush=True)
    VerifierServer(app, drain_s=0.0).run(sockets=[sock])


class Server:
    """A server process, and the CPU time of its event loop."""

    def __init__(self, step_s: float) -> None:
        command = [sys.executable, __file__, "--serve", str(step_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port, self._thread_id = map(int, self._process.stdout.readline().split())
        deadline = time.monotonic() + 30.0
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}/health/live")
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the server did not come up"

    def cpu_s(self) -> float:
        """CPU seconds of the event-loop thread so far."""
        threads = psutil.Process(self._process.pid).threads()
        return next(float(t.user_time + t.system_time) for t in threads if t.id == self._thread_id)

    def open(self, prompt: list[int], max_tokens: int) -> tuple[socket.socket, bytes, str]:
        """Opens a session; returns its connection, the bytes read after the open event, and its id."""
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
        connection = self.connect()
        connection.sendall(_request(self.port, "/v1/sessions", body))
        read = b""
        while b"}\n\n" not in read:
            read += connection.recv(65536)
        opened, _, rest = read[read.index(b"data: ") + 6 :].partition(b"\n\n")
        return connection, rest, json.loads(opened)["session"]

    def connect(self) -> socket.socket:
        """A new connection."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


def _request(port: int, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        f"Connection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    )
    return head.encode() + body


def measure_drafts(count: int) -> dict[str, Any]:
    """CPU and wall time of one drafts message of 6 tokens, one after the other on one connection."""
    server = Server(0.0)
    try:
        stream, _, session = server.open([1, 2, HOLD], 100)
        connection = server.connect()
        body = b'{"base":0,"paths":[[311,57,2210,9,1043,77]]}'
        request = _request(server.port, f"/v1/sessions/{session}/drafts", body)
        answer = b""
        cpu_s = wall_s = 0.0
        for index in range(count + 200):
            if index == 200:  # warm by now
                cpu_s, wall_s = server.cpu_s(), time.perf_counter()
            connection.sendall(request)
            answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 204"), answer
        cpu_s, wall_s = server.cpu_s() - cpu_s, time.perf_counter() - wall_s
        stream.close()
        return {
            "cpu_ms": cpu_s / count * 1e3,
            "round_trip_ms": wall_s / count * 1e3,
            "request_bytes": len(request),
            "body_bytes": len(body),
            "answer_bytes": len(answer),
        }
    finally:
        server.stop()


def measure_commits(count: int, step_s: float) -> dict[str, Any]:
    """CPU time of one commit event, and its bytes, when the engine commits a token every `step_s`."""
    server = Server(step_s)
    try:
        before_s = server.cpu_s()
        stream, read, _ = server.open([1, 2, 3], count)
        pieces = [read]
        while not pieces[-1].endswith(b"0\r\n\r\n"):
            pieces.append(stream.recv(65536))
        cpu_s = server.cpu_s() - before_s
        received = b"".join(pieces)
        num_events = received.count(b'data: {"base"')
        assert num_events == count, f"{num_events} events of {count} tokens"
        return {"cpu_ms": cpu_s / count * 1e3, "bytes": len(received) / count, "reads": len(pieces)}
    finally:
        server.stop()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    found = {
        "drafts_post": measure_drafts(options.count),
        "commit_event": measure_commits(min(options.count, 3000), 0.002),
    }
    drafts, commits = found["drafts_post"], found["commit_event"]
    print(f"drafts POST:  {drafts['cpu_ms']:.3f} ms of server CPU, {drafts['round_trip_ms']:.3f} ms round trip,")
    print(
        f"              {drafts['request_bytes']} bytes up, {drafts['body_bytes']} of them body; "
        f"{drafts['answer_bytes']} down"
    )
    print(f"commit event: {commits['cpu_ms']:.3f} ms of server CPU, {commits['bytes']:.1f} bytes with its framing")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
