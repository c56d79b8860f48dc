"""Starts the servers and agents under attack, by the interpreter of the version that is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, TextIO

import psutil
from bench.attacks.exchange import ask
from bench.processes import pass_niceness

EMBEDDED: Final = "embedded"
VLLM: Final = "vllm"

READY_PREFIX: Final = "OUTRIDER_READY "
KEYS: Final = ("key-of-the-first-owner-0001", "key-of-the-second-owner-0002")
_EXPORT: Final = (
    "from outrider.export.make.reference_pair import export_reference_pair\n"
    "pair = export_reference_pair()\nprint(pair.target)\nprint(pair.draft)"
)
_EXPORT_FOR_VLLM: Final = (
    "from bench.verifier import VLLM, Verifier\npair = Verifier(VLLM).pair(None)\nprint(pair.target)\nprint(pair.draft)"
)
_VLLM_OPTIONS: Final = ("--engine", "vllm", "--vllm-option", "dtype=float32", "--vllm-option", "enforce_eager=true")
_LEAST_STEP_MS: Final = 100.0
"""Of vLLM's: it computes, and a step of 32 sequences or 256 tokens has to take no longer than one of a few."""
_TREE: Final = "from pathlib import Path\nimport outrider.cloud\nprint(Path(outrider.cloud.__file__).parents[3])"


