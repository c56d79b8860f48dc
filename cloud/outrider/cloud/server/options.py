"""States the options of `outrider-cloud serve`, once, and reads them from a TOML file: `--config FILE`.

What is typed comes before the file. The file's values have the kinds of TOML, and its relative paths begin beside it,
as in the device's file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import click
import typer

from outrider.cloud.engine.config import TreeForm
from outrider.cloud.pending.policy import Policy
from outrider.models.bundle.reference_export import REFERENCE
from outrider.models.cache_folder import expanded
from outrider.models.errors import ConfigError
from outrider.models.http.logs import LogFormat
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.process.command_line import has_kind, kind_of, removed_options
from outrider.models.process.listen_options import AccessOptions, Host, Port

_LIMITS: Final = ConnectionLimits()
_KV_CACHE_MB: Final = 256
_MAX_BYTES: Final = 1 << 20
_KIND_WORDS: Final = {"bool": "true or false", "int": "whole number", "float": "number", "str": "text"}
_UNFIT: Final = frozenset({"config", "help", "help_all"})


def configure(ctx: typer.Context, value: Path | None) -> Path | None:
    """Makes the file's values the command's defaults. Raises ConfigError, which names file and option."""
    if value is None:
        return None
    try:
        with value.open("rb") as file:
            read = file.read(_MAX_BYTES + 1)
        if len(read) > _MAX_BYTES:
            raise ConfigError(f"--config {value} has over {_MAX_BYTES >> 20} MiB; expected a file of options")
        values = tomllib.loads(read.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {value} cannot be read ({error.strerror}); name a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {value} is not TOML: {error}; correct that line") from None
    options = [each for each in ctx.command.params if isinstance(each, click.Option)]
    known = {each.name: each for each in options if each.name and each.name not in _UNFIT}
    defaults = dict(ctx.default_map or {})
    for name, given in values.items():
        option = known.get(name)
        if option is None and (removed := removed_options(ctx.command).get(name)) is not None:
            raise ConfigError(f"{value}: {name!r} is no option any more. {removed}")
        if option is None:
            closest = get_close_matches(name, [*known], n=1)
            advice = f"did you mean {closest[0]!r}?" if closest else "remove it"
            raise ConfigError(f"{value}: {name!r} is no option of `{ctx.command_path}`; {advice}")
        defaults[name] = _fit(ctx, value, option, given)
    ctx.default_map = defaults
    return value


def _fit(ctx: click.Context, file: Path, option: click.Option, given: Any) -> Any:
    """The value as the option takes it: a relative path begins beside the file. Raises ConfigError."""
    items = given if option.multiple else [given]
    expected = f"{'a list of ' if option.multiple else 'one '}{_KIND_WORDS[kind_of(option)]}"
    if not isinstance(items, list) or not all(has_kind(each, option) for each in items):
        raise ConfigError(f"{file}: {option.name} is {given!r}; expected {expected}")
    if isinstance(option.type, click.Path):
        items = [str(file.parent / expanded(each)) for each in items]
    if option.name == "lora":
        items = [placed_lora(each, file.parent) for each in items]
    fitting = items if option.multiple else items[0]
    try:
        option.type_cast_value(ctx, fitting)
    except click.BadParameter as error:
        raise ConfigError(f"{file}: {option.name} is {given!r}: {error.message}") from None
    return fitting


def placed_lora(text: str, root: Path) -> str:
    """A value of --lora whose relative directory begins at `root`."""
    name, separator, directory = text.partition("=")
    return f"{name}{separator}{root / expanded(directory)}" if directory else text


class EngineName(StrEnum):
    """What verifies: our own engine, or vLLM."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


class Exactness(StrEnum):
    """Whether a text may depend on what else runs in its steps: never, or where two tokens are nearly equal."""

    BITWISE = "bitwise"
    NEAR = "near"


