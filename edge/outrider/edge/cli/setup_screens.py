"""Shows and writes what `outrider` reads and starts by itself: `outrider config` and `outrider service`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import click
import typer
from rich.console import Console

from outrider.edge.setup.config_file import VARIABLE, config_path
from outrider.edge.setup.service import System, remove_service, run_command, service_here, write_service
from outrider.edge.setup.settings import (
    PREFIX,
    SECRETS,
    Setting,
    Settings,
    expectation,
    long_names,
    plain,
    settings_here,
)
from outrider.models.client.address import without_password
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import CommandGroup, kind_of, print_line

config_app = typer.Typer(
    cls=CommandGroup,
    name="config",
    help="Show each option's value, and whether a flag, the environment, the configuration file or the default set it.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@config_app.callback(invoke_without_command=True)
def config(context: typer.Context, as_json: AsJson = False) -> None:
    """Show each option's value and where it came from: a flag, the environment, the configuration file, the default.

    The file is TOML: a table for each command, [common] for all, [[endpoint]] for each cloud. Keys are never shown.
    """
    if context.invoked_subcommand is None:
        _show(as_json, settings_here())


@config_app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def show(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND [OPTIONS]...]", help="As after `outrider`: run --max-tokens 5."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the values that a command would get with these flags; all commands' without one."""
    settings = settings_here()
    given = list(arguments or ())
    command = given.pop(0) if given else None
    if command is not None and command not in settings.commands:
        raise click.UsageError(
            f"{command!r} is no command with options; expected one of {', '.join(settings.commands)}."
        )
    _show(as_json, settings, command, given)


@config_app.command()
def path() -> None:
    """Print where the configuration file is, whether it is there or not."""
    typer.echo(config_path())


@config_app.command()
def init() -> None:
    """Write a commented example of the file. One that is there is never overwritten."""
    place, commands = config_path(), settings_here(is_read=False).commands
    text = HEAD + "".join(f"\n[{name}]\n" + "".join(_lines(each)) for name, each in commands.items())
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with place.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{place} is there already and is left as it is; edit it, or remove it first") from None
    print_line(Console(), f"wrote {place}")


def _show(as_json: bool, settings: Settings, command: str | None = None, arguments: Sequence[str] = ()) -> None:
    found: list[tuple[str, list[Setting] | ConfigError]] = []
    for each in settings.commands if command is None else [command]:
        try:
            found.append((each, settings.resolve(each, arguments)))
        except ConfigError as error:
            if command is not None:
                raise
            found.append((each, error))  # the other commands' values are shown
    if as_json:
        typer.echo(json.dumps(_document(settings, found), indent=2))
        return
    console, file = Console(), settings.config
    state = "" if file.is_there else " (not there; `outrider config init` writes an example)"
    print_line(console, f"file {file.path}{state}; {VARIABLE} names another")
    for endpoint in settings.endpoints:
        key = f"key from {endpoint.key_file}" if endpoint.key_file is not None else "no key file"
        name = f"{endpoint.name}: " if endpoint.name else ""
        print_line(console, f"cloud {name}{without_password(endpoint.url)}, {key}")
    for each, values in found:
        print_line(console, f"\n[{each}]", "bold")
        if isinstance(values, ConfigError):
            print_line(console, f"  cannot run: {values}", "red")
            continue
        width = max((len(value.name) for value in values), default=0)
        shown = [("-" if value.value is None else json.dumps(value.shown, ensure_ascii=False)) for value in values]
        wide = min(32, max(map(len, shown), default=0))
        for value, text in zip(values, shown, strict=True):
            where = f" {value.where}" if value.where else ""
            line = f"  {value.name:{width}}  {text:{wide}}  {value.source}{where}"
            print_line(console, line, "dim" if value.source == "default" else "")


def _document(settings: Settings, found: list[tuple[str, list[Setting] | ConfigError]]) -> dict[str, object]:
    return {
        "file": str(settings.config.path),
        "is_there": settings.config.is_there,
        "endpoints": [
            each.model_dump(exclude={"url"}) | {"url": without_password(each.url)} for each in settings.endpoints
        ],
        "commands": {
            name: {"error": str(values)}
            if isinstance(values, ConfigError)
            else {value.name: {"value": value.shown, "source": value.source, "where": value.where} for value in values}
            for name, values in found
        },
    }


HEAD: Final = """\
# Configuration of `outrider`. An option's value comes from the command line, else from the environment, else from here,
# else it is the default. `outrider config` shows each value and where it came from.
# Remove the # before a line to use it. Paths may begin with ~; relative ones begin beside this file.

# Each cloud, the preferred one first. Its key lies in a file of its own that only you can read (chmod 600).
#[[endpoint]]
#name = "work"
#url = "https://cloud.example.com"
#key_file = "work.key"

# For all commands that have the option.
[common]
#key_file = "cloud.key"
#draft = "~/drafts/mine"
#effort = "normal"
"""