class NotMeasured(Exception):
    """Says why a row could not be measured."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. process: the leader of its own process group. errors: where its log goes."""

    url: str
    process: subprocess.Popen[str]
    errors: TextIO

    def log(self) -> str:
        """What it has logged so far."""
        descriptor = self.errors.fileno()  # the server writes at the same position, so this does not move it
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return int(self.url.rsplit(":", 1)[1])

    def memory_mb(self) -> float:
        """Resident memory of the server and its children."""
        try:
            leader = psutil.Process(self.process.pid)
            return float(sum(p.memory_info().rss for p in (leader, *leader.children(recursive=True))) / 1e6)
        except psutil.NoSuchProcess:
            return 0.0

    def signal(self, number: int) -> None:
        """Sends a signal to the server and its children."""
        os.killpg(self.process.pid, number)

    def wait_until_awake(self, timeout_s: float = 30.0) -> None:
        """Returns once /health/live answers at once, five times in a row. Raises NotMeasured after `timeout_s`."""
        deadline_s, num_quick = time.monotonic() + timeout_s, 0
        while num_quick < 5:
            if time.monotonic() > deadline_s:
                raise NotMeasured(f"the server's health took long {timeout_s:g} s after the attack had ended")
            try:
                answer = ask(self.port, "GET", "/health/live", timeout_s=timeout_s)
            except TimeoutError:
                continue
            num_quick = num_quick + 1 if answer.took_s < 0.03 else 0
            time.sleep(0.02)

    def wait_until_idle(self, timeout_s: float = 30.0) -> None:
        """Returns once nothing runs and nothing is queued. Raises NotMeasured after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            answer = ask(self.port, "GET", "/health/ready", timeout_s=10.0)
            if answer.status == 200 and not answer.json["running"] and not answer.json.get("queue_depth"):
                return
            time.sleep(0.02)
        raise NotMeasured(f"the server was still busy {timeout_s:g} s after the last request had ended")


@dataclass(frozen=True)
class Subject:
    """The version under attack. python: its interpreter; with vLLM, which has an environment of its own, only its
    servers run by it. engine: of the servers. options: of every server. start_s: for a server to start.
    """

    python: str
    engine: str = EMBEDDED
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ) | {"NO_COLOR": "1"})
    options: tuple[str, ...] = ()
    start_s: float = 120.0

    @cached_property
    def tree(self) -> Path:
        """The checkout that the interpreter imports."""
        return Path(self._output("-c", _TREE).splitlines()[-1])

    @cached_property
    def bundles(self) -> tuple[Path, Path]:
        """The reference target and draft, not widened, exported by the version itself."""
        export = _EXPORT_FOR_VLLM if self.engine == VLLM else _EXPORT
        target, draft = self._output("-c", export, python=self.own_python).splitlines()[-2:]
        return Path(target), Path(draft)

    @property
    def own_python(self) -> str:
        """What exports and runs agents: vLLM's environment has neither."""
        return sys.executable if self.engine == VLLM else self.python

    @property
    def _engine_options(self) -> tuple[str, ...]:
        return _VLLM_OPTIONS if self.engine == VLLM else ()

    @contextmanager
    def serve(self, *options: str, keys: Sequence[str] = (), bundle: Path | None = None) -> Iterator[Server]:
        """Runs `outrider-cloud serve` on the reference target."""
        with tempfile.TemporaryDirectory() as place:
            arguments = ["-m", "outrider.cloud.server", "serve", str(bundle or self.bundles[0]), "--port", "0"]
            arguments += ["--threads", "1", "--drain-s", "0", *self._engine_options, *self.options, *options]
            if keys:
                arguments += ["--api-key-file", str(written_keys(Path(place), keys))]
            with self._running(arguments) as server:
                yield server

    @contextmanager
    def emulated(self, step_ms: float, extra_ms: float = 0.0) -> Iterator[Server]:
        """Runs this version's `bench.emulated`: the real server over a model whose every step takes `step_ms`, and
        extra_ms more for each token after the first. With vLLM, `bench.paced_vllm` over the reference target: its steps
        take as long at least, and never less than `_LEAST_STEP_MS`.
        """
        if self.engine == VLLM:
            step = str(max(step_ms, _LEAST_STEP_MS))
            paced = ["-m", "bench.paced_vllm", str(self.bundles[0]), "--step-ms", step, "--extra-ms", str(extra_ms)]
            paced += ["--port", "0", "--threads", "1", "--drain-s", "0", *self._engine_options]
            with self._running(paced) as server:
                yield server
            return
        if not (self.tree / "bench" / "emulated.py").is_file():
            raise NotMeasured(f"{self.tree} has no bench/emulated.py, which a step of a given time needs")
        arguments = ["-m", "bench.emulated", "--step-ms", str(step_ms), "--extra-ms", str(extra_ms)]
        with self._running(arguments) as server:
            yield server

    @contextmanager
    def endpoint(
        self, cloud: str, *options: str, keys: Sequence[str] = (), draft: Path | None = None
    ) -> Iterator[Server]:
        """Runs `outrider serve` on a draft, by default the reference draft, for the verifier at the URL `cloud`."""
        with tempfile.TemporaryDirectory() as place:
            arguments = ["-m", "outrider.edge.cli", "serve", "--cloud", cloud]
            arguments += ["--draft", str(draft or self.bundles[1])]
            arguments += ["--port", "0", "--threads", "1", *options]
            if keys:
                arguments += ["--api-key-file", str(written_keys(Path(place), keys))]
            with self._running(arguments, self.own_python) as server:
                yield server

    def agent(self, *arguments: str) -> list[str]:
        """The command line of `outrider run` on the reference draft."""
        return [self.own_python, "-m", "outrider.edge.cli", "run", "--draft", str(self.bundles[1]), *arguments]

    @contextmanager
    def _running(self, arguments: Sequence[str], python: str | None = None) -> Iterator[Server]:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [python or self.python, *arguments],
                cwd=self.tree,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            pass_niceness(process.pid)
            try:
                url = _ready_url(process, self.start_s)
                if url is None:
                    errors.seek(0)
                    raise NotMeasured(f"the server did not start: {errors.read()[-500:].strip()}")
                yield Server(url, process, errors)
            finally:
                end(process)

    def _output(self, *arguments: str, python: str | None = None) -> str:
        command = [python or self.python, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment | {"COLUMNS": "200"})
        if done.returncode:
            raise NotMeasured(f"`{command[0]} {' '.join(arguments)[:60]}` failed: {done.stderr.strip()[-500:]}")
        return done.stdout


def written_keys(place: Path, keys: Sequence[str]) -> Path:
    """A file with these keys, for its owner only."""
    path = place / "keys"
    path.write_text("\n".join(keys) + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ends a process group that was started with start_new_session, also a stopped one."""
    for number in (signal.SIGKILL, signal.SIGCONT):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _ready_url(process: subprocess.Popen[str], timeout_s: float) -> str | None:
    """The URL that the server announces; None where it ends without, or does not announce one in time."""
    assert process.stdout is not None
    watchdog = threading.Timer(timeout_s, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if line.startswith(READY_PREFIX):
                return line.removeprefix(READY_PREFIX).strip()
    finally:
        watchdog.cancel()
    return None