@dataclass(frozen=True, slots=True)
class ServeOptions(AccessOptions):
    """The command line; None leaves a choice to the bundle or the engine."""

    HELP: ClassVar = {
        "The model": ("name", "engine", "device", "threads", "kv_cache_mb", "upstream", "drafts"),
        "Address and access": ("host", "port", "api_key_file", "tls_cert", "tls_key", "allowed_host"),
        "Load": ("max_running", "max_sessions", "tokens_per_minute", "ray", "replicas"),
        "Operation": ("config", "audit_log"),
    }
    REMOVED: ClassVar = {
        **dict.fromkeys(("--min-replicas", "--max-replicas"), "Give both numbers to --replicas: --replicas 1-4."),
        "--target-sequences": "Another replica starts where each has --max-running sequences.",
        "--runtime": "The bundle says what runs it; export another for another runtime.",
        "--upstream-key-file": "Set OUTRIDER_UPSTREAM_KEY.",
        "--spill": "Prefixes are written when they lose their place in memory; at once with Ray.",
        "--spill-s": "A prefix is kept for an hour; --spill-mb bounds their size.",
        "--spill-type": "Files of prefixes are exact; --spill-mb bounds their size.",
        "--recent-s": "A recent text is kept for ten minutes; --no-recent keeps none.",
        "--cache-dir": "Compiled models are kept below OUTRIDER_CACHE.",
        "--step-tokens": "A step has 256 tokens, or 8 per sequence where that is more; with vLLM on a GPU 2,048.",
        "--max-queue": "1,024 sequences may wait.",
        "--patience-ms": "The engine bounds waits for drafts by its step times; so may a session's patience_ms.",
        "--max-connections": "There are 2,048, or what the limit on open files allows. See --max-per-client.",
        "--max-body-kb": "A request has 1,024 KiB at most.",
        **dict.fromkeys(
            ("--source", "--lookahead", "--heads"),
            "Neither n-grams nor draft heads gained beside a device; vLLM serves heads with --vllm-option heads=DIR.",
        ),
    }

    bundle: Annotated[
        str,
        typer.Argument(
            help=f"Directory of a target bundle, as outrider-export writes it; '{REFERENCE}' for the reference target. "
            "With --engine vllm also a Hugging Face directory."
        ),
    ]
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with options, by their names with underscores, such as max_running = 64.",
            metavar="FILE",
            callback=configure,
            is_eager=True,
        ),
    ] = None
    host: Host = "127.0.0.1"
    port: Port = 8000
    port_file: Annotated[Path | None, typer.Option(help="Write the port here once the server is ready.")] = None
    name: Annotated[str | None, typer.Option(help="Name of the model in the API; default: the bundle's.")] = None
    drafts: Annotated[
        Path | None,
        typer.Option(help="Directory of draft bundles that devices may download with `outrider pull`.", metavar="DIR"),
    ] = None
    share_tokenizer: Annotated[
        bool, typer.Option(help="Share the target's tokenizer, which devices need for drafts with another one.")
    ] = True
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="API keys, one per line; see `outrider-cloud keys`. Also from OUTRIDER_API_KEYS, separated by commas."
        ),
    ] = None
    insecure_no_keys: Annotated[
        bool, typer.Option("--insecure-no-keys", help="Listen beyond this machine without API keys.")
    ] = False
    _access: ClassVar = AccessOptions
    allowed_origin: Annotated[
        list[str],
        typer.Option(
            help="Origin whose pages may call, such as https://ui.example; repeatable. The server's own and "
            "loopback's are always allowed. CORS headers are left to the proxy in front."
        ),
    ] = field(default_factory=list)
    engine: Annotated[
        EngineName, typer.Option(help="vllm serves safetensors, on several GPUs where there are some.")
    ] = EngineName.EMBEDDED
    vllm_option: Annotated[
        list[str],
        typer.Option(help="NAME=VALUE of vLLM's engine, such as tensor_parallel_size=2; repeatable."),
    ] = field(default_factory=list)
    lora: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=DIR",
            help="With --engine vllm: a LoRA adapter that requests may name as their model, repeatable; PEFT's "
            "directory, with safetensors.",
        ),
    ] = field(default_factory=list)
    upstream: Annotated[
        str | None,
        typer.Option(
            help="The target's verifier, for a cascade: the model here verifies first, and what it commits drafts "
            "for the target. Its key: OUTRIDER_UPSTREAM_KEY.",
            metavar="URL",
        ),
    ] = None
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
    device: Annotated[str | None, typer.Option(help="As the runtime names it: CPU, GPU, cuda.")] = None
    threads: Annotated[int, typer.Option(min=0, help="Inference threads; 0 leaves it to the runtime.")] = 0
    kv_cache_mb: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Size of the KV cache, MiB; default: {_KV_CACHE_MB}, with vLLM on a GPU what gpu_memory_utilization "
            "leaves. vLLM needs room for one full context.",
        ),
    ] = None
    spill_dir: Annotated[
        Path | None,
        typer.Option(
            help="Write parked prefixes here, keys, values and ids, and read them when they are continued. Replicas "
            "with one directory find each other's.",
            metavar="DIR",
        ),
    ] = None
    spill_mb: Annotated[int | None, typer.Option(min=1, help="Size of --spill-dir, MiB; default: 1024.")] = None
    max_running: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 32
    max_sessions: Annotated[int, typer.Option(min=1, help="Open sessions and completions per key.")] = 256
    policy: Annotated[
        Policy, typer.Option(help="stream: latency; verify: fewest target passes; auto: by the load.")
    ] = Policy.AUTO
    lookup: Annotated[
        bool, typer.Option(help="Guess by prompt lookup where a device has sent nothing; also for completions.")
    ] = True
    recent: Annotated[
        bool,
        typer.Option(help="Keep the ids of recent texts, to draft a repeated prompt of the same key from them."),
    ] = True
    redis: Annotated[
        str | None,
        typer.Option(
            help="Keep recent texts in this Redis, for all replicas: redis://HOST:6379/0, rediss:// for TLS. Also from "
            "OUTRIDER_REDIS, where the URL has a password.",
            metavar="URL",
        ),
    ] = None
    tree: Annotated[
        TreeForm,
        typer.Option(
            help="line: steps verify the likeliest drafted path; tree: any part of a drafted tree; auto: tree where "
            "texts stay as exact. On OpenVINO, tree gives up logits that are bitwise equal in all steps."
        ),
    ] = TreeForm.AUTO
    exact: Annotated[
        Exactness | None,
        typer.Option(
            help="bitwise: a text is the same whatever else runs, or the server does not start; near: it may differ "
            "where two tokens are nearly equal. Default: bitwise with OpenVINO on a CPU, else near. On GPUs bitwise "
            "takes kernels whose rows do not depend on their company, which are slower."
        ),
    ] = None
    share_prefixes: Annotated[
        bool, typer.Option(help="Reuse the KV cache of prompts that begin alike; turn it off to measure TTFT.")
    ] = True
    share_caches_between_keys: Annotated[
        bool,
        typer.Option(
            "--share-caches-between-keys",
            help="Reuse the KV cache of other keys' prompts too. A client can then find out what others have sent.",
        ),
    ] = False
    allow_tolerance: Annotated[
        bool,
        typer.Option(
            "--allow-tolerance",
            help="Let requests choose the acceptance rule tolerance, which is LOSSY: the text is not the target's.",
        ),
    ] = False
    steady: Annotated[
        bool,
        typer.Option(
            "--steady",
            help="Serve only sessions in messages of one size at a fixed pace, which show nothing to an eavesdropper; "
            "refuse OpenAI's and /v1/verify's answers.",
        ),
    ] = False
    max_per_client: Annotated[
        int, typer.Option(min=1, help="Open connections of one address. Raise it behind a proxy, which is one address.")
    ] = _LIMITS.max_per_client
    rate: Annotated[
        float, typer.Option(min=0.0, help="Requests per second and key, drafts not counted; 0: no limit.")
    ] = 0.0
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Per key: prompts, without what is cached, and texts; default: no limit."),
    ] = None
    audit_log: Annotated[
        Path | None, typer.Option(help="Write a JSON line per request here, without prompts or texts.", metavar="FILE")
    ] = None
    drain_s: Annotated[
        float, typer.Option(min=0.0, help="How long running requests may take to finish at shutdown.")
    ] = 30.0
    log_format: Annotated[LogFormat, typer.Option(help="Format of log lines.")] = LogFormat.TEXT

    @property
    def kv_cache_bytes(self) -> int:
        """Size of the KV cache where no GPU's memory decides it."""
        return (self.kv_cache_mb or _KV_CACHE_MB) << 20

    def num_replicas(self) -> tuple[int, int]:
        """The fewest and the most. Raises ConfigError."""
        fewest, separator, most = (self.replicas or "2").partition("-")
        most = most if separator else fewest
        if not (fewest.isdecimal() and most.isdecimal() and 0 < int(fewest) <= int(most)):
            raise ConfigError(f"--replicas is {self.replicas!r}; expected a number, or the fewest and the most: 1-4")
        return int(fewest), int(most)
