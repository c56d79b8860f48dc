"""Gives the commands of `outrider` their values from the environment and the configuration file."""

from __future__ import annotations

from typing import Final

import click

from outrider.edge.setup.config_file import ConfigFile, config_path, read_config
from outrider.edge.setup.settings import UNCONFIGURED, Settings, name_variables
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import CommandGroup

EXAMINES_ITSELF: Final = "doctor"
"""The command that reports a broken configuration, so it runs with one."""
EPILOG: Final = (
    "Each option also has a variable (--max-tokens of run: OUTRIDER_RUN_MAX_TOKENS, or OUTRIDER_MAX_TOKENS for all "
    "commands) and a place in the configuration file; see `outrider config`."
)


class ConfiguredGroup(CommandGroup):
    """Reads the configuration once it is known which command runs; a broken one does not stop `--help`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            self._configure(ctx, command, rest)
        return name, command, rest

    def _configure(self, ctx: click.Context, command: click.Command, arguments: list[str]) -> None:
        if command.name in UNCONFIGURED:
            return
        command.epilog = EPILOG
        is_help = bool({"--help", "-h"}.intersection(arguments))
        try:
            settings = Settings(self, read_config())
        except ConfigError:
            if not is_help and command.name != EXAMINES_ITSELF:
                raise
            settings = Settings(self, ConfigFile(config_path()))
        for path, leaf in settings.commands.items():
            name_variables(path, leaf, settings.common)
            if path[0] == command.name and not is_help:
                settings.check(path)
        ctx.default_map = settings.default_map()
        ctx.obj = settings
