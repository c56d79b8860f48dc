"""States the options of `outrider chat`, once."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from outrider.edge.cli.cloud_flags import AllowHttp, ApiKey, Clouds, KeyFile
from outrider.edge.cli.draft_flags import (
    LOOKUP,
    BatteryWork,
    DraftBytes,
    DraftDevice,
    Drafts,
    EmulateNpu,
    HowMuch,
    Lookup,
    Provider,
    Runtime,
    Width,
    draft_choice,
    refuse_idle,
    refuse_idle_effort,
    refuse_idle_tree,
)
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.devices.power import OnBattery
from outrider.edge.drafting.depth import Effort
from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.edge.store.auto import AUTO
from outrider.models.reference_export import DEFAULT_VERIFIER_URL
from outrider.models.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The command line. Raises ConfigError for options that contradict each other, SamplingError for their values."""

    draft: Drafts = field(default_factory=lambda: [AUTO])
    cloud: Clouds = field(default_factory=lambda: [DEFAULT_VERIFIER_URL])
    api_key: ApiKey = None
    key_file: KeyFile = None
    allow_http: AllowHttp = False
    system: Annotated[str, typer.Option(help="The system message.")] = ""
    load: Annotated[Path | None, typer.Option(help="Go on with a chat that /save wrote.")] = None
    history: Annotated[
        Path | None, typer.Option(help="File that keeps what was typed, for the next chat; default: nothing is kept.")
    ] = None
    drafts: Annotated[bool, typer.Option("--drafts/--no-drafts", help="Draft on this machine.")] = True
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers; default: drawn, /seed shows it.")] = None
    draft_device: DraftDevice = None
    runtime: Runtime = None
    emulate_npu: EmulateNpu = False
    provider: Provider = None
    depth: Annotated[str, typer.Option(help="How far to draft ahead: auto, threshold or a number, 0 to 64.")] = "auto"
    width: Width = "auto"
    effort: HowMuch = Effort.NORMAL
    on_battery: BatteryWork = OnBattery.HALF
    draft_bytes: DraftBytes = BYTES_PER_TOKEN
    lookup: Lookup = None
    patience_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Longest wait of the target for a draft; default: it chooses.")
    ] = None
    threads: Annotated[int, typer.Option(min=0, help="Threads of the draft; 0 leaves it to the runtime.")] = 0
    draft_context: Annotated[
        int,
        typer.Option(min=1, help="Tokens of a chat that the draft holds; it bounds memory. Later ones get no drafts."),
    ] = 8192
    choice: DraftChoice = field(init=False)
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        seed = secrets.randbits(32) if self.seed is None else self.seed
        choice = draft_choice(self.runtime, self.draft_device, self.emulate_npu, self.provider)
        object.__setattr__(self, "choice", choice)
        object.__setattr__(self, "params", SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, seed))
        if not self.drafts:
            given = {
                "--runtime": self.runtime is not None,
                "--draft-device": self.draft_device is not None,
                "--emulate-npu": self.emulate_npu,
                "--provider": self.provider is not None,
                "--width": self.width != "auto",
                "--draft-bytes": self.draft_bytes != BYTES_PER_TOKEN,
                LOOKUP: self.lookup is not None,
                "--patience-ms": self.patience_ms is not None,
                "--on-battery": self.on_battery is not OnBattery.HALF,
                "--depth": self.depth != "auto",
                "--effort": self.effort is not Effort.NORMAL,
                "--threads": self.threads != 0,
            }
            refuse_idle("nothing drafts with --no-drafts", given)
            object.__setattr__(self, "choice", AS_BUNDLED)
        refuse_idle_effort(self.depth, self.effort)
        refuse_idle_tree(self.width, self.draft_bytes, self.lookup, self.runtime)