def _lines(command: click.Command) -> Iterator[str]:
    for option in command.params:
        names = long_names(option) if isinstance(option, click.Option) and not option.is_eager else []
        if not isinstance(option, click.Option) or not names or not SECRETS.isdisjoint(names):
            continue
        text = f"{option.help or ''} Takes {expectation(option)}.".strip()
        yield from (f"# {line}\n" for line in textwrap.wrap(text, 108))
        yield f"#{names[0]} = {_example(option)}\n"


def _example(option: click.Option) -> str:
    """The default in TOML; where there is none, a value that the option takes."""
    default = plain(option.default() if callable(option.default) else option.default)
    if isinstance(default, list | bool | int | float | str):
        return json.dumps(default, ensure_ascii=False)  # of these, TOML's spelling is JSON's
    if isinstance(option.type, click.Choice):
        return json.dumps(plain(next(iter(option.type.choices))))
    least = getattr(option.type, "min", None) or 1
    return {"bool": "true", "int": f"{least}", "float": f"{float(least)}", "str": '"..."'}[kind_of(option)]


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
    service, about = service_here(__package__ or ""), Console(stderr=True)
    if is_printed:
        typer.echo(service.content.decode(service.encoding), nl=False)
        return
    settings_here()  # a broken configuration is not installed
    for name in sorted(name for name in os.environ if name.startswith(PREFIX) and name != VARIABLE):
        print_line(about, f"note: the service does not see {name}; {_instead(name, service.system)}", "yellow")
    changed = write_service(service, force=force)
    print_line(Console(), f"{'wrote' if changed else 'unchanged:'} {service.path}")
    if service.system != "systemd":
        print_line(about, f"note: {service.system}'s file was not run on hardware; please report how it went", "yellow")
    if service.system == "windows" and service.config is not None:
        print_line(about, f"note: a task has no variables; run `setx OUTRIDER_CONFIG {service.config}`", "yellow")
    if service.system != "systemd":
        run_command(service.turn_off[0])  # launchd keeps an agent that it has read, Windows the process of before
    if not all(_run(about, command) for command in service.turn_on):
        raise typer.Exit(1)
    print_line(Console(), "started, and starts at each login; see `outrider service status`")


def _instead(variable: str, system: System) -> str:
    """How the service gets what a variable of the shell says."""
    if variable == "OUTRIDER_API_KEYS":
        return "write the keys to a file, and name that as api_key_file below [serve] in the configuration file"
    if variable.endswith("_API_KEY"):
        return "write the key to a file, and name that as key_file in the configuration file"
    if variable != "OUTRIDER_CACHE":
        return "put it into the configuration file"
    return {
        "systemd": f"run `systemctl --user edit outrider`, and add `Environment={variable}=DIR` below [Service]",
        "launchd": f"add {variable} to its file's EnvironmentVariables",
        "windows": f"run `setx {variable} DIR`",
    }[system]


@service_app.command()
def uninstall() -> None:
    """Stop the service and remove its file."""
    service, about = service_here(__package__ or ""), Console(stderr=True)
    if not service.path.exists():
        print_line(Console(), f"not installed: {service.path} is not there")
        return
    for command in service.turn_off:
        _run(about, command)  # it may be off already; the file goes anyway
    remove_service(service)
    if service.system == "systemd":
        run_command(service.turn_on[0])  # the manager forgets the unit
    print_line(Console(), f"removed {service.path}")


@service_app.command()
def status() -> None:
    """Show whether the service is installed, whether its file is this version's, and whether it runs."""
    service = service_here(__package__ or "")
    if not service.path.exists():
        print_line(Console(), f"not installed: {service.path} is not there; run `outrider service install`")
        raise typer.Exit(1)
    print_line(Console(), f"installed: {service.path}")
    if service.path.read_bytes() != service.content:
        print_line(Console(), "its content is not this version's; run `outrider service install --force`", "yellow")
    does_run, answer = run_command(service.ask, service.sign)
    print_line(Console(), "runs" if does_run else f"does not run: {answer}")
    if service.log is not None:
        print_line(Console(), f"its log: {service.log}", "dim")
    raise typer.Exit(0 if does_run else 1)


def _run(about: Console, command: tuple[str, ...]) -> bool:
    succeeded, answer = run_command(command)
    if not succeeded:
        shown = shlex.join(command) if sys.platform != "win32" else " ".join(command)
        print_line(about, f"`{shown}` failed: {answer}; run it yourself when that is mended", "yellow")
    return succeeded
