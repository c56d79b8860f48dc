"""States the options of replicas: a group of `outrider-cloud serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas, and how Ray places them. A group, as `takes_options` takes it."""

    __slots__ = ()

    ray: Annotated[bool, typer.Option("--ray", help="Run replicas on a Ray of this machine, behind one address.")] = (
        False
    )
    replicas: Annotated[
        int | None, typer.Option(min=1, help="With --ray: replicas, each with a model of its own; default: 2.")
    ] = None
    min_replicas: Annotated[int | None, typer.Option(min=1, help="With --max-replicas: the fewest; default: 1.")] = None
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: start more replicas, up to this many, as sequences run and queue."),
    ] = None
    target_sequences: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="With --max-replicas: sequences of a replica above which another starts; default: --max-running.",
        ),
    ] = None
    gpus_per_replica: Annotated[
        float | None,
        typer.Option(min=0.0, help="With --ray: GPUs that Ray gives each replica; default: what the target opens."),
    ] = None
