"""Shows the configuration, and writes an example of its file: `outrider config`, `config show`, `path`, `init`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import click
import typer
from rich.console import Console

from outrider.edge.setup.config_file import VARIABLE, ConfigFile, config_path, read_config
from outrider.edge.setup.settings import SECRETS, Path_, Setting, Settings, expectation, long_names
from outrider.models.client.address import without_password
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import CommandGroup, print_line

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
        _show(as_json, None, [])


@config_app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def show(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND [OPTIONS]...]", help="As after `outrider`: run --max-tokens 5."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the values that a command would get with these flags; all commands' without one."""
    settings = _settings()
    given = list(arguments or ())
    path = _path_of(settings, given)
    _show(as_json, path, given[len(path) :] if path is not None else [], settings)


@config_app.command()
def path() -> None:
    """Print where the configuration file is, whether it is there or not."""
    typer.echo(config_path())


@config_app.command()
def init() -> None:
    """Write a commented example of the file. One that is there is never overwritten."""
    place = config_path()
    write_new(place, example_config(_settings(is_read=False).commands))
    print_line(Console(), f"wrote {place}")


def _settings(*, is_read: bool = True) -> Settings:
    """The settings of all commands; of an empty file unless `is_read`."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    return Settings(group, read_config() if is_read else ConfigFile(config_path()))


def _path_of(settings: Settings, given: list[str]) -> Path_ | None:
    """The command that the arguments begin with; None for no arguments. Raises UsageError for another word."""
    if not given:
        return None
    for path in settings.commands:
        if tuple(given[: len(path)]) == path:
            return path
    known = ", ".join(" ".join(path) for path in settings.commands)
    raise click.UsageError(f"{given[0]!r} is no command with options; expected one of {known}.")


def _show(as_json: bool, path: Path_ | None, arguments: list[str], settings: Settings | None = None) -> None:
    settings = settings or _settings()
    found: list[tuple[Path_, list[Setting] | ConfigError]] = []
    for each in [path] if path is not None else list(settings.commands):
        try:
            found.append((each, settings.resolve(each, arguments)))
        except ConfigError as error:
            if path is not None:
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
        print_line(console, f"\n[{'.'.join(each)}]", "bold")
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


def _document(settings: Settings, found: list[tuple[Path_, list[Setting] | ConfigError]]) -> dict[str, object]:
    return {
        "file": str(settings.config.path),
        "is_there": settings.config.is_there,
        "endpoints": [
            each.model_dump(exclude={"url"}) | {"url": without_password(each.url)} for each in settings.endpoints
        ],
        "commands": {
            ".".join(path): {"error": str(values)}
            if isinstance(values, ConfigError)
            else {value.name: {"value": value.shown, "source": value.source, "where": value.where} for value in values}
            for path, values in found
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


def example_config(commands: Mapping[Path_, click.Command]) -> str:
    """The example's text. commands: by their paths."""
    return HEAD + "".join(f"\n[{'.'.join(path)}]\n" + "".join(_lines(each)) for path, each in commands.items())


def write_new(path: Path, text: str) -> None:
    """Writes a file that is not there yet. Raises ConfigError if it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already and is left as it is; edit it, or remove it first") from None


def _lines(command: click.Command) -> Iterator[str]:
    for option in command.params:
        names = long_names(option) if isinstance(option, click.Option) and not option.is_eager else []
        if not isinstance(option, click.Option) or not names or not SECRETS.isdisjoint(names):
            continue
        yield from (f"{line}\n" for line in _wrapped(f"{option.help or ''} Takes {expectation(option)}."))
        yield f"#{names[0]} = {_example(option)}\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text.strip(), 110, initial_indent="# ", subsequent_indent="# ")


def _example(option: click.Option) -> str:
    """The default in TOML; where there is none, a value that the option takes."""
    default: Any = option.default() if callable(option.default) else option.default
    if isinstance(default, list | tuple):
        return json.dumps([str(each) for each in default], ensure_ascii=False)
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool | int | float | str):
        return json.dumps(default, ensure_ascii=False)  # of these, TOML's spelling is JSON's
    if isinstance(option.type, click.Choice):
        return json.dumps(str(next(iter(option.type.choices))))
    if option.is_flag or isinstance(option.type, click.types.BoolParamType):
        return "true"
    least = getattr(option.type, "min", None)
    if isinstance(option.type, click.types.FloatParamType):
        return str(float(least or 1.0))
    return str(least or 1) if isinstance(option.type, click.types.IntParamType) else '"..."'
