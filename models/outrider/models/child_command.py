"""Runs another command of this installation as a child process and returns its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from outrider.models.errors import RuntimeUnavailable

_GRACE_S = 10.0


def run_child_command(arguments: Sequence[str], failure: str) -> str:
    """Runs this Python with `arguments`; gives what the child prints. Its standard error is ours: progress and errors.

    However this ends, the child has ended too. Raises RuntimeUnavailable with `failure` where the child fails, and
    SystemExit where a signal ends us.
    """
    # A session of its own, so that Ctrl-C in a terminal reaches it through us, once.
    is_posix = os.name == "posix"
    with (
        _ending_on_signals(),
        subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
            start_new_session=is_posix,
        ) as process,
    ):
        try:
            printed, _ = process.communicate()
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        raise RuntimeUnavailable(failure)
    return printed


def _end(process: subprocess.Popen[str]) -> None:
    """Lets the child remove what it has half written; ends it for sure, and at once on a second Ctrl-C."""
    try:
        process.terminate()
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Signals that would end us at once raise SystemExit instead, so that the child is ended.

    A signal that is ignored, or that has a handler, stays as it is; so does everything outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    changed = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
