"""States the options of `outrider run`, once."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Annotated

import typer

from outrider.edge.cli.cloud_flags import AllowHttp, ApiKey, Clouds, KeyFile
from outrider.edge.cli.docs_flags import Docs, DocsTokens
from outrider.edge.cli.draft_flags import (
    LOOKUP,
    BatteryWork,
    DraftBytes,
    DraftDevice,
    Drafts,
    EmulateNpu,
    HowMuch,
    Lookup,
    OfflineOk,
    Provider,
    Runtime,
    Width,
    draft_choice,
    is_typed,
    refuse_idle,
    refuse_idle_effort,
    refuse_idle_tree,
)
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.devices.power import OnBattery
from outrider.edge.drafting.depth import Effort
from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.edge.results import Mode
from outrider.edge.retrieval.documents import DOCS_TOKENS
from outrider.edge.store.auto import AUTO
from outrider.models.errors import ConfigError
from outrider.models.reference_export import DEFAULT_VERIFIER_URL
from outrider.models.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command line. Raises ConfigError for options that contradict each other, SamplingError for their values."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; read from standard input where it is - or missing.", show_default=False
        ),
    ] = None
    draft: Drafts = field(default_factory=lambda: [AUTO])
    cloud: Clouds = field(default_factory=lambda: [DEFAULT_VERIFIER_URL])
    mode: Annotated[Mode, typer.Option(help="How device and cloud share the work.")] = Mode.STREAM
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
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest text, in tokens.")] = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Same seed, same text; default: drawn, and printed.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False
    patience_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Longest wait of the target for a draft; default: it chooses.")
    ] = None
    docs: Docs = None
    docs_tokens: DocsTokens = DOCS_TOKENS
    threads: Annotated[int, typer.Option(min=0, help="Threads of the draft; 0 leaves it to the runtime.")] = 0
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the draft bundle's chat template.")] = False
    offline_ok: OfflineOk = False
    compare: Annotated[
        bool, typer.Option("--compare", help="Then measure this mode and cloud-only in turn; print the speed-up.")
    ] = False
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of --compare; the median counts.")] = 3
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print which passages of --docs the prompt has.")] = (
        False
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False
    api_key: ApiKey = None
    key_file: KeyFile = None
    allow_http: AllowHttp = False
    choice: DraftChoice = field(init=False)
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        seed = secrets.randbits(32) if self.seed is None else self.seed
        choice = draft_choice(self.runtime, self.draft_device, self.emulate_npu, self.provider)
        object.__setattr__(self, "choice", choice)
        object.__setattr__(self, "params", SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, seed))
        self._refuse_idle()
        if self.mode is Mode.CLOUD_ONLY:
            if self.compare and is_typed("compare"):
                raise ConfigError("--compare measures cloud-only beside another --mode; leave one of them out")
            # What is left was configured for other modes.
            object.__setattr__(self, "choice", AS_BUNDLED)
            object.__setattr__(self, "compare", False)
            object.__setattr__(self, "patience_ms", None)

    def _refuse_idle(self) -> None:
        """Raises ConfigError for typed options that would have no effect."""
        device = {
            "--runtime": self.runtime is not None,
            "--draft-device": self.draft_device is not None,
            "--emulate-npu": self.emulate_npu,
            "--provider": self.provider is not None,
        }
        tree = {
            "--width": self.width != "auto",
            "--draft-bytes": self.draft_bytes != BYTES_PER_TOKEN,
            LOOKUP: self.lookup is not None,
            "--patience-ms": self.patience_ms is not None,
        }
        if self.offline_ok and self.mode is not Mode.STREAM and is_typed("offline_ok"):
            raise ConfigError("--offline-ok needs a draft that streams; leave out --mode, or --offline-ok")
        if self.offline_ok and self.compare and is_typed("compare"):
            raise ConfigError("--compare measures the cloud, and --offline-ok does without; leave one of them out")
        pace = {
            "--on-battery": self.on_battery is not OnBattery.HALF,
            "--depth": self.depth != "auto",
            "--effort": self.effort is not Effort.NORMAL,
            "--threads": self.threads != 0,
        }
        if self.docs is None:
            idle = {"--docs-tokens": self.docs_tokens != DOCS_TOKENS, "--verbose": self.verbose}
            refuse_idle("without --docs there are no passages", idle)
        if self.mode is Mode.CLOUD_ONLY:
            refuse_idle("nothing drafts with --mode cloud-only", device | tree | pace)
        if self.mode is Mode.STOP_AND_WAIT:
            refuse_idle("--mode stop-and-wait sends one path and waits for its answer", tree)
        refuse_idle_effort(self.depth, self.effort)
        refuse_idle_tree(self.width, self.draft_bytes, self.lookup, self.runtime)
