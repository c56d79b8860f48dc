"""Parses `outrider-cloud serve` command lines as the command does, without running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import typer.main

from outrider.cloud.server.main import app


def serve_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command line, by their names in ServeOptions; fails for one that the command would refuse."""
    assert list(words[:2]) == ["outrider-cloud", "serve"], words
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    return group.commands["serve"].make_context("serve", list(words[2:])).params
