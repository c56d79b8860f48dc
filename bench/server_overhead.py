"""Measures the server's CPU time per session and step: scheduling, verification, HTTP; the model is emulated.

    python -m bench.server_overhead [--sessions 1 16 64 256] [--drafts trees none] [--step-ms 30] [--json PATH]

The server runs as its own process. Its runtime sleeps a step's time and looks its picks up, so neither the model nor
the picks take CPU time. Each session has a stream, and one long request up which it answers every commit with a tree of
32 nodes, eight of them right, so a step commits several tokens per session; with "none" it sends nothing. A device at
the default budget of 150 bytes sends some 40 nodes per token of its text, but commits fewer tokens per pass than here.
The client is another process with bare sockets; its CPU time does not count.

Counted are the CPU seconds of the server's threads, less those inside the runtime, over the passes (one session's
part of one step). "engine's wall" is the time per step that the engine spends outside the runtime, by the clock: it
includes waiting for the interpreter lock while the event loop has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import resource
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any, Final, cast

import httpx
import numpy as np
import uvloop
from bench.bare_http import values_of
from bench.emulated import app_of, serve
from bench.known_text import SUCCESSOR, VOCAB_SIZE, nodes_after
from bench.report import TO_JSON, option, parser, verdict
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.edge.lab.child_process import child_process
from outrider.models.http.security import KeyRing
from outrider.models.ingress.sockets import READY_PREFIX
from outrider.models.processors.chooser import PickedRow
from outrider.models.runtimes.base import Ask, Beside, ModelLimits, SequenceSlice
from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, framed
from outrider.models.wire.tree_draft import TreeDraft, put_varint

MAX_POSITIONS: Final = 1 << 16
BLOCK_SIZE: Final = 16
ALTERNATIVES: Final = 3
STEP_TOKENS: Final = 10
"""Of a session, at most: its last token and eight drafted ones."""
KEYS: Final = tuple(f"key-{index}-of-the-benchmark" for index in range(16))
SESSIONS_PER_KEY: Final = 64
WARM_UP_STEPS: Final = 15
MAX_CPU_MS: Final = 0.15
"""Bound on the CPU time per session and step, all threads together, from 16 sessions on; one session alone may take
more, because a step has costs of its own."""
MAX_ENGINE_MS: Final = {64: 6.0, 256: 20.0}
"""Bound on the engine's wall time per step outside the runtime, by the number of sessions."""

# -- the server's process ----------------------------------------------------------------------------------------------


class EmulatedRuntime:
    """A `BatchRuntime` and `PickingRuntime` whose step sleeps, and whose picks are looked up."""

    block_size = BLOCK_SIZE
    limits = ModelLimits(VOCAB_SIZE, MAX_POSITIONS)

    def __init__(self, step_s: float, num_sessions: int) -> None:
        self.num_blocks = (num_sessions + 1) * MAX_POSITIONS // BLOCK_SIZE
        self.cpu_s = 0.0
        self._step_s = step_s

    def forward_picks(self, batch: Sequence[SequenceSlice], ask: Ask, beside: Beside) -> list[PickedRow]:
        """The successor of each row's token, after the step's time."""
        end_s, started_s = time.perf_counter() + self._step_s, time.thread_time()
        rows: list[PickedRow] = []
        for item in batch:
            if item.num_rows:
                rows += [SUCCESSOR[token] for token in item.tokens[-item.num_rows :]]
        assert len(rows) == sum(len(each.positions) for each in ask())
        self.cpu_s += time.thread_time() - started_s
        beside(lambda: time.perf_counter() >= end_s)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return rows

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """Rows of zeros, after the step's time; for the calibration only."""
        time.sleep(self._step_s)
        return np.zeros((sum(item.num_rows for item in batch), VOCAB_SIZE), np.float32)

    def close(self) -> None:
        """Nothing to release."""


def serve_emulated(step_s: float, num_sessions: int) -> None:
    """The server's process. GET /cpu answers with the CPU seconds of its threads, the model's left out."""
    runtime = EmulatedRuntime(step_s, num_sessions)
    config = EngineConfig(max_running=num_sessions, step_tokens=num_sessions * STEP_TOKENS)
    app = app_of(runtime, config, ServerSettings(keys=KeyRing(KEYS), max_sessions=num_sessions))
    engine = next(thread.ident for thread in threading.enumerate() if thread.name == "outrider-engine")
    assert engine is not None
    clocks = [time.pthread_getcpuclockid(ident) for ident in (engine, threading.get_ident())]

    @app.get("/cpu")
    async def cpu() -> dict[str, float]:
        model_s, (engine_s, loop_s) = runtime.cpu_s, map(time.clock_gettime, clocks)
        return {"process_s": time.process_time() - model_s, "engine_s": engine_s - model_s, "loop_s": loop_s}

    serve(app)


