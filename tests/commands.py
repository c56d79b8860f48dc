"""Runs `outrider` as a user types it, in this process.

shown = outrider("pull", "--server", url)
assert "Chosen" in shown.err
"""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from rich.console import Console

from outrider.edge.cli import main as cli

KEY = "a-key-of-many-letters-1"
OTHER_KEY = "a-key-of-many-letters-2"


@dataclass(frozen=True)
class Shown:
    """The exit code of a command, and what it wrote to standard output and to standard error."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Outrider:
    """`outrider(*words, code=2)`: what the command shows; its exit code must be that one. None: any."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: Any, code: int | None = 0) -> Shown:
        self.monkeypatch.setattr(sys, "argv", ["outrider", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = Shown(int(ended.value.code or 0), *self.capsys.readouterr())
        assert code in (shown.code, None), shown.err
        return shown


def key_file(folder: Path, key: str = KEY, mode: int = 0o600) -> Path:
    """A key file."""
    path = folder / "cloud.key"
    path.write_text(key + "\n", encoding="ascii")
    path.chmod(mode)
    return path


def screen(**options: Any) -> tuple[Console, io.StringIO]:
    """A console, 100 columns wide unless options say otherwise, and what it gets."""
    shown = io.StringIO()
    return Console(file=shown, **{"width": 100, **options}), shown


def commands_group() -> click.Group:
    """`outrider` with all its commands, as click has them."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    return group


def lines_of(document: Path) -> list[str]:
    """Every line of a document's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
