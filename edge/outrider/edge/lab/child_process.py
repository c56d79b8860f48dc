"""Runs helper processes: starts them on chosen cores, waits for the line that says they are up, always ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

from outrider.edge.lab.cores import Cores, running_on
from outrider.models.errors import RuntimeUnavailable
from outrider.models.process import with_parent

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
    secrets: Mapping[str, str] | None = None,
    on_end: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Runs a module; gives what follows `ready_prefix` on the first line that begins with it. Ours imports nothing from
    the working directory, which may be somebody else's.

    arguments: of `python`: `-m`, the module, its own. secrets: variables of the child alone; other users see a command
    line, and not these. on_end: called from another thread, with its last lines, where it was ready and ends by itself.

    Ctrl-C does not reach the child: it ends with the context, however that ends, and with this process, also where that
    is killed. Raises RuntimeUnavailable with its last lines when it ends before it is ready, or is not ready within
    `start_timeout_s`.
    """
    isolated = ["-P"] if arguments[1].startswith("outrider.") else []
    with running_on(cores):
        process = subprocess.Popen(
            [python, *isolated, "-m", with_parent.__name__, *arguments[1:]],
            stdin=subprocess.PIPE,  # ends when this process does
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONIOENCODING": "utf-8"} | dict(secrets or {}),
            start_new_session=os.name == "posix",
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows' way to the same
        )
    watcher = _Watcher(process, ready_prefix, " ".join(arguments[:3]), on_end)
    try:
        yield watcher.wait_until_ready(start_timeout_s)
    finally:
        watcher.end()


class _Watcher(Thread):
    """Reads all that a child says, to its end: a full pipe would stop it. Keeps the last lines."""

    def __init__(
        self, process: subprocess.Popen[str], ready_prefix: str, name: str, on_end: Callable[[str], None] | None
    ) -> None:
        super().__init__(name="outrider-child", daemon=True)
        self._process = process
        self._ready_prefix = ready_prefix
        self._child = name
        self._on_end = on_end
        self._ready: Future[str] = Future()
        self._heard: deque[str] = deque(maxlen=_LAST_LINES)
        self._is_ending = Event()
        self.start()

    def run(self) -> None:
        """Waits for the child's end."""
        readers = [Thread(target=self._read, args=[is_error], daemon=True) for is_error in (False, True)]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        for reader in readers:
            reader.join(_GRACE_S)  # a process that the child has left behind may hold its output open
        last_words = "".join(self._heard).strip()
        if not self._ready.done():
            self._ready.set_exception(
                RuntimeUnavailable(
                    f"`{self._child}` ended with code {code} before it was ready; its last lines:\n{last_words}"
                )
            )
        elif self._on_end is not None and not self._is_ending.is_set():
            self._on_end(f"`{self._child}` ended with code {code}; its last lines:\n{last_words}")

    def _read(self, is_error: bool) -> None:
        stream = self._process.stderr if is_error else self._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                self._heard.append(line)
                if not is_error and not self._ready.done() and line.startswith(self._ready_prefix):
                    self._ready.set_result(line.removeprefix(self._ready_prefix).strip())

    def wait_until_ready(self, timeout_s: float) -> str:
        """The rest of the line. Raises RuntimeUnavailable."""
        try:
            return self._ready.result(timeout_s)
        except TimeoutError:
            self._process.kill()
            return self._ready.result()

    def end(self) -> None:
        """Ends the child, and returns when it has ended."""
        self._is_ending.set()
        self._process.terminate()
        self.join(_GRACE_S)
        if self._process.returncode is None:
            self._process.kill()
        self.join(2 * _GRACE_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
