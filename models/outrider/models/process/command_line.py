"""Sets up the command lines of `outrider`, `outrider-cloud` and `outrider-export` alike.

Help, version, completion, one suggestion for a typo, errors in one line, Ctrl-C, closed pipes and narrow encodings.
Loads nothing heavy; knows no command.
"""

from __future__ import annotations

import codecs
import errno
import inspect
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, get_type_hints

import click
import typer
import typer.core
from rich.console import Console
from rich.text import Text
from typer.models import ArgumentInfo

from outrider.models.errors import ConfigError, OutriderError
from outrider.models.process.extras import missing_extra
from outrider.models.process.interrupts import EXIT_CODE as INTERRUPTED
from outrider.models.version import outrider_version
from outrider.models.visible import visible

Options = TypeVar("Options")

MISTAKE: Final = 2
"""Exit code of what the user can put right."""
PIPE_CLOSED: Final = 1
"""Exit code when the reader of our output has closed it; the same as typer's and rich's own."""


_HYPHEN: Final = "\ue000"
"""Stands for a hyphen while help is wrapped, so that no line ends within `--max-running`."""


class HelpFormatter(click.HelpFormatter):
    """Help in which no name is broken or cut: a name that is too long for its column has a line of its own."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """As click."""
        super().write_dl([(name, text.replace("-", _HYPHEN)) for name, text in rows], col_max, col_spacing)

    def write_text(self, text: str) -> None:
        """As click."""
        super().write_text(text.replace("-", _HYPHEN))

    def getvalue(self) -> str:
        """As click."""
        return super().getvalue().replace(_HYPHEN, "-")


class HelpContext(click.Context):
    """A command's, with our help."""

    formatter_class = HelpFormatter


class CommandGroup(typer.core.TyperGroup):
    """Names one command, the closest, where typer and click name several, each on its own."""

    context_class = HelpContext

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _restore_argument_help(command)
            command.context_class = HelpContext
            command.format_arguments = lambda ctx, formatter: None  # type: ignore[method-assign]  # typer has written them
            command.short_help = command.get_short_help_str(1000)  # whole, where click cuts it
            if (groups := getattr(command.callback, "help_groups", None)) is not None:
                _group_help(command, groups)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return click.Group.resolve_command(self, ctx, args)
        except click.UsageError as error:
            raise click.UsageError(f"No such command {args[0]!r}.{_closest(args[0], self.commands)}", ctx) from error


_SHOWS_ALL: Final = "outrider.help_all"


