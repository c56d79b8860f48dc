"""Changes a key file: adds and removes keys, in place of the whole file at once, and keeps its other lines.

The file has mode 0600 from its first byte. Two changes at a time wait for each other.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from outrider.models.errors import ConfigError
from outrider.models.http.keys import ApiKey, read_key_lines

KEY_PREFIX: Final = "outrider_"
"""Begins every key that is made here, so that scanners find keys in sources."""
_KEY_BYTES: Final = 32


def new_key() -> str:
    """A random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def add_key(path: Path, key: ApiKey) -> None:
    """Appends a key; makes the file if there is none. Raises ConfigError if the name is taken."""

    def added(lines: list[str], keys: list[ApiKey]) -> list[str]:
        if any(each.name == key.name for each in keys):
            raise ConfigError(f"{path} has a key with the name {key.name}; remove it first, or choose another name")
        return [*lines, key.as_line()]

    _change(path, added)


def remove_key(path: Path, name: str) -> None:
    """Removes the key with this name. Raises ConfigError if there is none."""

    def removed(lines: list[str], keys: list[ApiKey]) -> list[str]:
        left = [line for line in lines if not _is_key(line) or ApiKey.parse(line.strip()).name != name]
        if len(left) == len(lines):
            names = ", ".join(each.name for each in keys)
            raise ConfigError(f"{path} has no key with the name {name}; expected one of {names}")
        return left

    _change(path, removed)


def _is_key(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def _change(path: Path, change: Callable[[list[str], list[ApiKey]], list[str]]) -> None:
    path = path.resolve()  # a link stays one
    try:
        with _locked(path.parent):
            keys = read_key_lines(path) if path.exists() else []
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            text = "".join(f"{line}\n" for line in change(lines, keys))
            partial = path.with_name(path.name + ".part")
            partial.unlink(missing_ok=True)  # left by a command that was killed
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be changed: {error.strerror}; check its directory") from None


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
