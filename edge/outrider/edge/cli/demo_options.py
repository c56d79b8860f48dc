"""States the options of `outrider demo`, once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from outrider.edge.cli.draft_flags import (
    REMOVED_DRAFTING,
    DraftDevice,
    EmulateNpu,
    HowMuch,
    Lookup,
    Runtime,
    Width,
    draft_choice,
    refuse_idle_tree,
)
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.drafting.depth import Effort
from outrider.models.bundle.reference_export import WIDENED_MB
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line. The text of prompt i is drawn with seed + i.

    Raises ConfigError before measuring if the file cannot be written.
    """

    REMOVED: ClassVar = {"--draft-bytes": REMOVED_DRAFTING["--draft-bytes"]}

    rtt_ms: Annotated[
        float | None,
        typer.Option(min=0.0, max=60_000.0, help="Round trip between device and cloud; default: 10, then others too."),
    ] = None
    widen: Annotated[
        float, typer.Option(min=0.0, help="Size of the target in MB, without changing its text; 0: as it is.")
    ] = WIDENED_MB
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None
    prompts: Annotated[int, typer.Option(min=1, help="How many texts.")] = 6
    max_tokens: Annotated[int, typer.Option(min=2, max=512, help="Tokens per text.")] = 64
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="Time to take; what does not fit is left out, and said before it starts.")
    ] = 120.0
    temperature: Annotated[float, typer.Option(help="0 is greedy; a model this small then repeats itself.")] = 0.8
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same texts.")] = 0
    draft_device: DraftDevice = None
    runtime: Runtime = None
    emulate_npu: EmulateNpu = False
    width: Width = "auto"
    effort: HowMuch = Effort.NORMAL
    lookup: Lookup = None
    choice: DraftChoice = field(init=False)
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choice", draft_choice(self.runtime, self.draft_device, self.emulate_npu))
        object.__setattr__(self, "params", SamplingParams(temperature=self.temperature, seed=self.seed))
        refuse_idle_tree(self.width, self.lookup, self.runtime)
        if self.json is not None and (self.json.is_dir() or not os.access(self.json.parent, os.W_OK)):
            raise ConfigError(f"--json {self.json} cannot be written; name a file in a directory that you may write to")
