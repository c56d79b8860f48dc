"""Makes the report of `outrider doctor --npu`: one block of text to paste into an issue.

Says what the machine is, runs each step of `npu_steps` in a process of its own, on the NPU and on the CPU beside it,
and compares them. A step that fails has its reason in the block, and the others run. No path, user or host name stands
in it.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from outrider.edge.devices.advice import npu_advice
from outrider.edge.devices.energy import energy_meter
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.doctor.examine import GIB, check_power
from outrider.edge.doctor.npu_steps import LEAST_POSITIONS, Place, Step
from outrider.edge.doctor.probe import LOAD_TIMEOUT_S, ProbeFailed, ask_openvino, run_npu_step
from outrider.models.bundle.bundle import Bundle
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import ModelFault
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.process.machine_load import MachineLoad
from outrider.models.version import outrider_version
from outrider.models.visible import visible

FIRST, LAST = "```text", "```"
"""The lines around the block: pasted with them, an issue shows it as it is."""
MAX_LINES: Final = 60
WIDTH: Final = 100
MAX_REASON: Final = 240
NOT_HARDWARE: Final = "emulated on the CPU: not hardware"
DRAWN: Final = SamplingParams(0.8, seed=7)
STEP_TIMEOUT_S: Final = 600.0
PROPERTIES: Final = {
    "FULL_DEVICE_NAME": "name",
    "DEVICE_ARCHITECTURE": "architecture",
    "NPU_DRIVER_VERSION": "driver",
    "NPU_COMPILER_VERSION": "compiler",
    "NPU_COMPILER_TYPE": "compiler type",
    "NPU_DEVICE_TOTAL_MEM_SIZE": "memory",
    "OPTIMIZATION_CAPABILITIES": "runs",
}
"""What OpenVINO is asked of an NPU, and the words for it."""
MAKERS: Final = ("outrider", "openvino", "optimum-intel", "nncf")
"""Versions of a draft's makers that may matter on an NPU."""
_NAME_WIDTH: Final = 18
_ACCELERATORS: Final = r"SYSTEM\CurrentControlSet\Control\Class\{f01a9d53-3ff6-48d2-9f97-c8a7004be10c}"
"""Where Windows lists drivers of its device class ComputeAccelerator."""
_DRIVE: Final = r"[A-Za-z]:[\\/]"
_BEGIN: Final = (
    rf"(?:\bfile:[\\/]+(?:{_DRIVE})?|(?<![\w/:.<>~])"
    rf"(?:{_DRIVE}|\\\\(?:[?.]\\(?:{_DRIVE})?)?|(?:~\w*)?/(?!dev/accel|/)))"
)
_WORD: Final = r"[^\s'\"`,;:()\\/]+"
_FOLDERS: Final = rf"(?:{_WORD}(?: {_WORD}){{0,3}}[\\/]+)*"
"""Further folders of a path, whose names may have blanks: words up to the next separator."""
_PATH: Final = re.compile(
    rf"(?<=['\"`]){_BEGIN}[^'\"`\n]+(?=['\"`])"  # in quotes: whole, whatever its name has
    rf"|{_BEGIN}{_FOLDERS}[^\s'\"`,;)]+"
    rf"|<path>(?:[\\/]+{_FOLDERS})?[^\s'\"`,;)]*"
)
"""More than a path is removed rather than less: also words between one and a later separator."""

Found = dict[str, Any]


