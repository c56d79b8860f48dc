"""States the options of `outrider serve`, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from outrider.edge.cli.cloud_flags import AllowHttp, ApiKey, Clouds, KeyFile
from outrider.edge.cli.docs_flags import Docs, DocsTokens
from outrider.edge.cli.draft_flags import (
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
    refuse_idle_effort,
    refuse_idle_tree,
)
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.devices.power import OnBattery
from outrider.edge.drafting.depth import Effort
from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.edge.retrieval.documents import DOCS_TOKENS
from outrider.edge.store.auto import AUTO
from outrider.models.errors import ConfigError
from outrider.models.reference_export import DEFAULT_VERIFIER_URL


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command line. Raises ConfigError for options that contradict each other."""

    draft: Drafts = field(default_factory=lambda: [AUTO])
    cloud: Clouds = field(default_factory=lambda: [DEFAULT_VERIFIER_URL])
    api_key: ApiKey = None
    key_file: KeyFile = None
    allow_http: AllowHttp = False
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8077
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Keys that clients must send, one per line. Also from OUTRIDER_API_KEYS, between commas."),
    ] = None
    insecure_no_keys: Annotated[
        bool, typer.Option("--insecure-no-keys", help="Listen beyond this machine without keys.")
    ] = False
    any_user: Annotated[
        bool, typer.Option("--any-user", help="Without keys, let other users of this machine call too.")
    ] = False
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM; with --tls-key, serves HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key, PEM.")] = None
    allowed_host: Annotated[
        list[str],
        typer.Option(
            help="Host header that clients may send: a name, or '*' for any; repeatable. Loopback names are always "
            "allowed. Default: any with keys; without keys, the address of --host."
        ),
    ] = field(default_factory=list)
    allowed_origin: Annotated[
        list[str],
        typer.Option(
            help="Origin whose pages may call, such as https://chat.example.com; repeatable. They get CORS headers."
        ),
    ] = field(default_factory=list)
    max_requests: Annotated[int, typer.Option(min=1, help="Texts at a time, of all clients.")] = 16
    max_own: Annotated[
        int | None, typer.Option(min=1, help="Texts at a time of one key, or address; default: all.")
    ] = None
    max_drafting: Annotated[
        int, typer.Option(min=1, help="Texts that the draft model drafts for at a time; others copy passages and wait.")
    ] = 8
    draft_context: Annotated[
        int,
        typer.Option(min=1, help="Tokens of a text that the draft holds; it bounds memory. Later ones get no drafts."),
    ] = 8192
    max_body_kb: Annotated[int, typer.Option(min=1, help="Largest request body, KiB.")] = 1024
    rate: Annotated[float, typer.Option(min=0.0, help="Requests per second and client; 0: no limit.")] = 0.0
    drain_s: Annotated[float, typer.Option(min=0.0, help="How long texts may take to finish at the end.")] = 5.0
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
    docs: Docs = None
    docs_tokens: DocsTokens = DOCS_TOKENS
    offline_ok: OfflineOk = False
    threads: Annotated[int, typer.Option(min=0, help="Threads of the draft; 0 leaves it to the runtime.")] = 0
    metrics: Annotated[bool, typer.Option("--metrics", help="Offer Prometheus metrics at /metrics.")] = False
    choice: DraftChoice = field(init=False)

    def __post_init__(self) -> None:
        choice = draft_choice(self.runtime, self.draft_device, self.emulate_npu, self.provider)
        object.__setattr__(self, "choice", choice)
        refuse_one_file(self.key_file, self.api_key_file)
        refuse_idle_effort(self.depth, self.effort)
        refuse_idle_tree(self.width, self.draft_bytes, self.lookup, self.runtime)

    @property
    def is_looked_up(self) -> bool:
        """Whether earlier passages of a text are copied."""
        return self.lookup is not False


def refuse_one_file(verifiers: str | Path | None, clients: Path | None) -> None:
    """Raises ConfigError where the verifier's key and the keys of this endpoint's clients are one file.

    Whoever may call this endpoint could then spend the verifier's key elsewhere.
    """
    if verifiers is None or clients is None:
        return
    one, other = Path(verifiers).expanduser().resolve(), clients.expanduser().resolve()
    if one == other:
        raise ConfigError(
            f"{one} is given twice: --key-file holds the key that goes to the verifier, --api-key-file those that "
            "clients of this endpoint send; give each a file of its own"
        )
