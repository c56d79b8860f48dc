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
    source_of,
)
from outrider.edge.doctor.findings import Finding, Status, from_error, ok, warning
from outrider.edge.setup.endpoints import Keys
from outrider.edge.setup.settings import settings_here
from outrider.edge.store.auto import AUTO
from outrider.models.bundle.reference_export import DEFAULT_VERIFIER_URL
from outrider.models.cache_folder import default_cache_dir
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import takes_options
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
    _keys: ClassVar = KeyOptions


@takes_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check everything from Python to the cloud, one line each, and say what to do.

    Installation, devices, drivers, bundles, tokenizer, connection, key, round trip, clock, speed, memory, battery.
    Exit status 1 if there is a fault. Keys are never shown.
    """
    from outrider.edge.doctor.examine import Patient, examine  # not for each command

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
