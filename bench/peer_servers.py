"""Starts vLLM behind our API and vLLM's own OpenAI server, and streams batches from either, for `bench.peers`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.bare_http import Wire
from bench.peer_engines import STEP_TOKENS, Batch, Done, Run
from bench.processes import end_group, free_port, is_healthy, source_path, start_group, turn_of

from outrider.models.errors import RuntimeUnavailable

MODEL: Final = "target"
MAX_RUNNING: Final = 16
_DATA: Final = b"data: "


@dataclass(frozen=True, slots=True)
class StreamedText:
    """One streamed completion. arrival_s: of each chunk with text, from the batch's start."""

    text: str
    num_tokens: int
    arrival_s: tuple[float, ...]


def done_of(texts: Sequence[StreamedText]) -> Done:
    """Of a batch. A text's tokens are spread evenly over its chunks."""
    begun_s = max(each.arrival_s[0] for each in texts)
    before = (each.num_tokens * sum(at <= begun_s for at in each.arrival_s) / len(each.arrival_s) for each in texts)
    took_s, num_tokens = max(each.arrival_s[-1] for each in texts), sum(each.num_tokens for each in texts)
    return Done(tuple(each.text for each in texts), num_tokens, took_s, begun_s, sum(before))


@contextmanager
def _serving(arguments: Sequence[str], log: Path, more: Mapping[str, str], health: str) -> Iterator[Run]:
    """A server in a process group of its own, stopped while it has no turn. health: answers 200 once it is ready.

    Raises RuntimeUnavailable with its last lines where it ends before that.
    """
    port, environment = free_port(), {**os.environ, **more}
    with log.open("w") as lines:
        nothing, err = subprocess.DEVNULL, subprocess.STDOUT
        command = [*arguments, "--port", str(port)]
        process = start_group(command, env=environment, stdin=nothing, stdout=lines, stderr=err)

    async def stream_all(batch: Batch) -> Done:
        began_s = time.perf_counter()
        streams = (stream_text(port, _body(prompt, batch.max_tokens), began_s) for prompt in batch.prompts)
        return done_of(await asyncio.gather(*streams))

    def run(batch: Batch) -> Done:
        with turn_of(process.pid):
            return asyncio.run(stream_all(batch))

    try:
        if not is_healthy(f"http://127.0.0.1:{port}{health}", process):
            said = log.read_text(errors="replace")[-1500:]
            raise RuntimeUnavailable(f"`{' '.join(command[1:4])}` did not start: {said}")
        with turn_of(process.pid):
            pass  # so that it is stopped
        yield run
    finally:
        end_group(process)


@contextmanager
def open_servers(
    python: str, target: Path, place: Path, threads: int, kv_cache_mb: int, is_eager: bool
) -> Iterator[tuple[Run, Run]]:
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
    with (
        _serving(ours, place / "ours.log", more, "/health/ready") as first,
        _serving(peer, place / "peer.log", more, "/health") as second,
    ):
        yield first, second


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
    arrivals: list[tuple[float, bytes]] = []
    async with Wire(f"http://127.0.0.1:{port}") as wire:
        await wire.post("/v1/completions", body)
        status = await wire.reader.readline()
        async for line in wire.reader:
            if line.startswith(_DATA):
                arrivals.append((time.perf_counter() - began_s, line))
            if line.startswith(b"data: [DONE]"):
                break
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