@dataclass(slots=True)
class NpuReport:
    """The block. is_faulty: whether a step failed, or a result is beyond its bound."""

    is_faulty: bool = False
    _entries: list[tuple[int, list[str]]] = field(default_factory=list)

    def add(self, name: str, value: str, importance: int = 1) -> None:
        """A line; several where it is long. importance: entries of less are left out first where there are too many."""
        indent = " " * _NAME_WIDTH
        line = f"{name:{_NAME_WIDTH}}{value}"
        lines = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        self._entries.append((importance, lines))

    def fail(self, name: str, reason: str) -> None:
        """A step that failed, or a result that is wrong."""
        self.is_faulty = True
        self.add(name, f"FAILED: {textwrap.shorten(reason, MAX_REASON, placeholder=' ...')}", importance=2)

    @property
    def text(self) -> str:
        """The block with the lines around it: at most MAX_LINES lines of WIDTH columns, plain ASCII.

        Where there are more, the least important entries are left out, the last of them first; the end says how many
        lines they have.
        """
        kept, left_out = dict(enumerate(self._entries)), 0
        while sum(len(lines) for _, lines in kept.values()) + bool(left_out) > MAX_LINES - 2:
            least = min(kept, key=lambda index: (kept[index][0], -index))
            left_out += len(kept.pop(least)[1])
        shown = [line for _, lines in kept.values() for line in lines]
        shown += [f"... {left_out} lines left out"] if left_out else []
        lines = "\n".join(shown).replace("`", "'")
        return f"{FIRST}\n{visible(lines).encode('ascii', 'replace').decode()}\n{LAST}"


def examine_npu(
    draft: Bundle | str, choice: DraftChoice, num_threads: int, on_step: Callable[[str], None] = lambda words: None
) -> NpuReport:
    """Examines the machine, and the draft on it; takes minutes on an NPU.

    draft: an intact bundle, or why there is none. choice: of an NPU, or its emulation. on_step: gets what is done next.
    """
    report = NpuReport()
    report.add("Outrider", f"{outrider_version()}, report of outrider doctor --npu")
    if choice.emulate_npu:
        report.add("NPU", NOT_HARDWARE)
    on_step("asking OpenVINO for its devices")
    has_npu = _add_machine(report, choice)
    if isinstance(draft, str):
        report.fail("draft", without_names(draft))
        return report
    _add_draft(report, draft)
    cache = default_cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    # Its own folder, so that the first time compiles; in the cache, since it takes as much room as the draft.
    with (
        MachineLoad() as load,
        tempfile.TemporaryDirectory(prefix="npu-report-", dir=cache, ignore_cleanup_errors=True) as folder,
    ):
        _measure(_Steps(draft, choice, num_threads, Path(folder), report, on_step), has_npu=has_npu)
    if (words := load.warning()) is not None:
        report.add("load", words.partition(". ")[0])
    return report


# -- the machine -------------------------------------------------------------------------------------------------------


def _add_machine(report: NpuReport, choice: DraftChoice) -> bool:
    """Whether the NPU's steps can be tried."""
    facts: Found = {}
    report.add("system", f"{_system()}, {platform.machine()}, Python {platform.python_version()}")
    try:
        facts = ask_openvino(tuple(PROPERTIES))
    except ProbeFailed as error:
        report.fail("OpenVINO", without_names(str(error)))
    processor = facts.get("processor") or platform.processor() or "unknown"
    report.add("processor", f"{processor}, {psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads")
    report.add("memory", f"{psutil.virtual_memory().total / GIB:.1f} GiB")
    report.add("power", next(check_power()).found)
    if isinstance(meter := energy_meter(), str):
        report.add("energy", f"not counted: {meter}")
    if facts:
        report.add("OpenVINO", f"{facts['version']}, devices: {', '.join(facts['devices']) or 'none'}")
    for device, properties in facts.get("npus", {}).items():
        for name, words in PROPERTIES.items():
            report.add(f"{device} {words}", properties[name] or "not reported", importance=0)
    report.add("NPU in system", system_npu())
    if choice.emulate_npu or not facts or facts["npus"]:
        return True
    report.fail("NPU", f"OpenVINO finds none. {npu_advice()}")
    return False


