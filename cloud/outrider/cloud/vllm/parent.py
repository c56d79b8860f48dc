"""Ends a process of vLLM's with the process that started it: a server that is killed cannot end it itself."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from multiprocessing import connection
from typing import Final

PLACE_VARIABLE: Final = "OUTRIDER_VLLM"
"""Environment variable with the directory of our sockets and of `wire.SETTINGS_NAME`; vLLM's processes inherit it."""
_EXIT_CODE: Final = 1
_is_watching = threading.Lock()


def end_with_parent() -> None:
    """Watches the parent from now on, once; does nothing in a process that the server did not start."""
    parent, place = multiprocessing.parent_process(), os.environ.get(PLACE_VARIABLE)
    if parent is None or place is None or not _is_watching.acquire(blocking=False):
        return

    def wait() -> None:
        connection.wait([parent.sentinel])
        shutil.rmtree(place, ignore_errors=True)
        os._exit(_EXIT_CODE)  # nobody is left to answer to; the system frees the memory

    threading.Thread(target=wait, name="outrider-parent", daemon=True).start()
