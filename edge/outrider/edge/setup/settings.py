"""Gives each option of a command its value: flag, then environment, then configuration file, then default.

Works on click's commands, whatever their options are. The file's tables become click's `default_map`, the environment's
names its `envvar`; so a command is called as if its options had been typed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from outrider.edge.setup.config_file import (
    COMMON,
    ENDPOINT,
    VARIABLE,
    ConfigFile,
    Where,
    config_path,
    described,
    read_config,
)
from outrider.edge.setup.endpoints import beside, read_endpoints
from outrider.models.bundle.reference_export import AUTO, REFERENCE
from outrider.models.cache_folder import expanded
from outrider.models.client.address import without_password
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import has_kind, kind_of, removed_options

PREFIX: Final = "OUTRIDER_"
RESERVED: Final = frozenset({VARIABLE, "OUTRIDER_CACHE", "OUTRIDER_API_KEYS"})
"""Variables that are no option's: OUTRIDER_API_KEYS is the server's."""
UNCONFIGURED: Final = frozenset({"config", "service"})
"""Commands that work with a broken file and are typed once, so nothing configures them."""
SECRETS: Final = frozenset({"api_key"})
"""Options whose values are never shown, and never in the file."""
CLOUDS: Final = frozenset({"cloud", "server"})
"""Options that take the addresses of the `[[endpoint]]` tables; all are lists."""
SEVERAL: Final = CLOUDS | {"draft"}
"""Lists that the file may also give as one value."""
_BUNDLES: Final = frozenset({"draft", "target"})
"""Options that take a bundle's path, or a word for one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An option's value. source: flag, environment, file or default. where: flag, variable, or the file's line."""

    name: str
    value: object
    source: str
    where: str | None = None

    @property
    def shown(self) -> object:
        """The value for people and programs; a secret only says that it is set."""
        if self.name in SECRETS and self.value is not None:
            return "(set, not shown)"
        if self.name in CLOUDS and isinstance(self.value, list):
            return [without_password(str(each)) for each in self.value]
        return self.value


class Settings:
    """The options of a group's commands, with a configuration file. Raises ConfigError for a file that does not fit.

    From then on click reads them from the environment.

    environment: as `os.environ`.
    """

    def __init__(self, group: click.Group, config: ConfigFile, environment: Mapping[str, str] | None = None) -> None:
        self.config = config
        self.commands = {name: each for name, each in group.commands.items() if name not in UNCONFIGURED}
        self.common = _common_names(self.commands.values())
        for name, command in self.commands.items():
            _name_variables(name, command, self.common)
        self._environment = os.environ if environment is None else environment
        self._check_names()
        self.endpoints = read_endpoints(config)
        # A value for all commands may be beyond the bounds of some: those refuse it when they run.
        self._unfit: dict[str, dict[Where, ConfigError]] = {name: {} for name in self.commands}
        self._found = {name: dict(self._from_file(name)) for name in self.commands}
        fits = {where for values in self._found.values() for _, where in values.values()}
        for where, error in [each for unfit in self._unfit.values() for each in unfit.items()]:
            if where not in fits:
                raise error

    def default_map(self) -> dict[str, Any]:
        """The file's values as click takes them, by command."""
        return {name: {option: value for option, (value, _) in values.items()} for name, values in self._found.items()}

    def check(self, command: str) -> None:
        """Raises ConfigError for a variable, or a value of [common], that this command cannot take."""
        for error in self._unfit[command].values():
            raise error
        for option in _options(self.commands[command]):
            variable = self._variable(option)
            if variable is None:
                continue
            raw = self._environment[variable]
            value: Any = option.type.split_envvar_value(raw) if option.multiple else raw
            try:
                option.type_cast_value(click.Context(self.commands[command]), value)
            except click.BadParameter:
                raise ConfigError(f"{variable} is {raw!r}; expected {expectation(option)}") from None

    def resolve(self, name: str, arguments: Sequence[str] = ()) -> list[Setting]:
        """Every option's value, as the command would get it with these arguments. Raises click's UsageError."""
        command = self.commands[name]
        self.check(name)
        context = click.Context(command, info_name=f"outrider {name}", allow_extra_args=True)
        context.default_map = self.default_map()[name]
        typed, _, _ = command.make_parser(context).parse_args(list(arguments))
        found = []
        for option in _options(command):
            assert option.name is not None
            value, source = option.consume_value(context, typed)
            is_set = value is not None and type(value).__name__ != "Sentinel"  # click's own "not given"
            value = option.type_cast_value(context, value) if is_set else None
            kind, where = {
                ParameterSource.COMMANDLINE: ("flag", option.opts[0]),
                ParameterSource.ENVIRONMENT: ("environment", self._variable(option)),
                ParameterSource.DEFAULT_MAP: ("file", self._line(name, option.name)),
            }.get(source, ("default", None))
            found.append(Setting(long_names(option)[0], plain(value), kind, where))
        return found

    def unknown_variables(self) -> dict[str, str | None]:
        """Variables with our prefix that nothing reads, each with the closest known name."""
        options = [option for command in self.commands.values() for option in _options(command)]
        known = RESERVED.union(*(option.envvar or () for option in options))
        unknown = sorted(name for name in self._environment if name.startswith(PREFIX) and name not in known)
        return {name: next(iter(get_close_matches(name, known, n=1)), None) for name in unknown}

    def _line(self, command: str, name: str) -> str | None:
        if name not in self._found[command]:
            return None
        where = self._found[command][name][1]
        return f"[[{ENDPOINT}]]" if where == (ENDPOINT,) else f"line {self.config.line_of(where)}"

    def _variable(self, option: click.Option) -> str | None:
        return next((name for name in option.envvar or () if self._environment.get(name)), None)

    def _from_file(self, command: str) -> Iterator[tuple[str, tuple[Any, Where]]]:
        """Option by option: the value that click takes, and its place in the file."""
        own, common = self.config.table(command), self.config.table(COMMON)
        for option in _options(self.commands[command]):
            assert option.name is not None
            where = _where(command, own, option) or (
                _where(COMMON, common, option) if not self.common.isdisjoint(long_names(option)) else None
            )
            if where is not None:
                try:
                    value = self._checked(where, option, command)
                except ConfigError as error:
                    if where[0] != COMMON:
                        raise
                    self._unfit[command][where] = error
                else:
                    yield option.name, (value, where)
            elif self.endpoints and not CLOUDS.isdisjoint(long_names(option)):
                yield option.name, ([each.url for each in self.endpoints], (ENDPOINT,))

    def _checked(self, where: tuple[str, str], option: click.Option, command: str) -> Any:
        value: Any = self.config.table(where[0])[where[1]]
        if where[-1] in SEVERAL and not isinstance(value, list):
            value = [value]
        if where[-1] in SECRETS:
            raise self.config.error(
                where, "would keep a key in clear text; expected key_file: put the key into a file of its own"
            )
        scope = f" for `outrider {command}`" if where[0] == COMMON else ""
        wrong = self.config.error(where, f"is {described(value)}; expected {expectation(option)}{scope}")
        items = value if option.multiple else [value]
        if not isinstance(items, list) or not all(has_kind(each, option) for each in items):
            raise wrong
        try:
            option.type_cast_value(click.Context(self.commands[command]), value)
        except click.BadParameter:
            raise wrong from None
        return [self._path(each, option) for each in value] if option.multiple else self._path(value, option)

    def _path(self, value: Any, option: click.Option) -> Any:
        if isinstance(option.type, click.Path) or (option.name in _BUNDLES and value not in (AUTO, REFERENCE)):
            return str(beside(self.config.path, value))
        if isinstance(value, str) and value.startswith(("~/", "~\\")):
            return str(expanded(value))
        return value

    def _check_names(self) -> None:
        self._require_known(self.config.document, (), {COMMON, ENDPOINT, *self.commands}, "tables are", {})
        removed = {name: each for command in self.commands.values() for name, each in removed_options(command).items()}
        common = self.config.table(COMMON)
        self._require_known(common, (COMMON,), set(self.common), "options of several commands are", removed)
        for name, command in self.commands.items():
            known = {each for option in _options(command) for each in long_names(option)}
            what = f"options of `outrider {name}` are"
            self._require_known(self.config.table(name), (name,), known, what, removed_options(command))

    def _require_known(
        self,
        table: Mapping[str, Any],
        where: tuple[str, ...],
        known: set[str],
        what: str,
        removed: Mapping[str, str],
    ) -> None:
        seen: set[str] = set()
        for name in table:
            spelled = name.replace("-", "_")
            if spelled not in known:
                closest = get_close_matches(spelled, known, n=1)
                if spelled in removed:
                    raise self.config.error((*where, name), f"is no option any more. {removed[spelled]}")
                advice = f"did you mean {closest[0]}?" if closest else f"its {what} {', '.join(sorted(known))}"
                raise self.config.error((*where, name), f"is unknown; {advice}")
            if spelled in seen:
                raise self.config.error((*where, name), "is there twice, with - and with _; keep one of them")
            seen.add(spelled)


