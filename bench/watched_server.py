"""Runs `outrider-cloud` with a view for measurements: on SIGUSR1 it writes what is alive to the file in WATCH_FILE.

    WATCH_FILE=PATH python -m bench.watched_server serve MODEL ...

The file holds JSON: asyncio tasks, threads, and how many objects of Outrider's own classes exist, by class. Objects
from before the server was ready do not count where it takes them from the collector.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

from outrider.cloud.server.__main__ import main

WATCH_FILE: Final = "WATCH_FILE"


def alive() -> dict[str, Any]:
    """Called on the thread of the event loop."""
    gc.collect()
    kinds = Counter(
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in gc.get_objects()
        if str(type(each).__module__).startswith("outrider.")  # some classes of C have no name of a module
    )
    try:
        tasks = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    except RuntimeError:  # the signal came between two runs of the loop
        tasks = []
    return {"tasks": sorted(tasks), "threads": sorted(t.name for t in threading.enumerate()), "objects": kinds}


def _report(*_: object) -> None:
    path = Path(os.environ[WATCH_FILE])
    new = path.with_suffix(".new")
    new.write_text(json.dumps(alive()), encoding="utf-8")
    new.rename(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _report)
    main()
