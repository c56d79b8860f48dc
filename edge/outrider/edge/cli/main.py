"""Defines the commands of `outrider`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Final

import click
import typer
from rich.console import Console

from outrider.edge.cli.command_options import ChatOptions, DemoOptions, PullOptions, ServeOptions
from outrider.edge.cli.devices_screen import devices
from outrider.edge.cli.doctor_screen import doctor
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.setup_screens import config_app, service_app
from outrider.edge.setup.config_file import ConfigFile, config_path, read_config
from outrider.edge.setup.endpoints import SeveralLines
from outrider.edge.setup.settings import UNCONFIGURED, Settings
from outrider.models.bundle.reference_export import EXPORTER_PACKAGES
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import (
    CommandGroup,
    make_app,
    read_stdin,
    require_utf8,
    run_app,
    standard_output,
    takes_options,
)
from outrider.models.process.extras import importing, require_packages

WHAT, EXTRA = "the agent", "edge"
ALL_PARTS = "the demo exports, serves and drafts on this machine and"
NEEDED: Final = (*EXPORTER_PACKAGES, "openvino", "httpx", "fastapi", "uvicorn", "prometheus_client", "psutil")
"""Packages of all three parts; checked before the demo's export starts."""
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
        if command is None or ctx.resilient_parsing or command.name in UNCONFIGURED:
            return name, command, rest
        command.epilog = EPILOG
        is_help = bool({"--help", "-h"}.intersection(rest))
        try:
            settings = Settings(self, read_config())
        except ConfigError:
            if not is_help and command.name != "doctor":  # that reports a broken configuration
                raise
            settings = Settings(self, ConfigFile(config_path()))
        if command.name in settings.commands and not is_help:
            settings.check(command.name)
        ctx.default_map = settings.default_map()
        ctx.obj = settings
        return name, command, rest


app = make_app(
    "The device side of Outrider: drafts here, the target verifies in the cloud; the text is the target's.",
    ConfiguredGroup,
)


@app.command()
@takes_options(RunOptions)
def run(options: RunOptions) -> None:
    """Generate a text: accepted drafted tokens are green, accepted alternatives cyan, the target's own plain.

    The text goes to standard output: as it is into a file or a pipe, and on a terminal after the prompt, with control
    characters shown. Everything else goes to standard error.
    """
    given = options.prompt
    if given is None and sys.stdin.isatty():
        raise click.UsageError(
            'Missing argument PROMPT. Write `outrider run "def walk(path):"`, or pipe the text in.',
            click.get_current_context(),
        )
    prompt = read_stdin("the prompt") if given in (None, "-") else require_utf8(given, "the prompt")
    options = replace(options, prompt=prompt, seed=options.params.seed)
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.run import run_once
    run_once(options, standard_output(), Console(stderr=True))


@app.command()
@takes_options(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Chat with the target: accepted drafted tokens are green, accepted alternatives cyan, the target's own plain.

    Ctrl-C ends an answer and not the chat; /help lists the commands. From a pipe every line is a message, and only the
    answers go to standard output.
    """
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.chat import chat_here
    chat_here(options, standard_output(), Console(stderr=True))


@app.command()
@takes_options(PullOptions)
def pull(options: PullOptions) -> None:
    """Download the draft that fits this machine from a server.

    `outrider run` then drafts with it for that server's target. A second pull is quick where nothing has changed; one
    that was interrupted goes on where it stopped. The bundle's place goes to standard output.
    """
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.pull import pull_once
    pull_once(options, standard_output(), Console(stderr=True))


@app.command()
@takes_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a local OpenAI-compatible endpoint: any chat program uses the draft, and the text is the target's.

    Ends with Ctrl-C or SIGTERM; a second one ends texts in work at once.
    """
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.serve import serve_local
    try:
        code = serve_local(options)
    except SeveralLines as error:
        raise ConfigError(
            f"{error} for the verifier; keys that clients of this endpoint send belong into --api-key-file"
        ) from None
    if code:
        raise typer.Exit(code)


@app.command()
@takes_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """See everything work on this machine: export, cloud, agent, and how the modes compare."""
    require_packages(NEEDED, ALL_PARTS, "all")
    with importing(ALL_PARTS, "all"):
        from outrider.edge.cli.demo_run import run_demo
    run_demo(options, Console())


app.command()(devices)
app.command()(doctor)
app.add_typer(config_app)
app.add_typer(service_app)


def main() -> None:
    """Runs the command line; see `run_app`."""
    run_app(app, what=WHAT, extra=EXTRA)