def _group_help(command: click.Command, groups: Mapping[str, Sequence[str]]) -> None:
    """Has --help show these options, by title, and --help-all all of them."""
    if any(parameter.name == "help_all" for parameter in command.params):
        return  # it has them already

    def show_all(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked:
            ctx.meta[_SHOWS_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    def write_options(ctx: click.Context, formatter: click.HelpFormatter) -> None:
        parameters = [each for each in command.get_params(ctx) if each.name is not None]
        records = {each.name: record for each in parameters if (record := each.get_help_record(ctx)) is not None}
        arguments = [each.name for each in parameters if isinstance(each, click.Argument)]
        sections = {"Arguments": arguments, **groups}
        ends = [each.name for each in parameters if {"--help", "--help-all"} & {*each.opts}]
        if ctx.meta.get(_SHOWS_ALL):
            shown = {*ends, *(name for names in sections.values() for name in names)}
            sections["More"] = [name for name in records if name not in shown]
        for title, names in (sections | {"Help": ends}).items():
            if rows := [records[name] for name in names if name in records]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    options = [each for each in command.params if isinstance(each, click.Option)]
    num_more = len(options) - sum(map(len, groups.values()))
    help_text = f"Show all options: {num_more} more."
    command.params.append(
        click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show_all, help=help_text)
    )
    command.format_options = write_options  # type: ignore[method-assign]


def _restore_argument_help(command: click.Command) -> None:
    """Gives arguments the help that they were declared with: click 8.5 clears it while typer 0.25 makes them."""
    function = inspect.unwrap(command.callback) if command.callback is not None else None
    hints = get_type_hints(function, include_extras=True) if function is not None else {}
    for parameter in command.params:
        if isinstance(parameter, typer.core.TyperArgument) and parameter.help is None:
            declared = getattr(hints.get(parameter.name or ""), "__metadata__", ())
            parameter.help = next((info.help for info in declared if isinstance(info, ArgumentInfo)), None)


def make_app(help: str, cls: type[CommandGroup] = CommandGroup) -> typer.Typer:
    """A console script's application without commands: --version, -h and --help, completion."""
    settings: dict[str, Any] = {
        "cls": cls,
        "help": help,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 120},
    }
    app = typer.Typer(**settings, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.callback(**settings)  # with a callback, a single command is a subcommand too
    def group(
        _: Annotated[
            bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        pass

    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(outrider_version())
        raise typer.Exit


def takes_options(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Makes a command of a function that takes one object of the dataclass `options`.

    The command's parameters are the fields that the dataclass' constructor takes: their names, types
    (`Annotated[..., typer.Option(...)]`) and defaults are stated there and nowhere else. Options that several commands
    share are a group: a base class with `__slots__ = ()`, so that a class can have several. `_in_order` places them.
    `REMOVED`, if the class has it, says what to do in place of options that there were once. `HELP` names the fields
    that --help shows, by the titles of their groups; --help-all shows all.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = []
    for field in _in_order(options):
        if field.init:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if default is MISSING else default,
                    annotation=hints[field.name],
                )
            )

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(options(**values))

        command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.removed = getattr(options, "REMOVED", {})  # type: ignore[attr-defined]
        command.help_groups = getattr(options, "HELP", None)  # type: ignore[attr-defined]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may have one
        return command

    return decorate


def _in_order(options: type) -> list[Field[Any]]:
    """The fields in the order of the help.

    Those of a base class come where the dataclass names that class, as in `_keys: ClassVar = KeyOptions`, or else
    before its own.
    """
    known: dict[str, Field[Any]] = {each.name: each for each in fields(options)}
    own: list[str] = []
    for name in inspect.get_annotations(options):
        group: Any = vars(options).get(name)
        if isinstance(group, type) and issubclass(options, group):
            own += [each.name for each in fields(group)]
        else:
            own.append(name)
    names = [*(name for name in known if name not in own), *own]
    return [known[name] for name in names if name in known]


def run_app(app: typer.Typer, *, what: str, extra: str) -> NoReturn:
    """Runs the command of `sys.argv` and ends the process.

    A user's mistake is one red line on standard error and exit code 2; Ctrl-C is 130; a reader that closes our output
    ends it quietly. what, extra: as `missing_extra` takes them, for packages that are missing.
    """
    tolerate_narrow_encodings()
    code: int | None = None
    try:
        try:
            code = _run(app, what, extra)
        finally:
            if sys.stdout is not None:  # pythonw.exe has none
                sys.stdout.flush()  # here, where a closed pipe or a full disk can still be answered
    except BrokenPipeError:
        code = PIPE_CLOSED
        _drop_output()
    except OSError as error:
        if code is None:
            raise  # beside a bug's traceback
        if code != MISTAKE:
            print_error(str(error.strerror))
        code = MISTAKE
        _drop_output()
    sys.exit(code)


def _run(app: typer.Typer, what: str, extra: str) -> int:
    try:
        try:
            # Not `app()`: typer would print errors its own way, in a box and with its own suggestions.
            result = typer.main.get_command(app).main(standalone_mode=False)
        except ModuleNotFoundError as error:  # also an installed package's missing metadata
            raise missing_extra(error, what, extra) from None
    except OutriderError as error:
        print_error(str(error))
    except click.ClickException as error:
        return _show_usage_error(error)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise BrokenPipeError from error
        if error.strerror is None:
            raise  # not the system's answer
        # Without a name where an open file fails: standard output on a full disk.
        print_error(error.strerror if error.filename is None else f"{error.filename}: {error.strerror}")
    else:
        return result if isinstance(result, int) else 0
    return MISTAKE


def _show_usage_error(error: click.ClickException) -> int:
    ctx = getattr(error, "ctx", None)
    if ctx is not None and type(error).__name__ == "NoArgsIsHelpError":
        click.echo(ctx.get_help())
        return error.exit_code
    message = error.format_message()
    if isinstance(error, click.NoSuchOption) and ctx is not None:
        # An argument's name is no option, though it is in `opts` too.
        names = [name for each in ctx.command.get_params(ctx) for name in each.opts if name.startswith("-")]
        removed = removed_options(ctx.command).get(error.option_name.removeprefix("--").replace("-", "_"))
        message = (
            f"No such option {error.option_name!r}.{f' {removed}' if removed else _closest(error.option_name, names)}"
        )
    print_error(message)
    if ctx is not None:
        Console(stderr=True).print(f"Try '{ctx.command_path} --help'.", highlight=False, soft_wrap=True, markup=False)
    return error.exit_code


def removed_options(command: click.Command) -> dict[str, str]:
    """What to do in place of options that there were once, by their names with underscores."""
    found: dict[str, str] = getattr(command.callback, "removed", {})
    return {name.removeprefix("--").replace("-", "_"): advice for name, advice in found.items()}


def kind_of(option: click.Option) -> Literal["bool", "int", "float", "str"]:
    """What a file gives for the option."""
    if option.is_flag or isinstance(option.type, click.types.BoolParamType):
        return "bool"
    if isinstance(option.type, click.types.IntParamType):
        return "int"
    return "float" if isinstance(option.type, click.types.FloatParamType) else "str"


def has_kind(value: object, option: click.Option) -> bool:
    """Whether a file's value is of the option's kind: no number is cut, and no word is a number."""
    kind = kind_of(option)
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, bool if kind == "bool" else str)


def _closest(word: str, known: Iterable[str] | MutableMapping[str, Any]) -> str:
    found = get_close_matches(word, list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def print_error(message: str) -> None:
    """One red line on standard error; control characters of the message are visible."""
    Console(stderr=True).print(
        Text.assemble(("error:", "bold red"), " ", visible(message)), highlight=False, soft_wrap=True
    )


def standard_output() -> Console:
    """Standard output for a text or a path: a file or a pipe gets it plain, also where FORCE_COLOR is set."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(force_terminal=None if is_terminal else False)


def print_line(console: Console, line: str, style: str = "") -> None:
    """A line of text, control characters visible: wrapped between words on a terminal, whole in a file or a pipe."""
    console.print(Text(visible(line), style=style), soft_wrap=not console.is_terminal)


def tolerate_narrow_encodings(platform: str = sys.platform) -> None:
    """Writes "?" for a character that the output's encoding lacks, where Python would raise UnicodeEncodeError.

    On Windows files and pipes get UTF-8, unless PYTHONIOENCODING asks for another encoding: Python's default there is
    the system's code page, which lacks most of the characters that a model writes. platform: as `sys.platform`.
    """
    is_utf8 = platform == "win32" and not os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if is_utf8 and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(encoding="utf-8")
        if stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    # What is still buffered would raise again when the interpreter closes standard output.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def require_utf8(text: str, what: str) -> str:
    """An argument of the command line. Raises ConfigError if it has bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Python hands such bytes over as U+DC80 to U+DCFF.
        raise _not_utf8(what, ord(text[error.start]) & 0xFF, len(text[: error.start].encode())) from None
    return text


def read_stdin(what: str) -> str:
    """All of standard input, without the newline that `echo` puts at its end. Raises ConfigError if it is not UTF-8."""
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        text: str = sys.stdin.read()
    else:
        data: bytes = buffer.read()
        try:
            text = data.decode().replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{what} on standard input", data[error.start], error.start) from None
    return text.removesuffix("\n")


def _not_utf8(what: str, byte: int, offset: int) -> ConfigError:
    return ConfigError(f"{what} is not UTF-8: byte 0x{byte:02x} at offset {offset}; convert it to UTF-8 first")
