"""States the options of `outrider serve`, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from outrider.edge.cli.docs_flags import Docs
from outrider.edge.cli.draft_flags import REMOVED_DRAFTING, OfflineOk, Threads
from outrider.edge.cli.option_groups import DraftingOptions, KeyOptions, SourceOptions
from outrider.models.errors import ConfigError
from outrider.models.process.listen_options import AccessOptions, Host, Port


@dataclass(frozen=True, slots=True)
class ServeOptions(SourceOptions, DraftingOptions, KeyOptions, AccessOptions):
    """The command line. Raises ConfigError for options that contradict each other."""

    HELP: ClassVar = {
        "Address and access": ("host", "port", "api_key_file", "allowed_origin", "tls_cert", "tls_key", "metrics"),
        "The draft and the cloud": ("draft", "draft_device", "cloud", "key_file", "on_battery", "offline_ok"),
        "Texts": ("max_requests", "docs"),
    }
    REMOVED: ClassVar = REMOVED_DRAFTING | {
        **dict.fromkeys(
            ("--rule", "--delta", "--acceptance"),
            "Every text is exactly the target's; other rules are for `outrider run --mode stop-and-wait`.",
        ),
        "--max-body-kb": "A request has 1,024 KiB at most.",
        "--rate": "--max-own bounds what one client has running.",
        "--drain-s": "Texts have 5 s to finish at the end.",
        "--docs-tokens": "Passages have 512 tokens at most.",
    }
    _keys: ClassVar = KeyOptions
    host: Host = "127.0.0.1"
    port: Port = 8077
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
    _access: ClassVar = AccessOptions
    allowed_origin: Annotated[
        list[str],
        typer.Option(
            help="Origin whose pages may call, such as https://ui.example; repeatable. They get CORS headers."
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
    _drafting: ClassVar = DraftingOptions
    docs: Docs = None
    offline_ok: OfflineOk = False
    threads: Threads = 0
    metrics: Annotated[bool, typer.Option("--metrics", help="Offer Prometheus metrics at /metrics.")] = False

    def __post_init__(self) -> None:
        self._choose()
        refuse_one_file(self.key_file, self.api_key_file)
        self._refuse_idle_drafting()


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