def _system() -> str:
    if sys.platform == "win32":
        return f"Windows {platform.release()}, build {platform.version()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, kernel {platform.release()}"
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def system_npu(root: Path = Path("/")) -> str:
    """What the system says of an NPU: its node on Linux, its driver on Windows. root: where /dev and /sys are."""
    if sys.platform == "win32":
        return "; ".join(_windows_drivers()) or "Windows lists no driver of one"
    nodes = sorted((root / "dev" / "accel").glob("accel*"))
    if not nodes:
        return "no /dev/accel/accel0"
    may = "may" if any(os.access(node, os.R_OK | os.W_OK) for node in nodes) else "may not"
    module = root / "sys" / "module" / "intel_vpu"
    loaded = f"intel_vpu is {'' if module.is_dir() else 'not '}loaded"
    return f"{', '.join(f'/dev/accel/{node.name}' for node in nodes)}: this user {may} open it; {loaded}"


def _windows_drivers() -> list[str]:
    """Name and version of each; not run on Windows yet."""
    found: list[str] = []
    if sys.platform == "win32":
        import winreg

        with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _ACCELERATORS) as drivers:
            for index in range(winreg.QueryInfoKey(drivers)[0]):
                with suppress(OSError), winreg.OpenKey(drivers, winreg.EnumKey(drivers, index)) as driver:
                    name, version = (winreg.QueryValueEx(driver, key)[0] for key in ("DriverDesc", "DriverVersion"))
                    found.append(f"{name}, driver {version}")
    return found


def _add_draft(report: NpuReport, draft: Bundle) -> None:
    manifest = draft.manifest
    size = sum(entry.size for entry in manifest.files) / 1e6
    report.add(
        "draft",
        f"{manifest.name} ({manifest.architecture.name}), {manifest.precision}, {manifest.runtime} on "
        f"{manifest.device}, {size:.0f} MB, digest {manifest.digest[:16]}",
    )
    shapes = manifest.static_shapes.model_dump() if manifest.static_shapes is not None else {}
    report.add("static shapes", ", ".join(f"{name} {value}" for name, value in shapes.items()) or "none")
    versions = manifest.report.versions
    report.add("made with", ", ".join(f"{name} {versions[name]}" for name in MAKERS if name in versions) or "unknown")


# -- the steps ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Steps:
    """Runs steps, each in a process of its own. folder: for compiled models and scores."""

    draft: Bundle
    choice: DraftChoice
    num_threads: int
    folder: Path
    report: NpuReport
    on_step: Callable[[str], None]

    def run(self, step: Step, place: Place) -> Found:
        """What the step found; empty where it failed, which is then in the report."""
        is_first = step == "load"
        is_long = is_first and not self.choice.emulate_npu
        self.on_step(f"{step} on the {place.upper()}{', which may take minutes' if is_long else ''}")
        draft, timeout_s = str(self.draft.path), LOAD_TIMEOUT_S if is_first else STEP_TIMEOUT_S
        try:
            return run_npu_step(step, place, draft, self.choice, self.num_threads, str(self.folder), timeout_s)
        except ProbeFailed as error:
            self.report.fail(f"{step}, {place.upper()}", without_names(str(error), self.draft.path))
            return {}


def _measure(steps: _Steps, *, has_npu: bool) -> None:
    """Runs every step that can run, and adds what it found. What does not load the first time is not tried again."""
    report, parity, shapes = steps.report, steps.draft.manifest.report.parity, steps.draft.manifest.static_shapes
    first = steps.run("load", "npu") if has_npu else {}
    if shapes is not None and shapes.max_positions < LEAST_POSITIONS:
        _add_times(report, first, {}, {})
        longest = f"the draft takes texts of at most {shapes.max_positions} tokens"
        report.add("other steps", f"not run: {longest}, and they need {LEAST_POSITIONS}")
        return
    npu, cpu = steps.run("times", "npu") if first else {}, steps.run("times", "cpu")
    _add_times(report, first, npu, cpu)
    mine, its = steps.run("scores", "npu") if first else {}, steps.run("scores", "cpu")
    if mine and its:
        _compare(report, steps.folder, parity.max_relative_delta)
    if first and (found := steps.run("fork", "npu")):
        _add_fork(report, found, parity.max_own_delta)


