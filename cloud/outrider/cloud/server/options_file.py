"""Reads options of `outrider-cloud serve` from a TOML file: `--config FILE`. What is typed comes first."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import click
import typer

from outrider.models.errors import ConfigError
from outrider.models.process.command_line import removed_options

_MAX_BYTES: Final = 1 << 20
_UNFIT: Final = frozenset({"config", "help", "help_all"})


def configure(ctx: typer.Context, value: Path | None) -> Path | None:
    """Makes the file's values the command's defaults. Raises ConfigError, which names file and option."""
    if value is None:
        return None
    try:
        with value.open("rb") as file:
            values = tomllib.loads(file.read(_MAX_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {value} cannot be read ({error.strerror}); name a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {value} is not TOML: {error}; correct that line") from None
    known = {each.name: each for each in ctx.command.params if each.name and each.name not in _UNFIT}
    for name, given in values.items():
        option = known.get(name)
        if option is None and (removed := removed_options(ctx.command).get(name)) is not None:
            raise ConfigError(f"{value}: {name!r} is no option any more. {removed}")
        if option is None:
            closest = get_close_matches(name, [*known], n=1)
            advice = f"did you mean {closest[0]!r}?" if closest else "remove it"
            raise ConfigError(f"{value}: {name!r} is no option of `{ctx.command_path}`; {advice}")
        _require_fit(ctx, value, option, given)
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return value


def _require_fit(ctx: click.Context, file: Path, option: click.Parameter, given: Any) -> None:
    is_list = isinstance(given, list)
    try:
        if is_list is not option.multiple or isinstance(given, dict):
            raise click.BadParameter("expected a list of values" if option.multiple else "expected one value")
        option.type_cast_value(ctx, given)
    except click.BadParameter as error:
        raise ConfigError(f"{file}: {option.name} is {given!r}: {error.message}") from None
