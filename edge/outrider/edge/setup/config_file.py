"""Reads the configuration file: TOML, one table for all commands, one per command, and the clouds.

Knows neither commands nor their options: `settings` compares both. Errors name the file, the line and the key.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import platformdirs

from outrider.models.cache_folder import expanded
from outrider.models.client.address import without_password
from outrider.models.errors import ConfigError

VARIABLE: Final = "OUTRIDER_CONFIG"
COMMON: Final = "common"
"""The table for all commands."""
ENDPOINT: Final = "endpoint"
"""The array of tables for clouds."""
MAX_BYTES: Final = 1 << 18

Where = tuple[str | int, ...]
"""Path of a value in the document, such as ("run", "max_tokens") or ("endpoint", 0, "url")."""


def config_path() -> Path:
    """$OUTRIDER_CONFIG, or else config.toml in this user's configuration directory."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return expanded(chosen).absolute()
    return platformdirs.user_config_path("outrider", appauthor=False) / "config.toml"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The file's content. document: empty where there is no file."""

    path: Path
    text: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)
    is_there: bool = False

    def line_of(self, where: Where) -> int | None:
        """The line where a value's statement begins; None if no statement of its own sets it."""
        return _lines(self.text).get(where)

    def error(self, where: Where, problem: str) -> ConfigError:
        """The exception for a value. problem: what was found, what was expected, and one piece of advice."""
        line = self.line_of(where)
        place = f"{self.path}, line {line}" if line is not None else str(self.path)
        return ConfigError(f"{place}: {dotted(where)} {problem}")

    def table(self, name: str) -> Mapping[str, Any]:
        """A table, empty if missing. Raises ConfigError if something else has its name."""
        found = self.document.get(name, {})
        if not isinstance(found, dict):
            raise self.error((name,), f"is {described(found)}; expected a table, [{name}]")
        return found


def read_config(path: Path | None = None) -> ConfigFile:
    """The configuration of this user. A missing file is an empty one, unless OUTRIDER_CONFIG names it.

    Raises ConfigError for a file that cannot be read or is not TOML.
    """
    is_named = path is not None or bool(os.environ.get(VARIABLE))
    path = path or config_path()
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise ConfigError(f"{path} is a directory; expected a TOML file: name one with {VARIABLE}")
        if size > MAX_BYTES:
            raise ConfigError(f"{path} has {size} bytes; expected a configuration of at most {MAX_BYTES}")
        data = path.read_bytes()
    except FileNotFoundError:
        if not is_named:
            return ConfigFile(path)
        raise ConfigError(
            f"{path} is not there, and {VARIABLE} names it; write it with `outrider config init`"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); correct its permissions") from None
    try:
        # A file that Windows' editor saved begins with a byte order mark.
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
        return ConfigFile(path, text, tomllib.loads(text), is_there=True)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; save it as UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        # The parser's message names line and column, and no value.
        raise ConfigError(f"{path} is not TOML: {error}; correct that line") from None
    except RecursionError:
        raise ConfigError(f"{path} is not a configuration: its arrays are nested too deeply") from None


def dotted(where: Where) -> str:
    """A path for people: run.max_tokens, endpoint[0].url."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")


def described(value: object) -> str:
    """A value of the document, for messages; long texts are cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, str):
        value = without_password(value) if "://" in value else value
        return repr(value if len(value) <= 60 else value[:60] + "...")
    if isinstance(value, list):
        return "a list" if len(value) != 1 else f"a list of {described(value[0])}"
    return str(value)


@lru_cache(maxsize=4)
def _lines(text: str) -> Mapping[Where, int]:
    """Where each value's statement begins. Takes many parses, so only messages and `outrider config` ask."""
    # The parser does not say where a value stands. A statement begins after the shortest text that parses without it.
    lines, found, first = text.split("\n"), dict[Where, int](), 0
    for end in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("\n".join(lines[:end]) + "\n")
        except tomllib.TOMLDecodeError:
            continue  # inside a statement of several lines
        is_blank = (not line.strip() or line.lstrip().startswith("#") for line in lines[first:end])
        begin = next((first + 1 + i for i, blank in enumerate(is_blank) if not blank), end)
        for where in _places(document):
            found.setdefault(where, begin)
        first = end
    return found


def _places(value: object, where: Where = ()) -> Iterator[Where]:
    if where:
        yield where
    below = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, each in below:
        yield from _places(each, (*where, key))
