"""States the options of `outrider chat`, `pull`, `demo` and `serve`, once; `run_options` has those of `run`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from outrider.edge.cli.option_groups import (
    AS_PARAM,
    DRAFTS,
    REMOVED_DRAFTING,
    Clouds,
    Docs,
    DraftingOptions,
    HowMuch,
    KeyOptions,
    Lookup,
    OfflineOk,
    PlaceOptions,
    SameTokenizer,
    SamplingOptions,
    SourceOptions,
    Width,
    is_typed,
    refuse_idle,
    refuse_idle_tree,
)
from outrider.edge.devices.placement import AS_BUNDLED, DraftRuntime
from outrider.edge.drafting.depth import Effort
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.bundle.reference_export import DEFAULT_VERIFIER_URL, WIDENED_MB
from outrider.models.cache_folder import expanded
from outrider.models.errors import ConfigError
from outrider.models.hosts import is_loopback
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.listen_options import AccessOptions, Host, Port


@dataclass(frozen=True)
class ChatOptions(SourceOptions, DraftingOptions, SamplingOptions, KeyOptions):
    """The command line. Raises ConfigError for options that contradict each other, SamplingError for their values."""

    _keys: ClassVar = KeyOptions
    system: Annotated[str, typer.Option(help="The system message.")] = ""
    load: Annotated[Path | None, typer.Option(help="Go on with a chat that /save wrote.")] = None
    history: Annotated[
        Path | None, typer.Option(help="File that keeps what was typed, for the next chat; default: nothing is kept.")
    ] = None
    drafts: Annotated[bool, typer.Option("--drafts/--no-drafts", help="Draft on this machine.")] = True
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 1024
    _sampling: ClassVar = SamplingOptions
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers; default: drawn, /seed shows it.")] = None
    _drafting: ClassVar = DraftingOptions

    HELP: ClassVar = {
        "The chat": ("system", "load", "history", "max_tokens", "temperature", "seed", "param"),
        "The draft and the cloud": ("draft", "draft_device", "cloud", "target", "key_file", "drafts", "on_battery"),
    }
    REMOVED: ClassVar = REMOVED_DRAFTING | {
        **dict.fromkeys(("--top-k", "--top-p", "--min-p"), AS_PARAM),
        "--draft-context": "The draft holds 8,192 tokens of a chat.",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose_verifier()
        self._set_params(self.seed)
        refuse_idle(self, not self.drafts, "nothing drafts with --no-drafts", *DRAFTS)
        if not self.drafts:
            object.__setattr__(self, "choice", AS_BUNDLED)
        self._refuse_idle_drafting()


@dataclass(frozen=True)
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
    same_tokenizer: SameTokenizer = False
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
        refuse_idle(self, self.is_listing, "--list changes nothing", "prune")
        refuse_idle(self, self.to is not None, "--to leaves the cache as it is", "prune")


@dataclass(frozen=True)
class DemoOptions(PlaceOptions):
    """The command line. The text of prompt i is drawn with seed + i.

    Raises ConfigError before measuring if the file cannot be written.
    """

    REMOVED: ClassVar = {"--draft-bytes": REMOVED_DRAFTING["--draft-bytes"]}

    rtt_ms: Annotated[
        float | None,
        typer.Option(min=0.0, max=60_000.0, help="Round trip between device and cloud; default: 10, then others too."),
    ] = None
    widen: Annotated[
        float, typer.Option(min=0.0, help="Size of the target in MB, without changing its text; 0: as it is.")
    ] = WIDENED_MB
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None
    prompts: Annotated[int, typer.Option(min=1, help="How many texts.")] = 6
    max_tokens: Annotated[int, typer.Option(min=2, max=512, help="Tokens per text.")] = 64
    max_seconds: Annotated[
        float, typer.Option(min=1.0, help="Time to take; what does not fit is left out, and said before it starts.")
    ] = 120.0
    temperature: Annotated[float, typer.Option(help="0 is greedy; a model this small then repeats itself.")] = 0.8
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same texts.")] = 0
    _place: ClassVar = PlaceOptions
    width: Width = "auto"
    effort: HowMuch = Effort.NORMAL
    lookup: Lookup = None
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "params", SamplingParams(temperature=self.temperature, seed=self.seed))
        refuse_idle_tree(self, self.width)
        if self.json is not None and (self.json.is_dir() or not os.access(self.json.parent, os.W_OK)):
            raise ConfigError(f"--json {self.json} cannot be written; name a file in a directory that you may write to")


@dataclass(frozen=True)
class ServeOptions(SourceOptions, DraftingOptions, KeyOptions, AccessOptions):
    """The command line. Raises ConfigError for options that contradict each other."""

    HELP: ClassVar = {
        "Address and access": ("host", "port", "api_key_file", "allowed_origin", "tls_cert", "tls_key", "metrics"),
        "The draft and the cloud": ("draft", "draft_device", "cloud", "target", "key_file", "on_battery", "offline_ok"),
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
    metrics: Annotated[bool, typer.Option("--metrics", help="Offer Prometheus metrics at /metrics.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose_verifier()
        if self.api_key_file is not None:
            object.__setattr__(self, "api_key_file", expanded(self.api_key_file))
        refuse_one_file(self.key_file, self.api_key_file)
        self._refuse_idle_drafting()
        refuse_idle(self, is_loopback(self.host), f"{self.host} is reached from this machine only", "insecure_no_keys")
        is_more = self.max_own is not None and self.max_own > self.max_requests
        refuse_idle(self, is_more, f"--max-requests {self.max_requests} bounds all clients together", "max_own")
        if self.steady and not is_loopback(self.host):
            raise ConfigError(
                f"--steady hides texts between this device and the verifier; what goes to clients beyond {self.host} "
                "are OpenAI's streams, which have no fixed pace: leave out --host, or --steady"
            )


def refuse_one_file(verifiers: str | Path | None, clients: Path | None) -> None:
    """Raises ConfigError where the verifier's key and the keys of this endpoint's clients are one file.

    Whoever may call this endpoint could then spend the verifier's key elsewhere.
    """
    if verifiers is None or clients is None:
        return
    one, other = expanded(verifiers).resolve(), expanded(clients).resolve()
    if one == other:
        raise ConfigError(
            f"{one} is given twice: --key-file holds the key that goes to the verifier, --api-key-file those that "
            "clients of this endpoint send; give each a file of its own"
        )
