"""Runs `outrider serve` with a draft whose runtime can be made to raise, for `bench.soak`.

    python -m bench.faulty_agent serve ...

SIGUSR1 has one call raise; SIGUSR2 ends that, and has the number of calls that have raised written.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from outrider.edge.cli.__main__ import main as run_command
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime

WORDS: Final = "the device was removed (on purpose)"


class Fault:
    """is_due: whether the next call is to raise. num_done: calls that have raised."""

    def __init__(self) -> None:
        self.is_due, self.num_done = False, 0

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """OpenVINO raises RuntimeError for everything, so this does, too."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self.is_due:
                self.is_due = False
                self.num_done += 1
                raise RuntimeError(WORDS)
            return inner(*arguments, **options)

        return call


def main() -> None:
    """Installs the fault and runs the command."""
    fault = Fault()
    for name in ("_run", "_infer_branches"):
        setattr(OpenVinoSequenceRuntime, name, fault.wrap(getattr(OpenVinoSequenceRuntime, name)))

    def begin(*_: object) -> None:
        fault.is_due = True

    def end(*_: object) -> None:
        fault.is_due = False
        sys.stderr.write(f"calls that met the fault: {fault.num_done}\n")

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    run_command()


if __name__ == "__main__":
    main()
