"""Defines the options of documents: the same for `run` and `serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Docs = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Find passages for the prompt in the text, Markdown and program files below DIR, and draft from them.",
    ),
]