def _add_times(report: NpuReport, first: Found, npu: Found, cpu: Found) -> None:
    def row(name: str, form: Callable[[Any], str], *values: Any) -> None:
        report.add(name, "".join(f"{'-' if value is None else form(value):14}" for value in values))

    def both(key: str) -> tuple[Any, Any]:
        return npu.get(key), cpu.get(key)

    row("", str, "NPU", "CPU")
    row("load, first time", "{:.2f} s".format, first.get("open_s"), None)
    row("load again", "{:.2f} s".format, *both("open_s"))
    row("memory, loaded", "{:.0f} MB".format, *both("memory_mb"))
    row("longest text", "{} tokens".format, *both("max_positions"))
    row("nodes in a pass", "{}".format, *both("max_branches"))
    row(f"prompt of {(npu or cpu).get('prompt_tokens', '-')}", "{:.2f} ms".format, *both("prompt_ms"))
    mine, its = npu.get("calls_ms", {}), cpu.get("calls_ms", {})
    for count in max(mine, its, key=len):
        row(f"{count} node(s)", "{:.2f} ms".format, mine.get(count), its.get(count))
    row("nodes per joule", "{:.1f}".format, *both("nodes_per_joule"))


def _compare(report: NpuReport, folder: Path, bound: float | None) -> None:
    """Compares the scores. bound: how far from the source the draft's check lets a logit be, of the largest."""
    npu, cpu = (np.load(folder / f"{place}.npy") for place in ("npu", "cpu"))
    rows = list(zip(npu, cpu, strict=True))

    def num_equal(params: SamplingParams) -> int:
        return sum(pick(mine, params, place) == pick(its, params, place) for place, (mine, its) in enumerate(rows))

    try:
        greedy, drawn = num_equal(SamplingParams()), num_equal(DRAWN)
    except ModelFault as error:
        report.fail("equal picks", str(error))
        return
    report.add("equal picks", f"{greedy} of {len(rows)} greedy, {drawn} of {len(rows)} at temperature 0.8")
    _add_difference(report, "logits", float(np.abs(npu - cpu).max()), float(np.abs(cpu).max()), bound and 2.0 * bound)


def _add_fork(report: NpuReport, found: Found, bound: float) -> None:
    words = f"{found['num_equal']} of {found['num_rows']} best tokens equal a fresh run's; "
    delta = found["delta"] if found["delta"] is not None else float("nan")
    _add_difference(report, "fork, cut back", delta, found["scale"], bound, words)


def _add_difference(
    report: NpuReport, name: str, delta: float, scale: float, bound: float | None, words: str = ""
) -> None:
    """delta: the largest difference of a logit; scale: the largest logit; bound: of the delta, relative to it."""
    words += f"largest difference {delta:.3g}, largest logit {scale:.3g}"
    if bound is None or delta <= bound * scale:
        report.add(name, words)
    else:
        report.fail(name, f"{words}; expected a difference of at most {bound * scale:.3g}")


def without_names(text: str, *folders: Path) -> str:
    """The text without paths, these folders' among them, and without the names of user and machine."""
    for folder in (*folders, default_cache_dir(), Path(sys.prefix), Path.home()):
        for path in {folder, folder.resolve()}:
            if len(path.parts) > 1:
                text = text.replace(str(path), "<path>")  # may have blanks, where a pattern would end
    text = _PATH.sub("<path>", text)
    names = {platform.node(), platform.node().partition(".")[0]}
    with suppress(OSError, KeyError, ImportError):  # the system knows no such user
        names.add(getpass.getuser())
    for name in sorted(names - {"root"}, key=len, reverse=True):
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return " ".join(text.split())
