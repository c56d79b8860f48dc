"""Asks a runtime for its devices, finds a pulled draft or profiles one, in a process of its own.

A broken driver ends only that process.

`python -m outrider.edge.doctor.probe` is it; its last line is the answer, in JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from outrider.edge.devices.discovery import FoundDevice, FoundRuntime, ModelRuntime, find_runtime
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.devices.profiles import Profile
from outrider.edge.doctor.findings import in_one_line
from outrider.edge.store.shelf import Shelf, find_pulled
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import BundleError, OutriderError

if TYPE_CHECKING:
    from outrider.edge.doctor.npu_steps import Place, Step

TIMEOUT_S: Final = 120.0
LOAD_TIMEOUT_S: Final = 1800.0
"""Of what loads a draft on an NPU: its compiler takes minutes, the first time."""
_ANSWER: Final = "OUTRIDER_PROBE "


class ProbeFailed(Exception):
    """The process gave no answer. The message says why, in one line."""


class TimedDraft(Profile):
    """A draft on this machine. words: what runs it. worst_ms: the longest time of one token."""

    words: str
    worst_ms: float


def ask_runtime(runtime: ModelRuntime) -> FoundRuntime:
    """`find_runtime` in a process of its own. Raises ProbeFailed."""
    answer = _ask(["runtime", runtime])
    return FoundRuntime(runtime, answer["version"], tuple(FoundDevice(**each) for each in answer["devices"]))


def profile_draft(bundle: str, choice: DraftChoice, num_threads: int = 0) -> TimedDraft:
    """Opens the draft and times it in a process of its own. Raises ProbeFailed."""
    try:
        is_for_npu = Bundle.open(bundle, verify=False).manifest.device == "npu"
    except BundleError:
        is_for_npu = False  # the process says what is wrong with it
    limit_s = LOAD_TIMEOUT_S if is_for_npu and not choice.emulate_npu else None
    return TimedDraft(**_ask(["draft", bundle, _as_text(choice), str(num_threads)], limit_s))


def find_pulled_draft(shelf: Path, tokenizer: str, target: str | None, choice: DraftChoice) -> Path | None:
    """Where the draft lies that `find_pulled` finds, in a process of its own: it asks runtimes.

    None where the process gives no answer: the runtimes' own findings say why.
    """
    try:
        found = _ask(["pulled", str(shelf), tokenizer, json.dumps(target), _as_text(choice)])["path"]
    except ProbeFailed:
        return None
    return None if found is None else Path(found)


def ask_openvino(properties: Sequence[str]) -> dict[str, Any]:
    """`npu_steps.openvino_facts` in a process of its own. Raises ProbeFailed."""
    return _ask(["openvino", *properties])


def run_npu_step(
    step: Step, place: Place, bundle: str, choice: DraftChoice, num_threads: int, folder: str, timeout_s: float
) -> dict[str, Any]:
    """`npu_steps.run_step` in a process of its own, which keeps compiled models in `folder`. Raises ProbeFailed."""
    arguments = ["npu", step, place, bundle, _as_text(choice), str(num_threads), folder]
    return _ask(arguments, timeout_s, {"OUTRIDER_CACHE": folder})


def _as_text(choice: DraftChoice) -> str:
    return json.dumps([choice.runtime, choice.device, choice.emulate_npu, choice.provider])


def _ask(
    arguments: Sequence[str], timeout_s: float | None = None, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "outrider.edge.doctor.probe", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            env=os.environ | {"PYTHONIOENCODING": "utf-8"} | (variables or {}),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailed(f"no answer within {timeout_s:.0f} s") from None
    except OSError as error:
        raise ProbeFailed(f"no process could be started: {error.strerror}") from None
    answer = next((line for line in reversed(done.stdout.splitlines()) if line.startswith(_ANSWER)), None)
    if answer is None:
        raise ProbeFailed(_ended(done.returncode, done.stderr))
    found: dict[str, Any] = json.loads(answer.removeprefix(_ANSWER))
    if "error" in found:
        raise ProbeFailed(str(found["error"]))
    return found


def _ended(status: int, stderr: str) -> str:
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    names = {each.value: each.name for each in signal.Signals}
    by = names.get(-status, f"signal {-status}")
    how = f"its process was ended by {by}" if status < 0 else f"its process ended with status {status}"
    return f"{how}: {last[:300]}" if last else how


def _profile(bundle: str, choice: DraftChoice, num_threads: int) -> dict[str, Any]:
    from outrider.edge.drafting.node_times import time_nodes
    from outrider.edge.modes.assemble import open_draft_bundle, open_drafter

    began = time.perf_counter()
    draft = open_drafter(open_draft_bundle(bundle), choice, num_threads)
    opened = time.perf_counter()
    with closing(draft.drafter) as drafter:
        times = time_nodes(drafter)
    return asdict(times) | {"words": draft.placement.words, "open_s": opened - began}


def main(arguments: Sequence[str]) -> None:
    """Answers one question on standard output."""
    what, *rest = arguments
    try:
        if what == "runtime":
            found = find_runtime(cast(ModelRuntime, rest[0])).as_json()
        elif what == "pulled":
            shelf, tokenizer, target, options = rest
            pulled = find_pulled(tokenizer, json.loads(target), DraftChoice(*json.loads(options)), Shelf(Path(shelf)))
            found = {"path": None if pulled is None else str(pulled.bundle.path)}
        elif what == "openvino":
            from outrider.edge.doctor.npu_steps import openvino_facts

            found = openvino_facts(rest)
        elif what == "npu":
            from outrider.edge.doctor.npu_steps import run_step

            step, place, bundle, options, num_threads, folder = rest
            choice, threads = DraftChoice(*json.loads(options)), int(num_threads)
            found = run_step(cast("Step", step), cast("Place", place), bundle, choice, threads, folder)
        else:
            bundle, options, num_threads = rest
            found = _profile(bundle, DraftChoice(*json.loads(options)), int(num_threads))
    except OutriderError as error:
        found = {"error": str(error)}
    except Exception as error:  # a runtime raises what it likes
        found = {"error": in_one_line(error)}
    print(_ANSWER + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
