"""Runs all checks in the order in which things depend on each other: `outrider doctor`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.doctor.bundles import Bundles, CheckedBundle
from outrider.edge.doctor.findings import Finding, fault, guarded, ok, warning, without_secrets
from outrider.edge.doctor.hardware import check_disk, check_memory, check_power, check_runtimes
from outrider.edge.doctor.probe import ProbeFailed, Profile, profile_draft
from outrider.edge.drafting.depth import MAX_DEPTH
from outrider.edge.setup.endpoints import Endpoint, Keys
from outrider.models.client.address import split_login, verifier_url, without_password
from outrider.models.errors import ConfigError
from outrider.models.process.extras import is_installed
from outrider.models.process.machine_load import MachineLoad

if TYPE_CHECKING:
    from outrider.edge.doctor.cloud import CloudReport
import sys
from importlib import metadata

DISTRIBUTION: Final = "outrider"
LEAST_PYTHON: Final = (3, 11)
CLASHES: Final = (("onnxruntime", "onnxruntime-gpu"), ("onnxruntime", "onnxruntime-directml"))
"""Packages that write the same files: the one that was installed last works, or neither."""
EXTRAS: Final = ("edge", "edge-onnxruntime")


def check_python() -> Iterator[Finding]:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        yield fault("Python", f"{version}; expected 3.11 or newer", "install a newer Python")
    else:
        yield ok("Python", f"{version} at {sys.executable}")


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
        yield fault("packages", f"{distribution} is not installed as a package", 'pip install "outrider[edge]"')
        return
    num_right, wrong = 0, False
    for extra in ("", *EXTRAS):
        for each in needed:
            is_base = each.marker is None or each.marker.evaluate({"extra": ""})
            if (extra == "") != is_base or (each.marker is not None and not each.marker.evaluate({"extra": extra})):
                continue
            found = _version(each.name)
            if found is not None and each.specifier.contains(found, prereleases=True):
                num_right += 1
                continue
            bracket = f"[{extra}]" if extra else ""
            if found is None and each.name in ("openvino", "onnxruntime"):
                continue  # one runtime is enough; the runtimes' own check says which is missing
            wrong = True
            state = "is not installed" if found is None else f"is {found}"
            yield fault(
                "packages", f"{each.name} {state}; expected {each.specifier}", f'pip install "{distribution}{bracket}"'
            )
    for one, other in CLASHES:
        if _version(one) is not None and _version(other) is not None:
            wrong = True
            yield warning(
                "packages",
                f"{one} and {other} are both installed and overwrite each other",
                f"pip uninstall {one} {other}, then install one of them",
            )
    if not wrong:
        yield ok("packages", f"{distribution} {own}; {num_right} requirements are met")


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
    yield from guarded("Python", check_python)
    yield from guarded("packages", check_packages)
    yield from guarded("runtimes", check_runtimes)
    bundles = Bundles(patient.draft, patient.cache, patient.choice)
    yield from guarded("bundles", bundles.findings)
    reports: list[CloudReport] = []
    for url in dict.fromkeys(patient.urls):
        yield from guarded("cloud", _examine_cloud, patient, url, bundles, reports, secrets)
    draft = _draft_for(bundles, next((each for each in reports if each.facts), None))
    yield from guarded("speed", _examine_speed, patient, draft, reports)
    yield from guarded("memory", check_memory, draft.size_bytes if draft is not None else None)
    yield from guarded("disk", check_disk, patient.cache)
    yield from guarded("power", check_power)


def _examine_cloud(
    patient: Patient, url: str, bundles: Bundles, reports: list[CloudReport], secrets: set[str]
) -> Iterator[Finding]:
    if not is_installed("httpx"):
        yield fault("cloud", "the package httpx is not installed", 'pip install "outrider[edge]"')
        return
    from outrider.edge.doctor.cloud import Cloud, CloudReport, check_tokenizer

    try:
        address, login = split_login(verifier_url(url))
    except ConfigError:
        found = f"{without_password(url)!r} is no address; expected http://host:port or https://host"
        yield fault("cloud", found, "correct it")
        return
    endpoint = next((each for each in patient.keys.endpoints if each.url == verifier_url(url)), None)
    try:
        key = patient.keys.key_of(url, patient.urls)
    except ConfigError as error:
        problem, _, advice = str(error).rpartition("; ")
        yield fault("key file" if login is None else "key", problem, advice)
        return
    if key is not None:
        secrets.add(key)
    label = _label(address, endpoint) if len(patient.urls) > 1 else ""
    is_http_allowed = patient.keys.allows_http(url)
    report = CloudReport(Cloud(address, key, label, is_http_allowed, patient.keys.certificate, login))
    reports.append(report)
    yield from report.findings()
    if report.facts is not None:
        draft = _draft_for(bundles, report)
        if draft is not None and draft.bundle is not None:
            manifest = draft.bundle.manifest
            yield check_tokenizer(report, manifest.name, manifest.tokenizer_fingerprint)
        elif (pulled := bundles.pulled_for(report.facts.tokenizer, report.facts.target)) is not None:
            found = f"the one pulled for {report.facts.name} is damaged, at {pulled}"
            yield fault(report.step_name("draft"), found, "run `outrider pull` again")


def _draft_for(bundles: Bundles, report: CloudReport | None) -> CheckedBundle | None:
    """The draft in use with a cloud; None: no cloud answers."""
    if report is None or report.facts is None:
        return bundles.for_target(None)
    return bundles.for_target(report.facts.tokenizer, report.facts.target)


def _label(url: str, endpoint: Endpoint | None) -> str:
    return endpoint.name if endpoint is not None and endpoint.name else without_password(url).partition("://")[2]


def _examine_speed(patient: Patient, draft: CheckedBundle | None, reports: Iterable[CloudReport]) -> Iterator[Finding]:
    if draft is None or draft.bundle is None:
        return
    with MachineLoad() as load:
        try:
            profile = profile_draft(str(draft.bundle.path), patient.choice, patient.threads)
        except ProbeFailed as error:
            yield fault("draft's device", str(error), "choose another with --draft-device, or see `outrider devices`")
            return
    yield ok(
        "draft's device",
        f"{profile.words}: opened in {profile.open_s:.1f} s, {profile.token_ms:.2f} ms per token "
        f"(longest {profile.worst_ms:.2f})",
    )
    if (words := load.warning()) is not None:
        yield warning("load", words.partition(". ")[0], "measure again when it is idle")
    for report in reports:
        if report.is_working and report.round_trip_ms is not None:
            yield judge_speed(profile, report.step_ms, report.round_trip_ms, report.cloud.label)


def judge_speed(profile: Profile, step_ms: float | None, round_trip_ms: float, label: str = "") -> Finding:
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
