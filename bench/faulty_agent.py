"""Runs `outrider serve` with a fault that a signal sets off: SIGUSR1 begins it, SIGUSR2 ends it.

    python -m bench.faulty_agent FAULT serve ...

FAULT: `call` has one call of the draft's runtime raise; `runtime` every call until the end; `posts` sends draft
messages twice, or late, so that later ones overtake them. For `bench.faults`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, Final

from tests.faulty_posts import FaultRates, FaultyPosts

from outrider.edge.cli.__main__ import main as run_command
from outrider.models.client.client import VerifierClient
from outrider.models.client.messages import DraftMessage
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime

RATES: Final = FaultRates(duplicate=0.5, delay=0.5, max_delay_s=0.2)
WORDS: Final = "the device was removed (on purpose)"


class Fault:
    """num_left: calls that are still to fail; num_done: those that have."""

    def __init__(self) -> None:
        self.num_left = self.num_done = 0

    def take(self) -> bool:
        """Whether this call fails."""
        if not self.num_left:
            return False
        self.num_left -= 1
        self.num_done += 1
        return True


def _have_runtime_raise(fault: Fault) -> None:
    """OpenVINO raises RuntimeError for everything, so this does, too."""

    def wrap(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if fault.take():
                raise RuntimeError(WORDS)
            return inner(*arguments, **options)

        return call

    for name in ("_run", "_infer_branches"):
        setattr(OpenVinoSequenceRuntime, name, wrap(getattr(OpenVinoSequenceRuntime, name)))


class _Posts:
    """A client's own way of posting."""

    def __init__(self, client: VerifierClient) -> None:
        self._client = client

    async def post_drafts(self, session: str, message: DraftMessage) -> float:
        return await _post(self._client, session, message)


_post: Final = VerifierClient.post_drafts


def _have_posts_fail(fault: Fault) -> None:
    wrapped: dict[str, FaultyPosts] = {}  # by session: each has faults of its own

    async def post(self: VerifierClient, session: str, message: DraftMessage) -> float:
        if not fault.take():
            return await _post(self, session, message)
        faulty = wrapped.setdefault(session, FaultyPosts(_Posts(self), RATES, seed=7))
        return await faulty.post_drafts(session, message) or 0.0

    VerifierClient.post_drafts = post  # type: ignore[method-assign]


KINDS: Final[dict[str, tuple[Callable[[Fault], None], int]]] = {
    "call": (_have_runtime_raise, 1),
    "runtime": (_have_runtime_raise, 1 << 30),
    "posts": (_have_posts_fail, 1 << 30),
}


def main() -> None:
    """Installs the fault and runs the command."""
    fault = Fault()
    install, num_calls = KINDS[sys.argv.pop(1)]
    install(fault)

    def begin(*_: object) -> None:
        fault.num_left = num_calls

    def end(*_: object) -> None:
        fault.num_left = 0
        sys.stderr.write(f"calls that met the fault: {fault.num_done}\n")

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    run_command()


if __name__ == "__main__":
    main()
