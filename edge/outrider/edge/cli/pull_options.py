"""States the options of `outrider pull`, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from outrider.edge.cli.cloud_flags import Clouds
from outrider.edge.cli.draft_flags import REMOVED_DRAFTING, is_typed, refuse_idle
from outrider.edge.cli.option_groups import KeyOptions
from outrider.edge.devices.discovery import ModelRuntime
from outrider.edge.devices.placement import DraftRuntime
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.bundle.reference_export import DEFAULT_VERIFIER_URL
from outrider.models.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PullOptions(KeyOptions):
    """The command line; None leaves a choice to the command. Raises ConfigError for a contradiction."""

    REMOVED: ClassVar = {"--tls-client-key": REMOVED_DRAFTING["--tls-client-key"]}

    cloud: Clouds = field(default_factory=lambda: [DEFAULT_VERIFIER_URL])
    device: Annotated[
        Device | None, typer.Option(help="Take a draft for this device; default: what is here.", show_default=False)
    ] = None
    runtime: Annotated[
        DraftRuntime | None,
        typer.Option(help="Take a draft for this runtime.", metavar="[openvino|onnxruntime]", show_default=False),
    ] = None
    precision: Annotated[Precision | None, typer.Option(help="Take a draft of this precision.", show_default=False)] = (
        None
    )
    name: Annotated[
        str | None, typer.Option(help="Take this draft, even if it does not run here.", show_default=False)
    ] = None
    to: Annotated[
        Path | None,
        typer.Option(help="Put the bundle here; default: the cache, where `outrider run` finds it.", metavar="DIR"),
    ] = None
    is_listing: Annotated[bool, typer.Option("--list", help="Show the drafts of each server and take none.")] = False
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Then remove pulled drafts that the servers no longer offer; none in use."),
    ] = False
    _keys: ClassVar = KeyOptions

    def __post_init__(self) -> None:
        if self.runtime == "ngram" and is_typed("runtime"):
            raise ConfigError("--runtime ngram drafts without a model, so there is nothing to pull; leave it out")
        if self.is_listing and self.to is not None:
            raise ConfigError("--list takes no draft, so nothing comes to --to; leave one of them out")
        if self.is_listing:
            refuse_idle("--list changes nothing", {"--prune": self.prune})
        elif self.to is not None:
            refuse_idle("--to leaves the cache as it is", {"--prune": self.prune})

    @property
    def model_runtime(self) -> ModelRuntime | None:
        """The runtime to pull for; a configured "ngram" is for the commands that draft."""
        return None if self.runtime == "ngram" else self.runtime
