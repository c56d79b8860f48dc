"""Starts `outrider serve` at login: `outrider service install`, `uninstall`, `status`."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import click
import typer
from rich.console import Console

from outrider.edge.setup.config_file import read_config
from outrider.edge.setup.service import (
    Service,
    remove_service,
    run_command,
    service_here,
    write_service,
)
from outrider.edge.setup.settings import PREFIX, RESERVED, Settings
from outrider.models.process.command_line import CommandGroup, print_line

service_app = typer.Typer(
    cls=CommandGroup,
    name="service",
    help="Start `outrider serve` at login: systemd user unit, launchd agent or Windows task.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@service_app.command()
def install(
    is_printed: Annotated[bool, typer.Option("--print", help="Show the file and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of other content.")] = False,
) -> None:
    """Start `outrider serve` now and at each login. It reads the configuration file, not this shell's variables."""
    service, about = _service(), Console(stderr=True)
    if is_printed:
        encoding = "utf-16" if service.system == "windows" else "utf-8"
        typer.echo(service.content().decode(encoding), nl=False)
        return
    _check_configuration(about)
    changed = write_service(service, force=force)
    print_line(Console(), f"{'wrote' if changed else 'unchanged:'} {service.path}")
    if service.system != "systemd":
        print_line(about, f"note: {service.system}'s file was not run on hardware; please report how it went", "yellow")
    if service.system == "windows" and service.config is not None:
        print_line(about, f"note: a task has no variables; run `setx OUTRIDER_CONFIG {service.config}`", "yellow")
    if service.system == "launchd":
        run_command(service.turn_off()[0])  # launchd keeps an agent that it has read
    for command in service.turn_on():
        if not _run(about, command):
            raise typer.Exit(1)
    print_line(Console(), "started, and starts at each login; see `outrider service status`")


@service_app.command()
def uninstall() -> None:
    """Stop the service and remove its file."""
    service, about = _service(), Console(stderr=True)
    if not service.path.exists():
        print_line(Console(), f"not installed: {service.path} is not there")
        return
    for command in service.turn_off():
        _run(about, command)  # it may be off already; the file goes anyway
    remove_service(service)
    if service.system == "systemd":
        run_command(("systemctl", "--user", "daemon-reload"))
    print_line(Console(), f"removed {service.path}")


@service_app.command()
def status() -> None:
    """Show whether the service is installed, whether its file is this version's, and whether it runs."""
    service = _service()
    if not service.path.exists():
        print_line(Console(), f"not installed: {service.path} is not there; run `outrider service install`")
        raise typer.Exit(1)
    fits = service.path.read_bytes() == service.content()
    print_line(Console(), f"installed: {service.path}")
    if not fits:
        print_line(Console(), "its content is not this version's; run `outrider service install --force`", "yellow")
    does_run, answer = run_command(service.ask())
    print_line(Console(), "runs" if does_run else f"does not run: {answer}")
    _show_log_advice(service)
    raise typer.Exit(0 if does_run else 1)


def _service() -> Service:
    return service_here(__package__ or "")


def _check_configuration(about: Console) -> None:
    """Raises ConfigError for a broken configuration; names variables of this shell that the service will not see."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    Settings(group, read_config())
    unseen = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in RESERVED)
    if unseen:
        print_line(
            about, f"note: the service does not see {', '.join(unseen)}; put it into the configuration file", "yellow"
        )


def _run(about: Console, command: tuple[str, ...]) -> bool:
    succeeded, answer = run_command(command)
    if not succeeded:
        shown = shlex.join(command) if sys.platform != "win32" else " ".join(command)
        print_line(about, f"`{shown}` failed: {answer}; run it yourself when that is mended", "yellow")
    return succeeded


def _show_log_advice(service: Service) -> None:
    if service.system == "systemd":
        print_line(Console(), "its log: journalctl --user -u outrider", "dim")
    elif service.system == "launchd":
        print_line(Console(), f"its log: {service.home / 'Library' / 'Logs' / 'outrider.log'}", "dim")
