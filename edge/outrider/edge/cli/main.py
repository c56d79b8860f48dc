"""Defines the commands of `outrider`."""

from __future__ import annotations

import sys
from dataclasses import replace

import click
from rich.console import Console

from outrider.edge.cli.chat_options import ChatOptions
from outrider.edge.cli.config_screen import config_app
from outrider.edge.cli.configured import ConfiguredGroup
from outrider.edge.cli.demo import demo
from outrider.edge.cli.devices_screen import devices
from outrider.edge.cli.doctor_screen import doctor
from outrider.edge.cli.pull_options import PullOptions
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.cli.serve_options import ServeOptions
from outrider.edge.cli.service_screen import service_app
from outrider.edge.setup.key_file import SeveralLines
from outrider.models.errors import ConfigError
from outrider.models.process.command_line import (
    make_app,
    read_stdin,
    require_utf8,
    run_app,
    standard_output,
    takes_options,
)
from outrider.models.process.extras import importing

WHAT, EXTRA = "the agent", "edge"

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
    options = replace(options, prompt=_prompt(options.prompt), seed=options.params.seed)
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.run import run_once
    run_once(options, standard_output(), Console(stderr=True), options.keys())


@app.command()
@takes_options(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Chat with the target: accepted drafted tokens are green, accepted alternatives cyan, the target's own plain.

    Ctrl-C ends an answer and not the chat; /help lists the commands. From a pipe every line is a message, and only the
    answers go to standard output.
    """
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.chat import chat_here
    chat_here(options, standard_output(), Console(stderr=True), options.keys())


@app.command()
@takes_options(PullOptions)
def pull(options: PullOptions) -> None:
    """Download the draft that fits this machine from a server.

    `outrider run` then drafts with it for that server's target. A second pull is quick where nothing has changed; one
    that was interrupted goes on where it stopped. The bundle's place goes to standard output.
    """
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.pull import pull_once
    pull_once(options, standard_output(), Console(stderr=True), options.keys())


def _prompt(given: str | None) -> str:
    """The prompt: the argument, or standard input."""
    if given is None and sys.stdin.isatty():
        raise click.UsageError(
            'Missing argument PROMPT. Write `outrider run "def walk(path):"`, or pipe the text in.',
            click.get_current_context(),
        )
    return read_stdin("the prompt") if given in (None, "-") else require_utf8(given, "the prompt")


@app.command()
@takes_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a local OpenAI-compatible endpoint: any chat program uses the draft, and the text is the target's.

    Ends with Ctrl-C or SIGTERM; a second one ends texts in work at once.
    """
    with importing(WHAT, EXTRA):
        from outrider.edge.cli.serve import serve_local
    try:
        serve_local(options, options.keys())
    except SeveralLines as error:
        raise ConfigError(
            f"{error} for the verifier; keys that clients of this endpoint send belong into --api-key-file"
        ) from None


app.command()(demo)
app.command()(devices)
app.command()(doctor)
app.add_typer(config_app)
app.add_typer(service_app)


def main() -> None:
    """Runs the command line; see `run_app`."""
    run_app(app, what=WHAT, extra=EXTRA)


if __name__ == "__main__":
    main()
