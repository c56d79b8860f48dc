"""Runs verifiers and local endpoints as real processes that can be killed, stopped and started again; reads texts."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import httpx

from outrider.edge.lab.cores import Cores, running_on
from outrider.models.errors import RuntimeUnavailable
from outrider.models.ingress.sockets import READY_PREFIX, open_socket, url_of

ANY_PORT: Final = ("--port", "0")
_START_S: Final = 600.0
_P = TypeVar("_P", bound="Program")
_COUNTERS: Final = {
    "model_seconds": "engine_model_seconds_total",
    "overhead_seconds": "engine_overhead_seconds_total",
    "steps": "engine_steps_total",
    "proposed": "spec_decode_num_draft_tokens_total",
    "preempted": "num_preemptions_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
    "tree_steps": "engine_tree_steps_total",
    "hits": "recent_hits_total",
}
_SILENCE_S: Final = 120.0
"""A stream that is silent for longer has failed: its keep-alives come every few seconds."""


def source_path() -> str:
    """PYTHONPATH for an interpreter of another environment, so that it runs this checkout's sources, this room too."""
    root = Path(__file__).parent.parent
    return os.pathsep.join([str(root), *(str(root / part) for part in ("cloud", "models", "edge", "export"))])


def end_group(process: subprocess.Popen[Any]) -> None:
    """Ends a process that leads a group, and the group, at once, also where it is stopped."""
    for number in (signal.SIGKILL, signal.SIGCONT):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def start_group(command: Sequence[str], cores: Cores = None, **options: Any) -> subprocess.Popen[str]:
    """Starts a command in a process group of its own, for `turn_of` and `end_group`. options: of `Popen`."""
    with running_on(cores):
        return subprocess.Popen(command, text=True, start_new_session=True, **options)


