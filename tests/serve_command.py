"""Parses `outrider-cloud serve` command lines as the command does, and uses a server that the test itself runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import typer.main
from tests.waiting import wait_until

from outrider.cloud.server.main import app


def serve_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command line, by their names in ServeOptions; fails for one that the command would refuse."""
    assert list(words[:2]) == ["outrider-cloud", "serve"], words
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    return group.commands["serve"].make_context("serve", list(words[2:])).params


@contextmanager
def used_beside(port_file: Path, use: Callable[[str], None]) -> Iterator[None]:
    """Calls `use` with the URL in a thread once the body serves and has written its port; then SIGTERM ends it."""
    has_failed = threading.Event()

    def beside() -> None:
        try:
            wait_until(port_file.exists)
            use(f"http://127.0.0.1:{port_file.read_text().strip()}")
        finally:
            if not has_failed.is_set():
                signal.raise_signal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(beside)
        try:
            yield
        except BaseException:
            has_failed.set()  # nobody would handle the signal
            raise
    used.result()
