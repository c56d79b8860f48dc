"""States the options that several commands share, in groups, as `takes_options` takes them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from outrider.edge.cli.cloud_flags import (
    AllowHttp,
    ApiKey,
    Clouds,
    KeyFile,
    TlsClientCert,
    TlsClientKey,
    certificate_in_use,
    keys_in_use,
)
from outrider.edge.cli.draft_flags import (
    BatteryWork,
    Depth,
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
    refuse_idle_effort,
    refuse_idle_tree,
)
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.devices.power import OnBattery
from outrider.edge.drafting.depth import Effort
from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.auto import AUTO
from outrider.models.reference_export import DEFAULT_VERIFIER_URL
from outrider.models.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Which drafts, and which clouds."""

    __slots__ = ()

    draft: Drafts = field(default_factory=lambda: [AUTO])
    cloud: Clouds = field(default_factory=lambda: [DEFAULT_VERIFIER_URL])


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Which key the clouds get, and which certificate the device shows."""

    __slots__ = ()

    api_key: ApiKey = None
    key_file: KeyFile = None
    allow_http: AllowHttp = False
    tls_client_cert: TlsClientCert = None
    tls_client_key: TlsClientKey = None

    def keys(self) -> Keys:
        """The keys, and the device's certificate, for the command that runs now.

        Raises as `keys_in_use` and `certificate_in_use`.
        """
        keys = keys_in_use(self.api_key, self.key_file, allow_http=self.allow_http)
        return replace(keys, certificate=certificate_in_use(self.tls_client_cert, self.tls_client_key))


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where the draft runs."""

    __slots__ = ()

    draft_device: DraftDevice = None
    runtime: Runtime = None
    emulate_npu: EmulateNpu = False
    provider: Provider = None
    choice: DraftChoice = field(init=False)

    def _choose(self) -> None:
        """Sets `choice`. Raises as `draft_choice`."""
        choice = draft_choice(self.runtime, self.draft_device, self.emulate_npu, self.provider)
        object.__setattr__(self, "choice", choice)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(PlaceOptions):
    """Where the draft runs, and how much it drafts."""

    __slots__ = ()

    depth: Depth = "auto"
    width: Width = "auto"
    effort: HowMuch = Effort.NORMAL
    on_battery: BatteryWork = OnBattery.HALF
    draft_bytes: DraftBytes = BYTES_PER_TOKEN
    lookup: Lookup = None

    @property
    def is_looked_up(self) -> bool:
        """Whether earlier passages of a text are copied."""
        return self.lookup is not False

    def _refuse_idle_drafting(self) -> None:
        """Raises ConfigError for typed options that have no effect beside one another."""
        refuse_idle_effort(self.depth, self.effort)
        refuse_idle_tree(self.width, self.draft_bytes, self.lookup, self.runtime)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the text is drawn, but for its seed."""

    __slots__ = ()

    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8
    top_k: Annotated[int, typer.Option(help="0 or -1 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0
    params: SamplingParams = field(init=False)

    def _set_params(self, seed: int | None) -> None:
        """Sets `params`; draws a seed where none is given. Raises SamplingError."""
        seed = secrets.randbits(32) if seed is None else seed
        object.__setattr__(self, "params", SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, seed))
