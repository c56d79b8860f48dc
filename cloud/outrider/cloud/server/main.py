"""`outrider-cloud`: serves a target bundle."""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outrider.cloud.server.logs import LogFormat
from outrider.models.errors import OutriderError, RuntimeUnavailable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class PolicyName(StrEnum):
    """The engine's policies, by name (`engine.types.Policy` is not imported before it is needed)."""

    AUTO = "auto"
    STREAM = "stream"
    VERIFY = "verify"


class RuntimeName(StrEnum):
    """What can run a target."""

    OPENVINO = "openvino"
    TORCH = "torch"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version("outrider"))
        raise typer.Exit


@app.callback()  # with a callback, `serve` is a subcommand although it is the only one
def _group(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The cloud side of Outrider: the target model behind an HTTP API."""


@app.command()
def serve(
    bundle: Annotated[Path, typer.Argument(help="Directory of a target bundle, as outrider-export writes it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    port_file: Annotated[Path | None, typer.Option(help="Write the port here once the server is ready.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; the bundle's own if not given.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="API keys, one a line. Also from OUTRIDER_API_KEYS, separated by commas.")
    ] = None,
    insecure_no_keys: Annotated[
        bool, typer.Option("--insecure-no-keys", help="Listen beyond this machine although nobody needs a key.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM; with --tls-key, serves HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key, PEM.")] = None,
    runtime: Annotated[
        RuntimeName | None, typer.Option(help="What runs the model; the bundle's own if not given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="As the runtime names it: CPU, GPU, cuda:0.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Inference threads; 0 leaves it to the runtime.")] = 0,
    kv_cache_mb: Annotated[int, typer.Option(min=1, help="Room for the KV cache, MiB.")] = 256,
    cache_dir: Annotated[Path | None, typer.Option(help="Keep compiled models here, for a faster start.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 32,
    max_queue: Annotated[int, typer.Option(min=1, help="Sequences that may wait; more are refused with 503.")] = 1024,
    max_sessions: Annotated[int, typer.Option(min=1, help="Open sessions and completions of one key.")] = 256,
    policy: Annotated[
        PolicyName, typer.Option(help="stream: latency; verify: fewest target passes; auto: by the load.")
    ] = PolicyName.AUTO,
    share_prefixes: Annotated[
        bool, typer.Option(help="Reuse the cache of prompts that begin alike; measurements of TTFT turn it off.")
    ] = True,
    patience_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Longest wait for a draft, whatever sessions ask; 0 never waits.")
    ] = None,
    max_body_kb: Annotated[int, typer.Option(min=1, help="Largest request body, KiB.")] = 1024,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Requests a second of one key, drafts not counted; 0: any.")
    ] = 0.0,
    drain_s: Annotated[float, typer.Option(min=0.0, help="At the end, what runs may take so long to finish.")] = 30.0,
    log_format: Annotated[LogFormat, typer.Option(help="How log lines look.")] = LogFormat.TEXT,
) -> None:
    """Serve a target bundle, until SIGTERM or Ctrl-C; a second one ends at once."""
    try:
        from outrider.cloud.server import serve as server
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    server.serve(
        server.ServeOptions(
            bundle=bundle,
            host=host,
            port=port,
            port_file=port_file,
            name=name,
            api_key_file=api_key_file,
            is_insecure_allowed=insecure_no_keys,
            tls_cert=tls_cert,
            tls_key=tls_key,
            runtime=runtime.value if runtime else None,
            device=device,
            num_threads=threads,
            kv_cache_bytes=kv_cache_mb << 20,
            cache_dir=cache_dir,
            max_running=max_running,
            max_queue=max_queue,
            max_sessions=max_sessions,
            policy=policy.value,
            share_prefixes=share_prefixes,
            max_patience_ms=patience_ms,
            max_body_bytes=max_body_kb << 10,
            rate_per_s=rate,
            drain_s=drain_s,
            log_format=log_format,
        )
    )


def _missing(error: ModuleNotFoundError) -> Exception:
    if error.name is None or error.name.startswith("outrider"):
        return error  # a bug of ours, not a missing package
    return RuntimeUnavailable(
        f"serving needs the package {error.name!r}, which is not installed; run: pip install 'outrider[cloud]'"
    )


def main() -> None:
    """Entry point: a refusal is one red line on standard error and exit code 2."""
    try:
        app()
    except OutriderError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
