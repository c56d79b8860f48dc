"""Defines the options that choose clouds and their keys: the same for every command that talks to one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import typer
from click.core import ParameterSource

from outrider.edge.setup.endpoints import Keys
from outrider.edge.setup.key_file import read_key_file, require_private
from outrider.edge.setup.settings import Settings
from outrider.models.client.certificate import ClientCertificate
from outrider.models.errors import ConfigError

Clouds = Annotated[
    list[str], typer.Option("--cloud", "--server", help="Verifier's address; repeat for others to fall back on.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="OUTRIDER_API_KEY", help="Key for the verifier; better in OUTRIDER_API_KEY or --key-file."),
]
KeyFile = Annotated[Path | None, typer.Option(help="File that holds the verifier's key; only you may read it.")]
AllowHttp = Annotated[
    bool, typer.Option("--allow-http", help="Send the key over http:// beyond this machine, readable on the way.")
]


TlsClientCert = Annotated[
    Path | None,
    typer.Option(
        help="Certificate chain and its private key to show to servers that ask for one, PEM; only you may read it.",
        metavar="FILE",
        show_default=False,
    ),
]


def certificate_in_use(certificate: Path | None) -> ClientCertificate | None:
    """What the device shows to servers. Raises ConfigError for a file that cannot be used."""
    if certificate is None:
        return None
    certificate = certificate.expanduser()
    require_private(certificate)
    shown = ClientCertificate(certificate)
    shown.check()
    return shown


def keys_in_use(api_key: str | None, key_file: Path | None, *, allow_http: bool = False) -> Keys:
    """The keys for the command that runs now: its options' values, and the endpoints of the configuration file.

    Raises ConfigError where a key and a key file come from the same place, or the file cannot be used.
    """
    context = click.get_current_context(silent=True)
    settings = context.find_object(Settings) if context is not None else None
    endpoints = settings.endpoints if settings is not None else ()
    given = {"api_key": api_key, "key_file": key_file}
    sources = {
        name: (context.get_parameter_source(name) if context is not None else None) or ParameterSource.COMMANDLINE
        for name, value in given.items()
        if value is not None
    }
    if len(set(sources.values())) < len(sources):
        raise ConfigError("both a key and a key file are given (--api-key, --key-file); leave one of them out")
    if not sources:
        return Keys(endpoints=endpoints, is_http_allowed=allow_http)
    chosen = min(sources, key=lambda name: sources[name].value)
    key = read_key_file(key_file.expanduser()) if chosen == "key_file" and key_file is not None else api_key
    is_asked = sources[chosen] in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return Keys(key, is_asked, endpoints, allow_http)
