"""Reads options of `outrider-cloud serve` from a TOML file: `--config FILE`. What is typed comes first.

Its values have the kinds of TOML, and its relative paths begin beside it, as in the device's file.
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import click
import typer

from outrider.models.errors import ConfigError
from outrider.models.process.command_line import has_kind, kind_of, removed_options

_MAX_BYTES: Final = 1 << 20
_KIND_WORDS: Final = {"bool": "true or false", "int": "whole number", "float": "number", "str": "text"}
_UNFIT: Final = frozenset({"config", "help", "help_all"})


def configure(ctx: typer.Context, value: Path | None) -> Path | None:
    """Makes the file's values the command's defaults. Raises ConfigError, which names file and option."""
    if value is None:
        return None
    try:
        with value.open("rb") as file:
            read = file.read(_MAX_BYTES + 1)
        if len(read) > _MAX_BYTES:
            raise ConfigError(f"--config {value} has over {_MAX_BYTES >> 20} MiB; expected a file of options")
        values = tomllib.loads(read.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {value} cannot be read ({error.strerror}); name a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {value} is not TOML: {error}; correct that line") from None
    options = [each for each in ctx.command.params if isinstance(each, click.Option)]
    known = {each.name: each for each in options if each.name and each.name not in _UNFIT}
    defaults = dict(ctx.default_map or {})
    for name, given in values.items():
        option = known.get(name)
        if option is None and (removed := removed_options(ctx.command).get(name)) is not None:
            raise ConfigError(f"{value}: {name!r} is no option any more. {removed}")
        if option is None:
            closest = get_close_matches(name, [*known], n=1)
            advice = f"did you mean {closest[0]!r}?" if closest else "remove it"
            raise ConfigError(f"{value}: {name!r} is no option of `{ctx.command_path}`; {advice}")
        defaults[name] = _fit(ctx, value, option, given)
    ctx.default_map = defaults
    return value


def _fit(ctx: click.Context, file: Path, option: click.Option, given: Any) -> Any:
    """The value as the option takes it: a relative path begins beside the file. Raises ConfigError."""
    items = given if option.multiple else [given]
    expected = f"{'a list of ' if option.multiple else 'one '}{_KIND_WORDS[kind_of(option)]}"
    if not isinstance(items, list) or not all(has_kind(each, option) for each in items):
        raise ConfigError(f"{file}: {option.name} is {given!r}; expected {expected}")
    if isinstance(option.type, click.Path):
        items = [str(file.parent / Path(each).expanduser()) for each in items]
    fitting = items if option.multiple else items[0]
    try:
        option.type_cast_value(ctx, fitting)
    except click.BadParameter as error:
        raise ConfigError(f"{file}: {option.name} is {given!r}: {error.message}") from None
    return fitting
