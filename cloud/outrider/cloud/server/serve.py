"""`outrider-cloud serve`: from a bundle on disk to a listening server.

In order, so that a mistake shows before the model is loaded: options, keys, port, bundle; then the model, its
calibration, and the line that says that it is ready.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.cloud.api.app import create_app
from outrider.cloud.api.state import ServedModel, ServerSettings
from outrider.cloud.engine import Engine, EngineConfig, EngineThread, Policy
from outrider.cloud.server.logs import LogFormat, configure_logging
from outrider.cloud.server.serving import TlsFiles, VerifierServer, open_socket, url_of
from outrider.models.bundle import Bundle
from outrider.models.errors import ConfigError
from outrider.models.http.security import KeyRing, require_safe_host
from outrider.models.manifest import Manifest
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions

_TORCH_DTYPES: Final = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
READY_PREFIX: Final = "OUTRIDER_READY "
"""The line on standard output that says that the server is up begins with this; its URL follows."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The command line, with sizes in bytes; None leaves a choice to the bundle or the engine."""

    bundle: Path
    host: str
    port: int
    port_file: Path | None
    name: str | None
    api_key_file: Path | None
    is_insecure_allowed: bool
    tls_cert: Path | None
    tls_key: Path | None
    runtime: str | None
    device: str | None
    num_threads: int
    kv_cache_bytes: int
    cache_dir: Path | None
    max_running: int
    max_queue: int
    max_sessions: int
    policy: str
    share_prefixes: bool
    max_patience_ms: float | None
    max_body_bytes: int
    rate_per_s: float
    drain_s: float
    log_format: LogFormat


def serve(options: ServeOptions) -> None:
    """Serves until it is told to stop. Raises OutriderError for what the user can put right."""
    configure_logging(options.log_format)
    keys = KeyRing.load(options.api_key_file)
    require_safe_host(options.host, keys, is_insecure_allowed=options.is_insecure_allowed)
    tls = _tls(options)
    with open_socket(options.host, options.port) as sock:
        bundle = Bundle.open(options.bundle)
        model = _served_model(bundle, options.name)
        started_s = time.monotonic()
        runtime = _load(bundle, options)
        try:
            config = EngineConfig(
                max_running=options.max_running,
                max_queue=options.max_queue,
                share_prefixes=options.share_prefixes,
                policy=Policy(options.policy),
            )
            engine = Engine(runtime, config)
            engine.calibrate()
            thread = EngineThread(engine)
            settings = ServerSettings(
                keys=keys,
                max_body_bytes=options.max_body_bytes,
                max_sessions=options.max_sessions,
                rate_per_s=options.rate_per_s,
                max_patience_ms=options.max_patience_ms,
            )
            server = VerifierServer(
                create_app(thread, model, settings),
                drain_s=options.drain_s,
                tls=tls,
                on_ready=lambda: _announce(options, url_of(sock, is_tls=tls is not None), sock.getsockname()[1]),
            )
            _tell(_summary(model, bundle.manifest, engine, time.monotonic() - started_s))
            thread.start()
            try:
                server.run(sockets=[sock])
            finally:
                thread.stop()  # before the model goes
        finally:
            runtime.close()
            if options.port_file is not None:
                options.port_file.unlink(missing_ok=True)


def _tls(options: ServeOptions) -> TlsFiles | None:
    if options.tls_cert is None and options.tls_key is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise ConfigError("HTTPS needs both --tls-cert and --tls-key")
    return TlsFiles(options.tls_cert, options.tls_key)


def _served_model(bundle: Bundle, name: str | None) -> ServedModel:
    manifest = bundle.manifest
    if manifest.role != "target":
        raise ConfigError(
            f"{bundle.path} is a {manifest.role} bundle; serve needs a target: make one with `outrider-export target`"
        )
    return ServedModel(name or manifest.name, bundle.tokenizer(), frozenset(manifest.eos_token_ids), manifest)


def _load(bundle: Bundle, options: ServeOptions) -> BatchRuntime:
    manifest = bundle.manifest
    kind = options.runtime or manifest.runtime
    default_device = "CPU" if kind == "openvino" else "cpu"
    if manifest.device == "gpu":
        default_device = "GPU" if kind == "openvino" else "cuda"
    loading = RuntimeOptions(
        device=options.device or default_device,
        num_threads=options.num_threads,
        kv_cache_bytes=options.kv_cache_bytes,
        cache_dir=str(options.cache_dir) if options.cache_dir else None,
        # torch loads safetensors in any type: take the one that the export was checked in.
        properties={"dtype": _TORCH_DTYPES[manifest.precision]} if kind == "torch" else {},
    )
    return open_batch_runtime(kind, bundle.model_file, loading)


def _summary(model: ServedModel, manifest: Manifest, engine: Engine, load_s: float) -> str:
    stats = engine.stats()
    step = f", {stats.step_ms:.1f} ms a step" if stats.step_ms is not None else ""
    widened = ", widened for measurements" if manifest.widened else ""
    millions = manifest.architecture.parameters / 1e6
    return (
        f"{model.name}: {millions:.1f}M parameters, {manifest.precision}{widened}, loaded in {load_s:.1f} s{step}, "
        f"room for {stats.num_blocks} KV blocks, {engine.limits.max_positions} positions"
    )


def _announce(options: ServeOptions, url: str, port: int) -> None:
    if options.port_file is not None:
        # Put in place whole, so that who waits for it never reads half a number.
        partial = options.port_file.with_name(options.port_file.name + ".part")
        partial.write_text(f"{port}\n", encoding="utf-8")
        partial.replace(options.port_file)
    _tell(READY_PREFIX + url)


def _tell(line: str) -> None:
    """Standard output, at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
