"""Streams a text through real processes and strikes it in the middle, for `bench.faults`; what it shares with
`bench.soak` of striking.
"""

from __future__ import annotations

import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.processes import Program, Text, device_counts, endpoint_arguments, read_text, started, verifier

from outrider.edge.lab.cores import plan_cores

STRIKES_AT: Final = 1 / 3
"""Part of the text that has arrived when the fault strikes."""
LAST: Final = 0.75
"""Accepted tokens are counted from here on: those of drafts that were under way at the strike have been seen."""


@dataclass(slots=True)
class Row:
    """What a fault did. lost_s: more than the undisturbed text took. saw: the error that the client got.

    drafting: what came of it. is_met: the text is the same, or the error is the expected one.
    """

    fault: str
    is_equal: bool
    lost_s: float
    saw: str
    drafting: str
    is_met: bool
    log: list[str] = field(default_factory=list)
    notes: str = ""


@dataclass(slots=True)
class Scene:
    """The pair, the request, and what is true without faults. whole: the text; took_s: how long it takes."""

    target: Path
    draft: Path
    place: Path
    body: dict[str, Any]
    whole: str = ""
    took_s: float = 0.0

    def cloud(self, target: Path | None = None, **more: Any) -> Program:
        """A verifier; it does not run yet."""
        return verifier(target or self.target, self.place, plan_cores().cloud, "--no-lookup", "--no-recent", **more)

    def agent(
        self, clouds: Sequence[str], fault: str = "", environment: Mapping[str, str] | None = None, *options: str
    ) -> Program:
        """A local endpoint; it does not run yet. fault: of `bench.faulty_agent`."""
        module = ["bench.faulty_agent", fault] if fault else ["outrider.edge.cli"]
        arguments = ["-m", *module, *endpoint_arguments(self.draft, clouds), "--metrics", *options]
        log = self.place / f"agent-{time.monotonic_ns()}.log"
        return Program(arguments, log, plan_cores().agent, environment)


@dataclass(slots=True)
class Struck:
    """A text with a fault in it. counts: the agent's in the last quarter of the text; empty where it has none.

    log: what the agent wrote since the text began.
    """

    text: Text
    counts: dict[str, float]
    log: str


@contextmanager
def running(
    scene: Scene, num_clouds: int = 1, fault: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[tuple[list[Program], Program]]:
    """Verifiers, and an agent that knows them. environment: of all."""
    with ExitStack() as stack:
        clouds = [stack.enter_context(started(scene.cloud(environment=environment))) for _ in range(num_clouds)]
        agent = scene.agent([cloud.url for cloud in clouds], fault, environment)
        yield clouds, stack.enter_context(started(agent))


def strike(scene: Scene, agent: Program, *faults: Callable[[], None]) -> Struck:
    """Reads the text. The first fault strikes at a third of it, a second one at two thirds."""
    read_text(agent.url, {**scene.body, "max_tokens": 16})  # warms everything up
    said, left = len(agent.said()), list(faults)
    counts: list[dict[str, float]] = []

    def on_text(text: str) -> None:
        num_struck = len(faults) - len(left)
        if left and len(text) >= len(scene.whole) * STRIKES_AT * (1 + num_struck):
            left.pop(0)()
        if not counts and len(text) >= len(scene.whole) * LAST:
            counts.append(device_counts(agent.url))

    found = read_text(agent.url, scene.body, on_text)
    if left:
        raise SystemExit(f"the text ended before the fault struck: {found.text[:80]!r} {found.error}")
    since = device_counts(agent.url) if counts else {}
    since = {name: count - counts[0].get(name, 0.0) for name, count in since.items()}
    return Struck(found, since, agent.said(said))


def row_of(scene: Scene, fault: str, struck: Struck, notes: str = "", *, is_drafted: bool = True) -> Row:
    """The row of a fault that must not change the text. is_drafted: drafting must come back before the text ends."""
    text = struck.text
    is_equal = text.text == scene.whole and not text.error
    is_met = is_equal and (bool(struck.counts.get("accepted")) or not is_drafted)
    return Row(
        fault,
        is_equal,
        text.took_s - scene.took_s,
        text.error or "nothing",
        drafting_of(struck.counts),
        is_met,
        struck.log.splitlines(),
        notes,
    )


def drafting_of(counts: Mapping[str, float]) -> str:
    """What came of the device's drafting, in words."""
    accepted, committed = counts.get("accepted", 0.0), counts.get("committed", 0.0)
    sessions = f"; session opened again {counts['resumed']:.0f}x" if counts.get("resumed") else ""
    return f"{'came back' if accepted else 'no more'}: {accepted:.0f} of the last {committed:.0f} tokens{sessions}"


def pause(send_signal: Callable[[int], None], seconds: float) -> None:
    """Stops a process, and starts it again."""
    send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    send_signal(signal.SIGCONT)


def num_met(agent: Program) -> int:
    """What `bench.faulty_agent` wrote when the fault last ended; 0 before."""
    return int([0, *re.findall(r"calls that met the fault: (\d+)", agent.said())][-1])


def require_preload() -> None:
    """Raises SystemExit where `WrongClock` cannot be made."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        raise SystemExit("needs Linux and a C compiler `cc`")


class WrongClock:
    """A wall clock for processes that are started with `environment`. place: a directory for its files."""

    def __init__(self, place: Path) -> None:
        library, self._offset = place / "wrong_clock.so", place / "clock"
        source = Path(__file__).with_name("wrong_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        self._offset.write_bytes(struct.pack("<q", 0))
        self.environment = {"LD_PRELOAD": str(library), "OUTRIDER_BENCH_CLOCK": str(self._offset)}

    def jump_to(self, seconds: int) -> None:
        """It is wrong by so many seconds from now on."""
        with self._offset.open("r+b") as place:
            place.write(struct.pack("<q", seconds))
