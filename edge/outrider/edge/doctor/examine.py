"""Runs all checks in the order in which things depend on each other: `outrider doctor`.

Has the checks of this machine, too: Python, packages, runtimes and drivers, memory, disk, battery.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from outrider.edge.devices.discovery import (
    RUNTIME_NAMES,
    FoundRuntime,
    ModelRuntime,
    advice,
    install_advice,
)
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.doctor.bundles import Bundles
from outrider.edge.doctor.findings import Failed, Finding, fault, from_error, guarded, ok, warning, without_secrets
from outrider.edge.doctor.probe import ProbeFailed, TimedDraft, ask_runtime, profile_draft
from outrider.edge.drafting.depth import MAX_DEPTH
from outrider.edge.setup.endpoints import Keys
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Device
from outrider.models.client.address import split_login, verifier_url, without_password
from outrider.models.errors import ConfigError
from outrider.models.process.extras import is_installed
from outrider.models.process.machine_load import MachineLoad

if TYPE_CHECKING:
    from outrider.edge.doctor.cloud import CloudReport


GIB: Final = 1 << 30
OVERHEAD_BYTES: Final = 300 << 20
"""Memory beyond the bundle's size that an agent may take."""
LEAST_DISK_BYTES: Final = 2 * GIB
NODES: Final[dict[Device, str]] = {"npu": "dev/accel/accel*", "gpu": "dev/dri/renderD*"}
"""Linux shows hardware whose driver has loaded by these."""


def check_runtimes(
    ask: Callable[[ModelRuntime], FoundRuntime] = ask_runtime, root: Path = Path("/")
) -> Iterator[Finding]:
    """Each runtime with its devices; then NPU and GPU, if no runtime drives one. root: where /dev is."""
    installed: list[FoundRuntime] = []
    for runtime, name in RUNTIME_NAMES.items():
        try:
            found = ask(runtime)
        except ProbeFailed as error:
            again = install_advice(runtime).partition("run: ")[2].replace("install", "install --force-reinstall", 1)
            yield fault(name, f"it cannot list its devices: {error}", f"install it again: {again}")
            continue
        if found.version is None:
            yield ok(name, "not installed", install_advice(runtime).partition("; ")[2] + ", if drafts need it")
            continue
        installed.append(found)
        devices = ", ".join(
            f"{each.name} ({each.full_name}{f', driver {each.driver}' if each.driver else ''})"
            for each in found.devices
        )
        if found.has("cpu"):
            yield ok(name, f"{found.version}: {devices}")
        else:
            yield fault(name, f"{found.version} has no CPU, only: {devices or 'nothing'}", advice(runtime, "cpu"))
    if not installed:
        yield warning("runtimes", "no runtime works, so only n-gram lookup drafts", install_advice("openvino"))
    for device, nodes in NODES.items():
        if installed and not any(found.has(device) for found in installed):
            words = advice(installed[0].runtime, device).partition(" To try the NPU path")[0]
            if any(root.glob(nodes)):
                yield warning(device.upper(), "the system shows one, and no runtime drives it", words)
            else:
                yield ok(device.upper(), "none", words)


def check_memory(needed_bytes: int | None, memory: Any = None) -> Iterator[Finding]:
    """Free memory against the draft's. needed_bytes: the bundle's size; None: unknown."""
    memory = memory if memory is not None else psutil.virtual_memory()
    free = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    needed = OVERHEAD_BYTES + (needed_bytes or 0)
    if memory.available < needed:
        yield warning(
            "memory", f"{free}; the draft needs about {needed / GIB:.1f}", "close programs, or take a smaller draft"
        )
    else:
        yield ok("memory", free)


