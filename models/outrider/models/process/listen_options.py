"""States the options of a server's address and access: the same for `outrider serve` and `outrider-cloud serve`.

Not in `ingress`: the command line of a device loads this for every command, and no server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")]


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """The server's certificate, and the names by which clients may call it. A group, as `takes_options` takes it."""

    __slots__ = ()

    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM; with --tls-key, serves HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key, PEM.")] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Clients must show a certificate of these authorities, PEM; without keys its subject is the owner."
        ),
    ] = None
    allowed_host: Annotated[
        list[str],
        typer.Option(
            help="Host header that clients may send: a name, or '*' for any; repeatable. Loopback names are always "
            "allowed. Default: any with keys; without keys, the address of --host."
        ),
    ] = field(default_factory=list)
