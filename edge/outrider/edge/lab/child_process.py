"""Helpers that run beside us: started on chosen cores, known to be up by a line that they print, ended for sure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Final

from outrider.edge.lab.cores import Cores, running_on
from outrider.models.errors import RuntimeUnavailable

_LAST_LINES: Final = 12
_GRACE_S: Final = 5.0


@contextmanager
def child_process(
    arguments: Sequence[str], *, ready_prefix: str, cores: Cores = None, start_timeout_s: float = 300.0
) -> Iterator[str]:
    """Runs this Python with `arguments`; gives what follows `ready_prefix` on the first line that begins with it.

    The child does not hear Ctrl-C: it is ended at the end of the context, however that comes. Raises RuntimeUnavailable
    with its last words when it ends, or has said nothing for `start_timeout_s`, before it is ready.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        with running_on(cores):
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=os.name == "posix",
            )
        try:
            yield _wait_until_ready(process, ready_prefix, start_timeout_s, said)
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[str], prefix: str, timeout_s: float, said: IO[str]) -> str:
    assert process.stdout is not None
    watchdog = threading.Timer(timeout_s, process.kill)  # ends the loop below: the pipe closes
    watchdog.start()
    heard: list[str] = []
    try:
        for line in process.stdout:
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()
            heard.append(line)
    finally:
        watchdog.cancel()
    code = process.wait()
    said.seek(0)
    last_words = "".join((heard + said.readlines())[-_LAST_LINES:]).strip()
    name = " ".join(str(argument) for argument in process.args[1:4]) if isinstance(process.args, list) else "a helper"
    raise RuntimeUnavailable(f"`{name}` ended with code {code} before it was ready; its last words:\n{last_words}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Treats the signals that would end this process without a word like Ctrl-C, so that children are ended too.

    Ctrl-C, because asyncio answers it by cancelling the main task; any other exception could come out of the middle of
    its clean-up. What the process was started to ignore it goes on to ignore: a hangup (nohup), Ctrl-C (a script's
    background job). Leaves with SystemExit and the code that shells expect. For the main thread only.
    """
    received = 0

    def interrupt(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = number
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {number: interrupt for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    except KeyboardInterrupt:
        if received:
            sys.exit(128 + received)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
