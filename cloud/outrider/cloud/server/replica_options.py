"""States the options of replicas: a group of `outrider-cloud serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas, and how Ray places them. A group, as `takes_options` takes it."""

    __slots__ = ()

    ray: Annotated[bool, typer.Option("--ray", help="Run replicas on a Ray of this machine, behind one address.")] = (
        False
    )
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|FEWEST-MOST",
            help="With --ray: replicas, each with a model of its own; 1-4 starts more, up to 4, while each has "
            "--max-running sequences. Default: 2.",
        ),
    ] = None
    gpus_per_replica: Annotated[
        float | None,
        typer.Option(min=0.0, help="With --ray: GPUs that Ray gives each replica; default: what the target opens."),
    ] = None

    def num_replicas(self) -> tuple[int, int]:
        """The fewest and the most. Raises ConfigError."""
        fewest, separator, most = (self.replicas or "2").partition("-")
        most = most if separator else fewest
        if not (fewest.isdecimal() and most.isdecimal() and 0 < int(fewest) <= int(most)):
            raise ConfigError(f"--replicas is {self.replicas!r}; expected a number, or the fewest and the most: 1-4")
        return int(fewest), int(most)
