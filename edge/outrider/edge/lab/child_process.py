"""Runs helper processes: starts them on chosen cores, waits for the line that says they are up, always ends them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, TypeVar

from outrider.edge.lab.cores import Cores, running_on
from outrider.models.errors import RuntimeUnavailable

Result = TypeVar("Result")

_LAST_LINES: Final = 12
_GRACE_S: Final = 5.0


@contextmanager
def child_process(
    arguments: Sequence[str],
    *,
    ready_prefix: str,
    cores: Cores = None,
    start_timeout_s: float = 300.0,
    python: str = sys.executable,
) -> Iterator[str]:
    """Runs `python` with `arguments`; gives what follows `ready_prefix` on the first line that begins with it.

    Ctrl-C does not reach the child: it is ended with the context, however that ends. Raises RuntimeUnavailable with its
    last lines when it ends before it is ready, or is not ready within `start_timeout_s`.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        with running_on(cores):
            process = subprocess.Popen(
                [python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                encoding="utf-8",
                env=os.environ | {"PYTHONIOENCODING": "utf-8"},
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
    raise RuntimeUnavailable(f"`{name}` ended with code {code} before it was ready; its last lines:\n{last_words}")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class EndingOnSignals:
    """A context that treats signals that would end this process at once like Ctrl-C, so that children are ended too.

    What `run` runs is cancelled, as asyncio does on Ctrl-C: an exception could come out of the middle of its clean-up.
    A hangup that the process was started to ignore (nohup) it goes on to ignore. Leaves with SystemExit and the code
    that shells expect. For the main thread only.
    """

    def __init__(self) -> None:
        self._received = 0
        self._before: dict[int, Any] = {}
        self._main: asyncio.Task[Any] | None = None

    def __enter__(self) -> EndingOnSignals:
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        self._before = {
            number: signal.signal(number, self._interrupt)
            for number in numbers
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._received and isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            sys.exit(128 + self._received)

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """`asyncio.run`, which cancels `main` and lets it clean up on any of these signals."""

        async def cancellable() -> Result:
            self._main = asyncio.current_task()
            try:
                return await main
            finally:
                self._main = None

        result = asyncio.run(cancellable())
        if self._received:  # too late to cancel it
            raise KeyboardInterrupt
        return result

    def _interrupt(self, number: int, frame: object) -> None:
        self._received = number
        if self._main is None:
            raise KeyboardInterrupt
        self._main.get_loop().call_soon_threadsafe(self._main.cancel)