def check_disk(place: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Iterator[Finding]:
    """Free space where bundles and compiled models are kept."""
    there = next((each for each in (place, *place.parents) if each.is_dir()), Path("/"))
    free = usage(there).free
    found = f"{free / GIB:.1f} GiB free for {place}"
    if free < LEAST_DISK_BYTES:
        yield warning("disk", found, "free some space, or keep bundles elsewhere: OUTRIDER_CACHE")
    else:
        yield ok("disk", found)


def check_power(sensors: Callable[[], Any] | None = None) -> Iterator[Finding]:
    """Battery or mains."""
    ask: Any = sensors or getattr(psutil, "sensors_battery", lambda: None)  # missing on some systems
    battery = ask()
    if battery is None:
        yield ok("power", "no battery is reported")
    elif battery.power_plugged is False:
        yield warning("power", f"on battery, {battery.percent:.0f} %", "draft less: --effort low")
    else:
        yield ok("power", f"plugged in, battery at {battery.percent:.0f} %")


DISTRIBUTION: Final = "outrider"
CLASHES: Final = (("onnxruntime", "onnxruntime-gpu"), ("onnxruntime", "onnxruntime-directml"))
"""Packages that write the same files: the one that was installed last works, or neither."""
EXTRAS: Final = ("edge", "edge-onnxruntime")


def check_packages(distribution: str = DISTRIBUTION) -> Iterator[Finding]:
    """Every package that the device needs, against the versions that this release names."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield warning(
            "packages", "the package packaging is missing, so versions are unchecked", "pip install packaging"
        )
        return
    try:
        needed = [Requirement(text) for text in metadata.requires(distribution) or ()]
        own = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise Failed(
            fault("packages", f"{distribution} is not installed as a package", 'pip install "outrider[edge]"')
        ) from None
    num_right, wrong = 0, list[Finding]()
    for each in needed:
        fitting = (name for name in ("", *EXTRAS) if each.marker is None or each.marker.evaluate({"extra": name}))
        extra, found = next(fitting, None), _version(each.name)
        if extra is None or (found is None and each.name in ("openvino", "onnxruntime")):
            continue  # one runtime is enough; the runtimes' own check says which is missing
        if found is not None and each.specifier.contains(found, prereleases=True):
            num_right += 1
            continue
        state = "is not installed" if found is None else f"is {found}"
        wrong.append(
            fault(
                "packages",
                f"{each.name} {state}; expected {each.specifier}",
                f'pip install "{distribution}{f"[{extra}]" if extra else ""}"',
            )
        )
    for one, other in CLASHES:
        if _version(one) is not None and _version(other) is not None:
            wrong.append(
                warning(
                    "packages",
                    f"{one} and {other} are both installed and overwrite each other",
                    f"pip uninstall {one} {other}, then install one of them",
                )
            )
    yield from wrong or [ok("packages", f"{distribution} {own}; {num_right} requirements are met")]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


ENOUGH: Final = 0.5
"""A draft that takes this share of the target's step, or less, has time to spare."""


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined. cache: where bundles are kept. configuration: findings about the configuration file."""

    urls: Sequence[str]
    draft: str
    cache: Path
    keys: Keys
    choice: DraftChoice = AS_BUNDLED
    threads: int = 0
    configuration: Sequence[Finding] = ()


def examine(patient: Patient) -> Iterator[Finding]:
    """Every finding, as soon as it is there; no key stands in any."""
    secrets = {each for each in [patient.keys.general] if each}
    for finding in _examine(patient, secrets):
        yield without_secrets(finding, secrets)


def _examine(patient: Patient, secrets: set[str]) -> Iterator[Finding]:
    yield from patient.configuration
    if os.name != "posix" and any(each.key_file for each in patient.keys.endpoints):
        yield ok("key file", "who else may read it is not checked on Windows", "look at its properties, Security")
    yield ok("Python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")
    bundles = Bundles(patient.draft, patient.cache, patient.choice)
    for name, check in (("packages", check_packages), ("runtimes", check_runtimes), ("bundles", bundles.findings)):
        yield from guarded(name, check)
    reports: list[CloudReport] = []
    for url in dict.fromkeys(patient.urls):
        yield from guarded("cloud", _examine_cloud, patient, url, bundles, reports, secrets)
    facts = next((each.facts for each in reports if each.facts is not None), None)
    draft = bundles.for_target(facts.tokenizer, facts.target) if facts is not None else bundles.for_target(None)
    yield from guarded("speed", _examine_speed, patient, draft, reports)
    draft_bytes = sum(entry.size for entry in draft.manifest.files) if draft is not None else None
    yield from guarded("memory", check_memory, draft_bytes)
    yield from guarded("disk", check_disk, patient.cache)
    yield from guarded("power", check_power)


def _examine_cloud(
    patient: Patient, url: str, bundles: Bundles, reports: list[CloudReport], secrets: set[str]
) -> Iterator[Finding]:
    if not is_installed("httpx"):
        raise Failed(fault("cloud", "the package httpx is not installed", 'pip install "outrider[edge]"'))
    from outrider.edge.doctor.cloud import CloudReport, check_tokenizer

    try:
        address, login = split_login(verifier_url(url))
    except ConfigError:
        raise Failed(
            fault(
                "cloud",
                f"{without_password(url)!r} is no address; expected http://host:port or https://host",
                "correct it",
            )
        ) from None
    try:
        key = patient.keys.key_of(url, patient.urls)
    except ConfigError as error:
        raise Failed(from_error("key file" if login is None else "key", error)) from error
    if key is not None:
        secrets.add(key)
    endpoint = patient.keys.endpoint_of(url)
    name = (endpoint.name if endpoint is not None else None) or without_password(address).partition("://")[2]
    label = name if len(patient.urls) > 1 else ""
    report = CloudReport(address, key, label, patient.keys.allows_http(url), patient.keys.certificate, login)
    reports.append(report)
    yield from report.findings()
    if report.facts is None:
        return
    facts = report.facts
    if (draft := bundles.for_target(facts.tokenizer, facts.target)) is not None:
        yield report.named(check_tokenizer(facts, draft.manifest.name, draft.manifest.tokenizer_fingerprint))
    elif (pulled := bundles.pulled_for(facts.tokenizer, facts.target)) is not None:
        yield report.named(
            fault("draft", f"the one pulled for {facts.name} is damaged, at {pulled}", "run `outrider pull` again")
        )


def _examine_speed(patient: Patient, draft: Bundle | None, reports: Iterable[CloudReport]) -> Iterator[Finding]:
    if draft is None:
        return
    with MachineLoad() as load:
        try:
            profile = profile_draft(str(draft.path), patient.choice, patient.threads)
        except ProbeFailed as error:
            raise Failed(
                fault("draft's device", str(error), "choose another with --draft-device, or see `outrider devices`")
            ) from error
    yield ok(
        "draft's device",
        f"{profile.words}: opened in {profile.open_s:.1f} s, {profile.token_ms:.2f} ms per token "
        f"(longest {profile.worst_ms:.2f})",
    )
    if (words := load.warning()) is not None:
        yield warning("load", words.partition(". ")[0], "measure again when it is idle")
    for report in reports:
        if report.round_trip_ms is not None:
            yield judge_speed(profile, report.step_ms, report.round_trip_ms, report.label)


def judge_speed(profile: TimedDraft, step_ms: float | None, round_trip_ms: float, label: str = "") -> Finding:
    """Which of draft, target and network is slow.

    While a message travels the target makes round_trip / step tokens, and the draft must be ahead by as many.
    """
    name = f"speed with {label}" if label else "speed"
    if step_ms is None:
        return ok(name, "unknown: the server has not measured its step yet", "run a text, then ask again")
    times = (
        f"draft {profile.token_ms:.1f} ms per token, target's step {step_ms:.1f} ms, round trip {round_trip_ms:.1f} ms"
    )
    if profile.token_ms >= step_ms:
        return warning(
            name,
            f"{times}: the draft is slower than the target",
            "use another device (`outrider devices`) or a smaller draft",
        )
    ahead = round_trip_ms / step_ms
    if ahead > MAX_DEPTH:
        return warning(
            name,
            f"{times}: the network is slow; the draft would have to be {ahead:.0f} tokens ahead, at most {MAX_DEPTH}",
            "use a cloud that is nearer",
        )
    if profile.token_ms > ENOUGH * step_ms:
        return warning(
            name,
            f"{times}: the draft leaves little time for alternatives",
            "use another device (`outrider devices`) or a smaller draft",
        )
    return ok(name, f"{times}: the target is the slowest, as it should be")
