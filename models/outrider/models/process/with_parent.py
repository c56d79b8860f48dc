"""Runs a module as `python -m` does, and ends it with the process that started it: also where that one was killed.

`python -m outrider.models.process.with_parent MODULE ARGUMENT...`; the parent keeps a pipe to its standard input open
as long as it lives. Works on every system, and needs nothing of the module.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


def end_with_parent() -> None:
    """Ends this process once its standard input does; the module reads an empty one in its place."""
    pipe, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def wait() -> None:
        while os.read(pipe, 64):
            pass
        os._exit(1)  # nobody is left to answer to; the system frees the memory

    threading.Thread(target=wait, name="outrider-parent", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
