"""Defines `outrider-cloud keys`: makes, lists and removes the API keys of a key file.

A change replaces the whole file at once and keeps its other lines, its owner and its group. The file has mode 0600 from
its first byte; a group that alone may read it goes on. Two changes at a time wait for each other.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.models.errors import ConfigError
from outrider.models.http.keys import ApiKey, Scope, read_key_lines
from outrider.models.process.command_line import CommandGroup

KEY_PREFIX: Final = "outrider_"
"""Begins every key that is made here, so that scanners find keys in sources."""
_KEY_BYTES: Final = 32

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
    remove_key(file, name)


def new_key() -> str:
    """A random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def add_key(path: Path, key: ApiKey) -> None:
    """Appends a key; makes the file if there is none. Raises ConfigError if the name is taken."""
    with _changed(path) as (lines, keys):
        if any(each.name == key.name for each in keys):
            raise ConfigError(f"{path} has a key with the name {key.name}; remove it first, or choose another name")
        lines.append(key.as_line())


def remove_key(path: Path, name: str) -> None:
    """Removes the key with this name. Raises ConfigError if there is none, or no other.

    A running server would take a file without keys for a broken one, and go on with the key.
    """
    with _changed(path) as (lines, keys):
        if all(each.name != name for each in keys):
            names = ", ".join(each.name for each in keys)
            raise ConfigError(f"{path} has no key with the name {name}; expected one of {names}")
        if len(keys) == 1:
            raise ConfigError(f"{name} is the last key of {path}, which a server needs; add another first")
        lines[:] = [line for line in lines if not _is_key(line) or ApiKey.parse(line.strip()).name != name]


def _is_key(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


@contextmanager
def _changed(path: Path) -> Iterator[tuple[list[str], list[ApiKey]]]:
    """Gives the file's lines, which are written at the end, and its keys."""
    path = path.resolve()  # a link stays one
    try:
        with _locked(path.parent):
            keys = read_key_lines(path) if path.exists() else []
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            yield lines, keys
            partial = path.with_name(path.name + ".part")
            partial.unlink(missing_ok=True)  # left by a command that was killed
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                if path.exists() and os.name == "posix":
                    _give(file.fileno(), path, partial)
                file.writelines(f"{line}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be changed: {error.strerror}; check its directory") from None


def _give(descriptor: int, path: Path, partial: Path) -> None:
    """Gives what replaces a file its owner and group, as whom the server reads it. Raises ConfigError where the
    caller may not.
    """
    found = path.stat()
    try:
        os.fchown(descriptor, found.st_uid, found.st_gid)
    except PermissionError:
        partial.unlink()
        raise ConfigError(
            f"{path} has another owner or group than you can give it, and its server could not read it then; run this "
            "as its owner, or as root"
        ) from None
    os.fchmod(descriptor, found.st_mode & (0o600 if found.st_mode & 0o007 else 0o640))


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps other commands out, where the system has such locks."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
