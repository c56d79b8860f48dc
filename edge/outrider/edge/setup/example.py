"""Writes an example of the configuration file: every option with its help and its default, commented out."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import click

from outrider.edge.setup.settings import SECRETS, Path_, expectation, long_names
from outrider.models.errors import ConfigError

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
