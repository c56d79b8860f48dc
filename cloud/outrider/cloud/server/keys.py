"""Defines `outrider-cloud keys`: makes, lists and removes the API keys of a key file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.models.http.keys import ApiKey, Scope, read_key_lines
from outrider.models.process.command_line import CommandGroup

keys_app = typer.Typer(
    cls=CommandGroup,
    name="keys",
    help="Make, list and remove API keys. A running server reads its key file again within seconds.",
    no_args_is_help=True,
)

File = Annotated[Path, typer.Argument(help="The key file: serve's --api-key-file.", show_default=False)]
Name = Annotated[str, typer.Argument(help="Name of the key, as logs show it.", show_default=False)]


@keys_app.command()
def add(
    name: Name,
    file: File,
    scope: Annotated[
        list[Scope], typer.Option(help="generate: every route but /metrics; metrics: /metrics; repeatable.")
    ] = [Scope.GENERATE],  # noqa: B006 - typer copies it
    requests_per_second: Annotated[
        float | None, typer.Option(min=0.0, help="Default: the server's --rate.", show_default=False)
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Open sequences. Default: the server's --max-sessions.", show_default=False),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt (not cached) and text. Default: the server's.", show_default=False),
    ] = None,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Of its requests, at most; higher is served first.")
    ] = 0,
) -> None:
    """Make a random key: it is printed once, and the file gets its SHA-256 digest."""
    from outrider.cloud.server.key_file import add_key, new_key

    key = new_key()
    digest = hashlib.sha256(key.encode()).digest()
    limits = (requests_per_second, sessions, tokens_per_minute)
    add_key(file, ApiKey(digest, name, frozenset(scope), *limits, priority))
    typer.echo(key)
    Console(stderr=True).print(f"Only its digest is in {file}: keep the key now.", highlight=False, markup=False)


@keys_app.command("list")
def list_keys(file: File) -> None:
    """List the keys of a file: names, scopes and limits; keys are not shown."""
    table = Table("name", "scopes", "requests/s", "sessions", "tokens/min", "priority", box=None)
    for key in read_key_lines(file):
        limits = (key.requests_per_second, key.sessions, key.tokens_per_minute)
        shown = ["-" if limit is None else f"{limit:g}" for limit in limits]
        table.add_row(Text(key.name), ",".join(sorted(key.scopes)), *shown, str(key.priority))
    Console().print(table)


@keys_app.command()
def remove(name: Name, file: File) -> None:
    """Remove a key: its next request is refused, and texts in work end with the error `unauthorized`."""
    from outrider.cloud.server.key_file import remove_key

    remove_key(file, name)
