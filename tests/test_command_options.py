"""Tests how a dataclass states a command's options, and in which order they are shown; and what ends a command."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from outrider.models.errors import ConfigError
from outrider.models.process.command_line import (
    make_app,
    run_app,
    takes_options,
)


@dataclass(frozen=True, kw_only=True)
class First:
    """Options that a command inherits and does not place."""

    __slots__ = ()

    first: Annotated[int, typer.Option()] = 1


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options that a command inherits and places."""

    __slots__ = ()

    third: Annotated[int, typer.Option()] = 3
    fourth: Annotated[int, typer.Option()] = 4
    whole: int = field(init=False)

    def add(self) -> None:
        """Sets `whole`."""
        object.__setattr__(self, "whole", self.third + self.fourth)


@dataclass(frozen=True, slots=True)
class Grouped(Shared, First):
    """Options of a command, in groups."""

    name: Annotated[str, typer.Argument(help="A name.")]
    second: Annotated[int, typer.Option(min=1, help="A size.")] = 2
    _shared: ClassVar = Shared
    fifth: Annotated[list[str], typer.Option()] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add()


def test_a_dataclass_states_the_options_of_a_command() -> None:
    """Types, defaults, limits and help come from its fields; the command gets an instance. In the help inherited
    options come where the class places them; what it does not place comes first.
    """
    app, seen = make_app("An app."), list[Grouped]()

    @app.command()
    @takes_options(Grouped)
    def act(options: Grouped) -> None:
        """Acts."""
        seen.append(options)

    given = ["--third", "9", "--fifth", "a", "--fifth", "b"]
    arguments = (["x"], ["y", *given], ["x", "--second", "0"], ["--help"])
    *_, shown = results = [CliRunner().invoke(app, ["act", *words]) for words in arguments]
    assert [each.exit_code for each in results] == [0, 0, 2, 0]
    assert seen == [Grouped("x"), Grouped("y", third=9, fifth=["a", "b"])] and [each.whole for each in seen] == [7, 13]
    assert re.findall(r"--(\w+)", shown.output) == ["first", "second", "third", "fourth", "fifth", "help"]
    assert "Acts." in shown.output and "A size." in shown.output and not hasattr(seen[0], "__dict__")


def ending(monkeypatch: pytest.MonkeyPatch, raised: BaseException) -> None:
    """Runs a command that ends with this."""
    app = make_app("An app.")

    @app.command()
    def act() -> None:
        raise raised

    monkeypatch.setattr(sys, "argv", ["app", "act"])
    run_app(app, what="acting", extra="edge")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ConfigError("so [not]"), 2, "error: so [not]\n"),
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "there"), 2, "error: there: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
        (ModuleNotFoundError("no x", name="x"), 2, 'pip install "outrider[edge]"\n'),
        (typer.Exit(7), 7, ""),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int,
    said: str,
) -> None:
    """One line for what the user can put right; Ctrl-C says nothing."""
    with pytest.raises(SystemExit, match=f"^{code}$"):
        ending(monkeypatch, raised)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.endswith(said) and shown.err.count("\n") == bool(said)


def test_a_command_without_standard_output_ends_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """pythonw.exe has none: a service that failed at its end would be started again."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit, match=r"^0$"):
        ending(monkeypatch, typer.Exit(0))


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody can put right from outside keeps its traceback."""
    with pytest.raises(ZeroDivisionError):
        ending(monkeypatch, ZeroDivisionError())
