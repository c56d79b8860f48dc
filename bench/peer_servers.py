"""Starts vLLM behind our API and vLLM's own OpenAI server, and streams batches from either, for `bench.peers`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from bench.peer_engines import HUGE_PAGES, STEP_TOKENS, Batch
from bench.processes import pass_niceness, source_path

from outrider.edge.lab.cores import Cores, running_on
from outrider.models.errors import RuntimeUnavailable

MODEL: Final = "target"
MAX_RUNNING: Final = 16
_START_S: Final = 600.0
_POLL_S: Final = 0.5
_DATA: Final = b"data: "


@dataclass(frozen=True, slots=True)
class StreamedText:
    """One streamed completion. arrival_s: of each chunk with text, from the batch's start."""

    text: str
    num_tokens: int
    arrival_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Streamed:
    """A batch of them."""

    texts: tuple[StreamedText, ...]

    @property
    def num_tokens(self) -> int:
        """Of all texts, as the server counts them."""
        return sum(each.num_tokens for each in self.texts)

    @property
    def rate(self) -> float:
        """Tokens/s, prompts included."""
        return self.num_tokens / max(each.arrival_s[-1] for each in self.texts)

    @property
    def decode_rate(self) -> float:
        """Tokens/s of the rest, once every text has begun. A text's tokens are spread evenly over its chunks."""
        begun_s = max(each.arrival_s[0] for each in self.texts)
        left = sum(
            each.num_tokens * sum(at > begun_s for at in each.arrival_s) / len(each.arrival_s) for each in self.texts
        )
        return left / (max(each.arrival_s[-1] for each in self.texts) - begun_s)


class Server:
    """An HTTP server in a process group of its own."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, cores: Cores, more: Mapping[str, str]) -> None:
        """Starts it; returns once /health answers. Raises RuntimeUnavailable with its last lines where it ends."""
        self.name = name
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {**os.environ, **HUGE_PAGES, **more}
        with log.open("w") as lines, running_on(cores):
            self._process = subprocess.Popen(
                [*arguments, "--port", str(self.port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pass_niceness(self._process.pid)
        try:
            self._wait(log)
        except BaseException:
            self.close()
            raise

    def _wait(self, log: Path) -> None:
        deadline_s = time.monotonic() + _START_S
        with httpx.Client(trust_env=False) as client:
            while self._process.poll() is None and time.monotonic() < deadline_s:
                try:
                    if client.get(f"http://127.0.0.1:{self.port}{self.health}").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # it does not listen yet
                time.sleep(_POLL_S)
        raise RuntimeUnavailable(f"{self.name} did not start: {log.read_text(errors='replace')[-1500:]}")

    health = "/health"

    def run(self, batch: Batch) -> Streamed:
        """All prompts at once."""
        return asyncio.run(self._run(batch))

    async def _run(self, batch: Batch) -> Streamed:
        began_s = time.perf_counter()
        streams = (stream_text(self.port, _body(prompt, batch.max_tokens), began_s) for prompt in batch.prompts)
        return Streamed(tuple(await asyncio.gather(*streams)))

    def pause(self) -> None:
        """Stops its processes."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets them run."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends them."""
        for number in (signal.SIGKILL, signal.SIGCONT):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
        self._process.wait()


class OutriderServer(Server):
    """`outrider-cloud serve --engine vllm`."""

    health = "/health/ready"


@contextmanager
def open_servers(
    python: str, target: Path, place: Path, threads: int, kv_cache_mb: int, is_eager: bool
) -> Iterator[tuple[Server, Server]]:
    """vLLM behind our API, and vLLM's own server, on all cores, with `threads` for the model.

    The server's own options stay at their defaults: ours runs steps in turn, vLLM's may schedule ahead.
    """
    more = {
        "PYTHONPATH": source_path(),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as ours sets it: or vLLM's own server ties them to a core
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    ours = [python, "-m", "outrider.cloud.server", "serve", str(target), "--engine", "vllm", "--name", MODEL]
    ours += ["--threads", str(threads), "--max-running", str(MAX_RUNNING)]
    ours += ["--kv-cache-mb", str(kv_cache_mb), "--no-share-prefixes", "--no-lookup", "--drain-s", "0"]
    ours += ["--vllm-option", "dtype=float32", *(["--vllm-option", "enforce_eager=true"] if is_eager else [])]
    peer = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--served-model-name", MODEL]
    peer += ["--host", "127.0.0.1", "--dtype", "float32", "--max-num-seqs", str(MAX_RUNNING)]
    peer += ["--max-num-batched-tokens", str(STEP_TOKENS), "--kv-cache-memory-bytes", str(kv_cache_mb << 20)]
    peer += ["--no-enable-prefix-caching", *(["--enforce-eager"] if is_eager else [])]
    first = OutriderServer("outrider-cloud serve --engine vllm", ours, place / "ours.log", None, more)
    try:
        first.pause()
        second = Server("vLLM's own server", peer, place / "peer.log", None, more)
        try:
            second.pause()
            yield first, second
        finally:
            second.close()
    finally:
        first.close()


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def stream_text(port: int, body: Mapping[str, Any], began_s: float) -> StreamedText:
    """Reads one streamed completion with little work per chunk, so that the client takes no core from the server."""
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    arrivals: list[tuple[float, bytes]] = []
    try:
        status = await reader.readline()
        async for line in reader:
            if line.startswith(_DATA):
                arrivals.append((time.perf_counter() - began_s, line))
    finally:
        writer.close()
    if b" 200 " not in status:
        raise RuntimeUnavailable(f"the server on port {port} answered {status.decode(errors='replace').strip()}")
    return read_stream(arrivals)


def read_stream(arrivals: Sequence[tuple[float, bytes]]) -> StreamedText:
    """The text of a stream's `data:` lines, each with its arrival."""
    parts: list[str] = []
    times: list[float] = []
    num_tokens = 0
    for at_s, line in arrivals:
        data = line.removeprefix(_DATA).strip()
        if data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RuntimeUnavailable(f"the server ended a stream: {event['error']}")
        if usage := event.get("usage"):
            num_tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            if choice["text"]:
                parts.append(choice["text"])
                times.append(at_s)
    return StreamedText("".join(parts), num_tokens, tuple(times))