# -- the client --------------------------------------------------------------------------------------------------------


NONE: Final = "none"
TREES: Final = "trees"


@cache
def nodes_of(token: int) -> bytes:
    """The nodes of the tree after a token, as `tree_draft` encodes them: they do not depend on base and first."""
    return TreeDraft(0, 0, *nodes_after(token, ALTERNATIVES)).encode()[2:]  # without base and first, a byte each


def tree_of(base: int, first: int, last_token: int) -> bytes:
    """The message after a token; `first` is the number of the first node."""
    body = bytearray()
    put_varint(body, base)
    put_varint(body, first)
    return bytes(body + nodes_of(last_token))


def _headers_of(index: int) -> bytes:
    """The headers of a session's requests; an owner has SESSIONS_PER_KEY sessions."""
    key = KEYS[index // SESSIONS_PER_KEY % len(KEYS)]
    return f"Host: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n".encode()


class Session(asyncio.Protocol):
    """The connection of one session's event stream. drafts: that of its drafts, one after each commit."""

    _EVENT = re.compile(rb'data: \{"base":(\d+),"tokens":\[([\d,]+)\]')

    def __init__(self, drafts: asyncio.WriteTransport, headers: bytes, prompt: Sequence[int], kind: str) -> None:
        self._drafts, self._headers, self._prompt, self._kind = drafts, headers, prompt, kind
        self._rest = self._session = b""
        self.num_commits = self.num_posts = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opens the session."""
        transport = cast(asyncio.Transport, transport)  # uvloop registers no class
        request = {"prompt": list(self._prompt), "max_tokens": MAX_POSITIONS - 64, "patience_ms": 0}
        body = json.dumps(request).encode()
        transport.write(
            b"POST /v1/sessions HTTP/1.1\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (self._headers, len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        """Reads events, and posts once for the newest commit."""
        data = self._rest + data
        cut = data.rfind(b"\n\n") + 2
        if cut < 2:
            self._rest = data
            return
        data, self._rest = data[:cut], data[cut:]
        if not self._session:
            found = re.search(rb'"session":"([\w-]+)"', data)
            assert found, data
            self._session = found[1]
        commits = self._EVENT.findall(data)
        self.num_commits += len(commits)
        if commits:
            base, tokens = commits[-1]
            known = tokens.split(b",")
            if self._kind != NONE:
                self._post(int(base) + len(known), int(known[-1]))

    def _post(self, base: int, last_token: int) -> None:
        """Sends the drafts after `last_token`; the long request begins with the first."""
        if not self.num_posts:
            self._drafts.write(
                b"POST /v1/sessions/%s/drafts HTTP/1.1\r\n%sContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
                % (self._session, self._headers, DRAFTS_MEDIA_TYPE.encode())
            )
        piece = framed(tree_of(base, self.num_posts * 8 * (1 + ALTERNATIVES), last_token))
        self._drafts.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.num_posts += 1


Counters = dict[str, float]
"""Totals since the server's start; the difference of two is what a window took."""


async def _read(http: httpx.AsyncClient) -> Counters:
    """Reads /cpu and /metrics."""
    cpu: Counters = (await http.get("/cpu")).json()
    text = (await http.get("/metrics")).text
    names = {
        "overhead_s": "outrider_engine_overhead_seconds_total",
        "steps": "outrider_engine_steps_total",
        "passes": "outrider_target_passes_total",
        "committed": "outrider_generation_tokens_total",
    }
    found = {name: sum(values_of(text, metric)) for name, metric in names.items()}
    return {**cpu, **found, "wall_s": time.perf_counter()}


async def _measure(url: str, num_sessions: int, num_steps: int, num_windows: int, drafts: str) -> list[Counters]:
    """Opens the sessions; what each window of about `num_steps` steps took."""
    loop = asyncio.get_running_loop()
    host, port = url.removeprefix("http://").split(":")
    streams = list[Session]()
    for index in range(num_sessions):
        posts, _ = await loop.create_connection(asyncio.Protocol, host, int(port))
        prompt = [(index * 1009 + i * 31) % VOCAB_SIZE for i in range(48)]
        session = partial(Session, posts, _headers_of(index), prompt, drafts)
        streams.append((await loop.create_connection(session, host, int(port)))[1])

    async def after(count: int) -> Counters:
        deadline = time.monotonic() + 60.0
        while min(stream.num_commits for stream in streams) < count:
            assert time.monotonic() < deadline, "the sessions do not advance"
            await asyncio.sleep(0.02)
        return await _read(http) | {"posts": sum(each.num_posts for each in streams)}

    windows = []
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEYS[0]}"}) as http:
        before = await after(WARM_UP_STEPS)
        for _ in range(num_windows):
            now = await after(min(stream.num_commits for stream in streams) + num_steps)
            windows.append({name: now[name] - before[name] for name in now})
            before = now
    return windows


