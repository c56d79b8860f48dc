"""Runs the agent's command and reads what it prints, on pipes or on a terminal of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil
from bench.attacks.subject import Subject
from bench.processes import end_group


@dataclass(slots=True)
class Agent:
    """A running agent. text: what it printed to standard output so far; errors: to standard error.

    On a terminal both are in `text`.
    """

    process: subprocess.Popen[bytes]
    text: bytes = b""
    errors: bytes = b""
    peak_mb: float = 0.0
    _threads: list[threading.Thread] = field(default_factory=list)

    def wait(self, is_reached: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `is_reached`, or the agent's end; returns whether it was reached in time. Samples memory."""
        deadline_s = time.monotonic() + timeout_s
        while not is_reached():
            with suppress(psutil.NoSuchProcess):
                self.peak_mb = max(self.peak_mb, psutil.Process(self.process.pid).memory_info().rss / 1e6)
            if time.monotonic() > deadline_s:
                return False
            if self.process.poll() is not None:
                self.join()
                return is_reached()
            time.sleep(0.005)
        return True

    def finish(self, timeout_s: float) -> int | None:
        """The exit status, all output read; None where it runs on after `timeout_s`."""
        self.wait(lambda: False, timeout_s)
        return self.process.poll()

    def join(self) -> None:
        """Reads the rest of the output of an agent that has ended."""
        for thread in self._threads:
            thread.join(5.0)


@contextmanager
def agent(subject: Subject, *arguments: str, on_terminal: bool = False) -> Iterator[Agent]:
    """Runs `outrider run` with these arguments, and ends it with the context."""
    command: Sequence[str] = subject.agent(*arguments)
    environment = {**subject.environment, "TERM": "xterm-256color", "COLUMNS": "200"}
    if on_terminal:
        environment.pop("NO_COLOR", None)
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
        )
        os.close(follower)
        running = Agent(process)
        descriptors = {"text": leader}
    else:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        running = Agent(process)
        descriptors = {"text": process.stdout.fileno(), "errors": process.stderr.fileno()}
    for name, descriptor in descriptors.items():
        thread = threading.Thread(target=_read, args=(running, name, descriptor), daemon=True)
        running._threads.append(thread)
        thread.start()
    try:
        yield running
    finally:
        end_group(process)
        running.join()
        if on_terminal:
            os.close(leader)
        elif process.stderr is not None:
            process.stderr.close()


def _read(running: Agent, name: str, descriptor: int) -> None:
    with suppress(OSError):  # the terminal's other side is closed
        while data := os.read(descriptor, 65536):
            setattr(running, name, getattr(running, name) + data)
