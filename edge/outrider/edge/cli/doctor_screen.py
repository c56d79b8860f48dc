"""Finds out what is broken or slow: `outrider doctor`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

from outrider.edge.cli.option_groups import (
    REMOVED_DRAFTING,
    Clouds,
    Drafts,
    KeyOptions,
    PlaceOptions,
    Threads,
    is_typed,
    refuse_idle,
    source_of,
)
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice, place_draft
from outrider.edge.doctor.findings import Finding, Status, from_error, ok, warning
from outrider.edge.setup.endpoints import Keys
from outrider.edge.setup.settings import settings_here
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.reference_export import AUTO, DEFAULT_VERIFIER_URL, REFERENCE
from outrider.models.cache_folder import default_cache_dir, expanded
from outrider.models.errors import ConfigError, OutriderError
from outrider.models.process.command_line import print_line, takes_options
from outrider.models.visible import visible

STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class DoctorOptions(PlaceOptions, KeyOptions):
    """The command line. Raises ConfigError for options that contradict each other."""

    REMOVED: ClassVar = {name: REMOVED_DRAFTING[name] for name in ("--provider", "--tls-client-key")}

    cloud: Clouds = field(default_factory=lambda: [DEFAULT_VERIFIER_URL])
    draft: Drafts = field(default_factory=lambda: [AUTO])
    _place: ClassVar = PlaceOptions
    threads: Threads = 0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False
    npu: Annotated[
        bool,
        typer.Option(
            "--npu",
            help="Measure an NPU's draft on it, in minutes; print one block to paste into an issue, nothing else.",
        ),
    ] = False
    _keys: ClassVar = KeyOptions

    def __post_init__(self) -> None:
        """Raises ConfigError, too, for options that were typed and that --npu leaves without effect."""
        super().__post_init__()
        if not self.npu:
            return
        refuse_idle(self, True, "--npu asks no cloud", "cloud", "api_key", "key_file", "allow_http", "tls_client_cert")
        if len(self.draft) > 1:
            raise ConfigError(f"--npu measures one draft, and {len(self.draft)} are named; name one with --draft")
        if self.as_json and is_typed("as_json"):
            raise ConfigError("--npu prints a block of text, and --json a document; leave one of them out")
        if self.choice.wanted_device == "npu" and self.choice.wanted_runtime in (None, "openvino"):
            return
        if self.choice != AS_BUNDLED and (is_typed("draft_device") or is_typed("runtime")):
            raise ConfigError("--npu runs OpenVINO on an NPU; leave out --runtime, and --draft-device but for an NPU")
        object.__setattr__(self, "choice", DraftChoice(device="npu"))


@takes_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check everything from Python to the cloud, one line each, and say what to do.

    Installation, devices, drivers, bundles, tokenizer, connection, key, round trip, clock, speed, memory, battery.
    With --npu only the NPU, and a draft on it. Exit status 1 if there is a fault. Keys are never shown.
    """
    if options.npu:
        show_npu(options)
        return
    from outrider.edge.doctor.bundles import check_bundle  # not for each command
    from outrider.edge.doctor.examine import Patient, examine

    configuration = list(check_configuration())
    try:
        keys = options.keys()
    except ConfigError as error:
        configuration.append(from_error("key file", error))
        keys = Keys()
    urls = options.cloud
    if source_of("cloud") is ParameterSource.DEFAULT and (target := configured_target()) is not None:
        urls = []
        configuration.append(ok("cloud", f"none is asked: commands run the verifier here, since target is {target}"))
    others = [expanded(each) for each in options.draft[1:] if each not in (AUTO, REFERENCE)]
    configuration += [check_bundle(each, is_used=True)[0] for each in others]
    patient = Patient(urls, options.draft[0], default_cache_dir(), keys, options.choice, options.threads, configuration)
    console, found = Console(), []
    for finding in examine(patient):
        found.append(finding)
        if not options.as_json:
            show_finding(console, finding)
    counts = Counter(each.status for each in found)
    if options.as_json:
        worst = next((status for status in ("fault", "warning") if counts[status]), "ok")
        typer.echo(json.dumps({"status": worst, "checks": [each.as_json() for each in found]}, indent=2))
    else:
        console.print(f"{len(found)} checks; faults: {counts['fault']}, warnings: {counts['warning']}", highlight=False)
    if counts["fault"]:
        raise typer.Exit(1)


def show_npu(options: DoctorOptions) -> None:
    """Prints the report of the NPU; what is done meanwhile goes to standard error. Raises as `open_draft_bundle`."""
    from outrider.edge.doctor.npu import examine_npu  # not for each command

    about = Console(stderr=True)
    draft = draft_for_npu(options.draft[0], options.choice)
    report = examine_npu(draft, options.choice, options.threads, lambda words: print_line(about, words, "dim"))
    typer.echo(report.text)
    if report.is_faulty:
        raise typer.Exit(1)


def draft_for_npu(named: str, choice: DraftChoice) -> Bundle | str:
    """The named draft, else the one for an NPU that was pulled last, else the reference draft, which is exported.

    In words why there is none, where none is named. Raises BundleError for a named one that is damaged, ConfigError for
    one that is not for an NPU.
    """
    from outrider.edge.modes.assemble import open_draft_bundle

    if named not in (AUTO, REFERENCE):
        bundle = open_draft_bundle(expanded(named))
        place_draft(bundle.manifest, DraftChoice(emulate_npu=True))  # whether it may; not whether an NPU is here
        return bundle
    pulled = [each for each in Shelf().drafts() if named == AUTO and each.bundle.manifest.device == "npu"]
    try:
        if pulled:
            return open_draft_bundle(max(pulled, key=lambda each: each.latest_s(None)).bundle.path)
        from outrider.edge.cli.draft_source import default_draft

        return open_draft_bundle(default_draft(choice, widen_mb=0.0))
    except OutriderError as error:
        return str(error)


def configured_target() -> str | None:
    """The target that the environment or the file has commands run on this machine."""
    with suppress(ConfigError):  # `check_configuration` has reported it
        settings = settings_here()
        for each in (each for name in ("run", "chat", "serve") for each in settings.resolve(name)):
            if each.name == "target" and each.value is not None:
                return str(each.value)
    return None


def check_configuration() -> Iterator[Finding]:
    """The configuration file, variables of ours that nothing reads, and key files."""
    try:
        settings = settings_here()
    except ConfigError as error:
        yield from_error("configuration", error)
        return
    config = settings.config
    if config.is_there:
        yield ok("configuration", f"{config.path} fits; clouds in it: {len(settings.endpoints)}")
    else:
        yield ok("configuration", f"no file at {config.path}", "`outrider config init` writes an example")
    problems = set()
    for command in settings.commands:
        try:
            settings.check(command)
        except ConfigError as error:
            problems.add(from_error("configuration", error, "warning"))
    yield from sorted(problems, key=lambda each: (each.found, each.advice))
    for name, closest in settings.unknown_variables().items():
        advice = f"did you mean {closest}?" if closest else "unset it"
        yield warning("environment", f"{name} is set, and no option has that name", advice)


def show_finding(console: Console, finding: Finding) -> None:
    """One line; whole in a file or a pipe."""
    line = Text.assemble((f"{finding.status:8}", STYLES[finding.status]), visible(f"{finding.name}: {finding.found}"))
    if finding.advice:
        line.append(visible(f". {finding.advice[0].upper()}{finding.advice[1:]}"), style="dim")
    console.print(line, soft_wrap=not console.is_terminal, highlight=False)