def long_names(option: click.Option) -> list[str]:
    """Its names in the file: `--max-tokens` is max_tokens."""
    return [name[2:].replace("-", "_") for name in option.opts if name.startswith("--")]


def _name_variables(name: str, command: click.Command, common: frozenset[str]) -> None:
    """Lets click read the options of a command from the environment. May be called again for the same command."""
    for option in _options(command):
        names = long_names(option)
        own = [PREFIX + f"{name}_{each}".replace("-", "_").upper() for each in names]
        shared = [PREFIX + each.upper() for each in names if each in common]
        option.envvar = own + [each for each in shared if each not in RESERVED]
        option.show_envvar = False  # the help says once how variables are named


def expectation(option: click.Option) -> str:
    """What an option takes, in words."""
    kind = option.type
    if isinstance(kind, click.Choice):
        words = "one of " + ", ".join(str(plain(each)) for each in kind.choices)
    else:
        least, most = getattr(kind, "min", None), getattr(kind, "max", None)
        bounds = [f"at least {least:g}"] if least is not None else []
        bounds += [f"at most {most:g}"] if most is not None else []
        words = ", ".join([_KIND_WORDS[kind_of(option)], *bounds])
    return f"a list, each of it {words}" if option.multiple else words


_KIND_WORDS: Final = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text in quotes"}


def _common_names(commands: Any) -> frozenset[str]:
    """Options that mean one thing wherever they are: a name has one kind of value in all commands."""
    options = [(name, option) for each in commands for option in _options(each) for name in long_names(option)]
    kinds = {(name, kind_of(option), option.multiple) for name, option in options}
    names = Counter(name for name, _, _ in kinds)
    return frozenset(name for name, num_kinds in names.items() if num_kinds == 1)


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option) and not each.is_eager and each.opts]


def _where(place: str, table: Mapping[str, Any], option: click.Option) -> tuple[str, str] | None:
    names = long_names(option)
    return next(((place, name) for name in table if name.replace("-", "_") in names), None)


def plain(value: Any) -> Any:
    """An option's value as JSON and TOML have it."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def settings_here(*, is_read: bool = True) -> Settings:
    """Those of the program that runs now, with this user's file; of an empty file unless `is_read`."""
    group = click.get_current_context().find_root().command
    assert isinstance(group, click.Group)
    return Settings(group, read_config() if is_read else ConfigFile(config_path()))
