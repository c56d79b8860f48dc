"""Reads a key from a file that no other user can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from outrider.models.errors import ConfigError

MAX_BYTES: Final = 4096


class SeveralLines(ConfigError):
    """The file does not hold one line: it may be a list of keys."""


def read_key_file(path: Path, *, is_posix: bool = os.name == "posix") -> str:
    """The key: the file's one line, without spaces around it.

    Raises ConfigError, which never holds the key: the file is missing or not one line, or, on POSIX systems, belongs to
    another user or can be read by others. Windows' access lists are not checked.
    """
    try:
        with path.open("rb") as file:
            # Of the open file: another one could take its name meanwhile.
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"the key file {path} is not a regular file; name a file that holds one key")
            if is_posix:
                _require_private(path, found)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}; name another in key_file") from None
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    if len(data) > MAX_BYTES or len(lines) != 1:
        raise SeveralLines(
            f"the key file {path} holds {len(lines) if len(data) <= MAX_BYTES else 'too many'} lines; expected one "
            "line with the key"
        )
    if not all(0x21 <= byte <= 0x7E for byte in lines[0]):
        raise ConfigError(f"the key in {path} has spaces or characters beyond ASCII; expected the key alone")
    return lines[0].decode("ascii")


def require_private(path: Path, *, is_posix: bool = os.name == "posix") -> None:
    """Raises ConfigError where other users can read the file. One that cannot be looked at is left to its reader."""
    if not is_posix:
        return
    try:
        found = path.stat()
    except OSError:
        return
    if stat.S_ISREG(found.st_mode):  # the shell's own pipes are private
        _require_private(path, found)


def _require_private(path: Path, found: os.stat_result) -> None:
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"the key file {path} can be read or written by other users (mode {mode:04o}); expected 0600: run "
            f"`chmod 600 {path}`"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"the key file {path} belongs to another user (uid {found.st_uid}); expected a file of yours")