FIGURES: Final = {
    "cpu_ms": ("process_s", "passes", 1e3),
    "engine_cpu_ms": ("engine_s", "passes", 1e3),
    "loop_cpu_ms": ("loop_s", "passes", 1e3),
    "engine_wall_ms": ("overhead_s", "steps", 1e3),
    "step_ms": ("wall_s", "steps", 1e3),
    "posts_per_pass": ("posts", "passes", 1.0),
    "tokens_per_pass": ("committed", "passes", 1.0),
    "passes_per_step": ("passes", "steps", 1.0),
}
"""By name: a counter, over which other, scaled: CPU times per session and step, times by the clock per step."""


def figures_of(windows: Sequence[Counters]) -> dict[str, float]:
    """The medians of the windows."""
    return {
        name: median(window[what] / window[over] * scale for window in windows)
        for name, (what, over, scale) in FIGURES.items()
    }


def misses(sessions: int, drafts: str, figures: dict[str, float]) -> list[str]:
    """The bounds that are missed, in words."""
    found, where = [], f"{sessions} sessions, --drafts {drafts}"
    if sessions >= 16 and figures["cpu_ms"] > MAX_CPU_MS:
        found.append(f"{where}: {figures['cpu_ms']:.3f} ms of CPU per session and step, over {MAX_CPU_MS}")
    if (wall_ms := figures["engine_wall_ms"]) > (bound := MAX_ENGINE_MS.get(sessions, math.inf)):
        found.append(f"{where}: the engine takes {wall_ms:.1f} ms per step, over {bound}")
    return found


def main() -> int:
    """Measures and prints; 1 when a bound is missed."""
    options = parser(
        (__doc__ or "").partition("\n")[0],
        {
            "--sessions": option([1, 16, 64, 256]),
            "--step-ms": option(30.0, "time of an emulated step"),
            "--steps": option(100, "steps of a window"),
            "--windows": option(5, "windows; medians are shown"),
            "--serve": option(type=float, help=argparse.SUPPRESS),
            "--drafts": option([TREES, NONE], choices=(TREES, NONE)),
            **TO_JSON,
        },
    ).parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    if options.serve is not None:
        serve_emulated(options.serve / 1e3, options.sessions[0])
        return 0
    names = ("sessions", "drafts", "CPU", "engine", "event loop", "engine's wall", "step", "posts/pass", "tokens/pass")
    table = Table(*names, title="ms of CPU per session and step; ms per step by the clock")
    rows, missed = list[dict[str, Any]](), list[str]()
    for num_sessions, drafts in product(options.sessions, options.drafts):
        command = ["-m", "bench.server_overhead", "--serve", str(options.step_ms), "--sessions", str(num_sessions)]
        with child_process(command, ready_prefix=READY_PREFIX) as url:
            windows = uvloop.run(_measure(url, num_sessions, options.steps, options.windows, drafts))
        figures = figures_of(windows)
        rows.append({"sessions": num_sessions, "drafts": drafts, **figures})
        missed += misses(num_sessions, drafts, figures)
        digits = (3, 3, 3, 2, 1, 2, 2)
        cells = (f"{value:.{places}f}" for value, places in zip(figures.values(), digits, strict=False))
        table.add_row(str(num_sessions), drafts, *cells)
    console = Console(width=110)
    console.print(table)
    return verdict(console, missed, options.json, {"step_ms": options.step_ms, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
