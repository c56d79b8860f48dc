"""States the options of `outrider chat`, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from outrider.edge.cli.draft_flags import DRAFTS, REMOVED_DRAFTING, Threads, given, refuse_idle
from outrider.edge.cli.option_groups import AS_PARAM, DraftingOptions, KeyOptions, SamplingOptions, SourceOptions
from outrider.edge.devices.placement import AS_BUNDLED


@dataclass(frozen=True, slots=True)
class ChatOptions(SourceOptions, DraftingOptions, SamplingOptions, KeyOptions):
    """The command line. Raises ConfigError for options that contradict each other, SamplingError for their values."""

    _keys: ClassVar = KeyOptions
    system: Annotated[str, typer.Option(help="The system message.")] = ""
    load: Annotated[Path | None, typer.Option(help="Go on with a chat that /save wrote.")] = None
    history: Annotated[
        Path | None, typer.Option(help="File that keeps what was typed, for the next chat; default: nothing is kept.")
    ] = None
    drafts: Annotated[bool, typer.Option("--drafts/--no-drafts", help="Draft on this machine.")] = True
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024
    _sampling: ClassVar = SamplingOptions
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers; default: drawn, /seed shows it.")] = None
    _drafting: ClassVar = DraftingOptions
    threads: Threads = 0

    HELP: ClassVar = {
        "The chat": ("system", "load", "history", "max_tokens", "temperature", "seed", "param"),
        "The draft and the cloud": ("draft", "draft_device", "cloud", "key_file", "drafts", "on_battery"),
    }
    REMOVED: ClassVar = REMOVED_DRAFTING | {
        **dict.fromkeys(("--top-k", "--top-p", "--min-p"), AS_PARAM),
        "--draft-context": "The draft holds 8,192 tokens of a chat.",
    }

    def __post_init__(self) -> None:
        self._choose()
        self._set_params(self.seed)
        if not self.drafts:
            refuse_idle("nothing drafts with --no-drafts", given(self, *DRAFTS))
            object.__setattr__(self, "choice", AS_BUNDLED)
        self._refuse_idle_drafting()
