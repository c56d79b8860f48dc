"""Runs another command of this installation as a child process and returns its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from outrider.models.errors import RuntimeUnavailable

_GRACE_S = 10.0


def run_child_command(arguments: Sequence[str], failure: str) -> str:
    """Runs this Python with `arguments`; gives what the child prints. Its standard error is ours: progress and errors.

    However this ends, the child has ended too; where we are killed, one that runs through `with_parent` ends as well.
    Raises RuntimeUnavailable with `failure` where the child fails, and SystemExit where a signal ends us.
    """
    # A session of its own, so that Ctrl-C in a terminal reaches it through us, once.
    is_posix = os.name == "posix"
    with (
        _ending_on_signals() as release,
        subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,  # ends when this process does
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
            start_new_session=is_posix,
        ) as process,
    ):
        try:
            release()
            assert process.stdout is not None
            printed = process.stdout.read()  # `communicate` would end the child's input at once
            process.wait()
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
def _ending_on_signals() -> Iterator[Callable[[], None]]:
    """Signals that would end us raise an exception instead, so that the child is ended: from the call of what is given
    on. Before it they wait: between the child's start and our guard one would leave the child behind.

    A signal that is ignored, or that has a handler, stays as it is; so does everything outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    came: int | None = None
    is_held = True

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if is_held:
            came = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    def release() -> None:
        nonlocal is_held
        is_held = False
        if came is not None:
            end(came, None)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    usual = (signal.SIG_DFL, signal.default_int_handler)
    changed = {number: before for number in numbers if (before := signal.getsignal(number)) in usual}
    for number in changed:
        signal.signal(number, end)
    try:
        yield release
    finally:
        for number, before in changed.items():
            signal.signal(number, before)