@contextmanager
def turn_of(pid: int) -> Iterator[None]:
    """The process group that `pid` leads runs meanwhile, and is stopped then."""
    os.killpg(pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(pid, signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Remote:
    """An object in a process that leads a group of its own. Its methods are called there, and calls block."""

    pipe: Connection
    pid: int

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.call, name)

    def call(self, name: str, *arguments: object) -> Any:
        """Calls a method of it, and waits for what it returns."""
        self.pipe.send((name, arguments))
        return self.pipe.recv()  # EOFError where the process failed; its traceback is on standard error


@contextmanager
def remote(make: Callable[[], AbstractContextManager[object]], cores: Cores = None) -> Iterator[Remote]:
    """Makes the object in a process on `cores`; ends both. make: is sent there, so it can be pickled."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, make), daemon=True)
    with running_on(cores):
        process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise TimeoutError(f"a process was not ready after {_START_S:g} s")
        yield Remote(ours, ours.recv())
    finally:
        ours.close()
        process.kill()  # also where it is stopped
        process.join()


def _answer(pipe: Connection, make: Callable[[], AbstractContextManager[object]]) -> None:
    os.setsid()
    with make() as found, suppress(EOFError, BrokenPipeError):  # the parent has closed its end
        pipe.send(os.getpid())
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(found, name)(*arguments))


def is_healthy(url: str, process: subprocess.Popen[Any]) -> bool:
    """Waits until a server answers with 200 there; False where its process ends before that, or takes too long."""
    deadline_s = time.monotonic() + _START_S
    with httpx.Client(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline_s:
            with suppress(httpx.HTTPError):  # it does not listen yet
                if client.get(url).status_code == 200:
                    return True
            time.sleep(0.2)
    return False


def free_port() -> int:
    """One of loopback's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Program:
    """A command that announces its URL, in a process group of its own. A port that it once had is its own for good.

    log: where its standard error goes; a new start appends. python: the interpreter. start_s: for a start.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        cores: Cores = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        *,
        start_s: float = _START_S,
    ) -> None:
        self._arguments = [python, *arguments]
        self._cores, self._limit_s = cores, start_s
        self._environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **(environment or {})}
        self._running: subprocess.Popen[str] | None = None
        self.log = log
        self.url = ""

    @property
    def port(self) -> int:
        """0 before the first start."""
        return int(self.url.rsplit(":", 1)[1]) if self.url else 0

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._running is not None, "it does not run"
        return self._running.pid

    def start(self) -> None:
        """Returns once it is ready. Raises RuntimeUnavailable with its last lines where it ends before that."""
        with self.log.open("a") as errors:
            self._running = start_group(
                [*self._arguments, *(("--port", str(self.port)) if self.url else ())],
                self._cores,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._running.stdout is not None
        # Ends the loop below; the whole group, because a child of it would keep the pipe open.
        watchdog = threading.Timer(self._limit_s, self.signal, (signal.SIGKILL,))
        watchdog.start()
        try:
            for line in self._running.stdout:
                if line.startswith(READY_PREFIX):
                    self.url = line.removeprefix(READY_PREFIX).strip()
                    threading.Thread(target=_drain, args=(self._running.stdout,), daemon=True).start()
                    return
        finally:
            watchdog.cancel()
        self.kill()
        raise RuntimeUnavailable(f"`{' '.join(self._arguments[2:4])}` did not start: {self.log.read_text()[-600:]}")

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """Ends it at once, also where it is stopped; may be called twice."""
        if self._running is not None:
            end_group(self._running)
        self._running = None

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def _drain(stream: IO[str]) -> None:
    """Reads what a process goes on to say: a full pipe would stop it."""
    with suppress(ValueError):  # the pipe is closed here
        deque(stream, maxlen=0)


@contextmanager
def started(program: _P) -> Iterator[_P]:
    """Starts it, and kills it in the end."""
    program.start()
    try:
        yield program
    finally:
        program.kill()


def verifier(target: Path, place: Path, cores: Cores = None, *options: str, **more: Any) -> Program:
    """`outrider-cloud serve` with one thread. place: a directory for its log."""
    arguments = ["-m", "outrider.cloud.server", "serve", str(target), "--threads", "1", "--drain-s", "0"]
    log = place / f"verifier-{time.monotonic_ns()}.log"
    return Program([*arguments, *ANY_PORT, *options], log, cores, **more)


def endpoint_arguments(draft: Path, clouds: Sequence[str]) -> list[str]:
    """What follows the command's name."""
    urls = [word for url in clouds for word in ("--cloud", url)]
    return ["serve", "--draft", str(draft), *urls, "--threads", "1", *ANY_PORT]


def announce(make: Callable[..., Any]) -> None:
    """Runs the server that `make` makes from the options `drain_s` and `on_ready`, on a free port of loopback, until it
    is ended; announces it as `Program` expects it.
    """
    with open_socket("127.0.0.1", 0) as sock:
        url = url_of(sock, is_tls=False)
        make(drain_s=0.0, on_ready=lambda: print(READY_PREFIX + url, flush=True)).run(sockets=[sock])


@dataclass(slots=True)
class Text:
    """A text as a client of a stream gets it. error: the message where it failed. created_s: as the answer says.

    num_accepted: drafted tokens, as the answer says; 0 where the text failed.
    """

    text: str = ""
    error: str = ""
    finish: str = ""
    created_s: int = 0
    num_accepted: int = 0


def read_text(url: str, body: Mapping[str, Any], on_text: Callable[[str], None] = lambda text: None) -> Text:
    """Streams a text to its end, also where that is a failure. on_text: called with all text so far at each chunk."""
    found = Text()
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=_SILENCE_S, trust_env=False) as answer:
            if answer.status_code != 200:
                found.error = f"HTTP {answer.status_code}: {_message(answer.read())}"
            for line in answer.iter_lines() if not found.error else ():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    found.error = str(event["error"].get("message", event["error"]))
                    break
                found.created_s = event.get("created", found.created_s)
                if usage := event.get("usage"):
                    found.num_accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
                for choice in event["choices"]:
                    new = choice["text"]
                    found.finish = choice["finish_reason"] or found.finish
                    if new:
                        found.text += new
                        on_text(found.text)
    except httpx.HTTPError as error:
        found.error = f"{type(error).__name__}: {error}"
    if not found.finish and not found.error:
        found.error = "the stream ended without a finish reason"
    return found


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def metrics_of(url: str) -> dict[str, float]:
    """What a server counts, by name; without what has labels. The local endpoint needs `--metrics`."""
    text = httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False).raise_for_status().text
    lines = (line.split() for line in text.splitlines() if line and line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in lines}


def engine_counts(url: str, *names: str) -> dict[str, float]:
    """Counters of the engine by their names in `seam.Totals`, and its seconds in the model and in the rest of a step.

    They are read from the server itself, not through an emulated network. `hits` is that of recent texts.
    """
    found = metrics_of(url)
    return {name: found[f"outrider_{_COUNTERS[name]}"] for name in names}
