"""Runs the verifier that `--target` asks for on this machine, as a child process that ends with this one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from outrider.edge.lab.laboratory import cloud_process
from outrider.models.errors import OutriderError, RuntimeUnavailable

Result = TypeVar("Result")


class OwnVerifier:
    """A running verifier. url: on loopback. key: asked of every client, so that other users of this machine are none.

    failure: why it has ended by itself, with its last lines; None while it runs.
    """

    def __init__(self, key: str) -> None:
        self.url = ""
        self.key = key
        self.failure: str | None = None
        self._act: Callable[[], object] | None = None

    def call_at_end(self, act: Callable[[], object] | None) -> None:
        """Calls `act`, from another thread, where the verifier ends by itself; now where it has ended."""
        self._act = act
        if act is not None and self.failure is not None:
            act()

    def has_ended(self, words: str) -> None:
        """Records the end."""
        self.failure = f"the verifier of --target has ended: {words}"
        act = self._act
        if act is not None:
            with suppress(RuntimeError):  # the event loop has ended, and with it what was asked
                act()

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """`asyncio.run`; raises RuntimeUnavailable, and tries nothing again, where the verifier ends before."""

        async def watched() -> Result:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self.call_at_end(lambda: loop.call_soon_threadsafe(task.cancel))
            try:
                return await main
            finally:
                self.call_at_end(None)

        try:
            return asyncio.run(watched())
        except (asyncio.CancelledError, OutriderError):
            if self.failure is None:
                raise
            raise RuntimeUnavailable(self.failure) from None


@contextmanager
def own_verifier(target: Path) -> Iterator[OwnVerifier]:
    """Starts it on a free port, and ends it with the context. It has all cores, as the draft has: they take turns.

    Raises RuntimeUnavailable with its last lines where it does not start.
    """
    own = OwnVerifier(secrets.token_urlsafe(32))
    options = ("--threads", "0", "--recent")
    with cloud_process(target, None, options, key=own.key, on_end=own.has_ended) as own.url:
        yield own
