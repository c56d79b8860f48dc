"""States the options that several commands share, in groups, as `takes_options` takes them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import typer

from outrider.edge.cli.cloud_flags import (
    AllowHttp,
    ApiKey,
    Clouds,
    KeyFile,
    TlsClientCert,
    certificate_in_use,
    keys_in_use,
)
from outrider.edge.cli.draft_flags import (
    BatteryWork,
    Depth,
    DraftDevice,
    Drafts,
    EmulateNpu,
    HowMuch,
    Lookup,
    Runtime,
    Width,
    draft_choice,
    refuse_idle_effort,
    refuse_idle_tree,
)
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.devices.power import OnBattery
from outrider.edge.drafting.depth import Effort
from outrider.edge.setup.endpoints import Keys
from outrider.edge.store.auto import AUTO
from outrider.models.bundle.reference_export import DEFAULT_VERIFIER_URL
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams

AS_PARAM: Final = "Give it as --param NAME=NUMBER, such as --param top_p=0.9."
_SAMPLING: Final = ("top_k", "top_p", "min_p")
_INTEGERS: Final = ("top_k", "min_tokens")


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

    def keys(self) -> Keys:
        """The keys, and the device's certificate, for the command that runs now.

        Raises as `keys_in_use` and `certificate_in_use`.
        """
        keys = keys_in_use(self.api_key, self.key_file, allow_http=self.allow_http)
        return replace(keys, certificate=certificate_in_use(self.tls_client_cert))


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where the draft runs."""

    __slots__ = ()

    draft_device: DraftDevice = None
    runtime: Runtime = None
    emulate_npu: EmulateNpu = False
    choice: DraftChoice = field(init=False)

    def _choose(self) -> None:
        """Sets `choice`. Raises as `draft_choice`."""
        choice = draft_choice(self.runtime, self.draft_device, self.emulate_npu)
        object.__setattr__(self, "choice", choice)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(PlaceOptions):
    """Where the draft runs, and how much it drafts."""

    __slots__ = ()

    depth: Depth = "auto"
    width: Width = "auto"
    effort: HowMuch = Effort.NORMAL
    on_battery: BatteryWork = OnBattery.HALF
    lookup: Lookup = None

    @property
    def is_looked_up(self) -> bool:
        """Whether earlier passages of a text are copied."""
        return self.lookup is not False

    def _refuse_idle_drafting(self) -> None:
        """Raises ConfigError for typed options that have no effect beside one another."""
        refuse_idle_effort(self.depth, self.effort)
        refuse_idle_tree(self.width, self.lookup, self.runtime)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the text is drawn, but for its seed."""

    __slots__ = ()

    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8
    param: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=NUMBER",
            help="Another parameter of the pick, repeatable: top_k, top_p, min_p; for `run` also repetition_penalty, "
            "presence_penalty, frequency_penalty, min_tokens, typical_p, xtc_probability and xtc_threshold.",
        ),
    ] = field(default_factory=list)
    params: SamplingParams = field(init=False)

    def _set_params(self, seed: int | None, others: Sequence[str] = ()) -> dict[str, float]:
        """Sets `params`; draws a seed where none is given. Raises SamplingError.

        others: names that --param may have beside those of the sampling; returns their numbers.
        """
        numbers = dict(_named(each, (*_SAMPLING, *others)) for each in self.param)
        seed = secrets.randbits(32) if seed is None else seed
        top_k, top_p, min_p = int(numbers.get("top_k", 0)), numbers.get("top_p", 1.0), numbers.get("min_p", 0.0)
        object.__setattr__(self, "params", SamplingParams(self.temperature, top_k, top_p, min_p, seed))
        return {name: number for name, number in numbers.items() if name not in _SAMPLING}


def _named(text: str, names: Sequence[str]) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        if name not in names or not math.isfinite(float(number)):
            raise ValueError
        return name, int(number) if name in _INTEGERS else float(number)
    except (ValueError, OverflowError):
        raise ConfigError(f"--param is {text!r}; expected NAME=NUMBER, with one of {', '.join(names)}") from None
