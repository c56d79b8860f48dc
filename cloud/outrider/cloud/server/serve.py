"""Serves a bundle: `outrider-cloud serve`.

In this order, so that a mistake shows before the model is loaded: options, keys, port, bundle, audit log; then the
model, its calibration, and the line that says that the server is ready.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import Final

from outrider.cloud.api.app import create_app
from outrider.cloud.api.audit import AuditLog
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.api.state import DraftFiles, ServerSettings
from outrider.cloud.api.traces import traces_from_environment
from outrider.cloud.recent.store import MemoryStore, RecentStore
from outrider.cloud.server.access import Access
from outrider.cloud.server.embedded import BundleTarget
from outrider.cloud.server.offered import find_offered, find_tokenizer_files
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.signals import ends_on_sigterm, takes_hangups
from outrider.cloud.server.target import Target
from outrider.models.bundle.reference_export import DEFAULT_VERIFIER_URL, REFERENCE
from outrider.models.errors import ConfigError
from outrider.models.hosts import is_loopback
from outrider.models.http.logs import configure_logging
from outrider.models.http.security import WILDCARDS
from outrider.models.ingress.collector import relieve_collector
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.ingress.sockets import READY_PREFIX, TlsFiles, open_socket, url_of
from outrider.models.process.command_line import print_error
from outrider.models.process.extras import require_packages
from outrider.models.process.heap import bound_heaps
from outrider.models.visible import visible

_log = logging.getLogger("outrider.cloud")

REDIS_VARIABLE: Final = "OUTRIDER_REDIS"
ENGINE_FAILED: Final = 70
"""Exit code when the engine has failed for good, so that a supervisor starts the server again."""


def serve(options: ServeOptions) -> int:
    """Serves until a signal ends it, or its engine. Returns the exit code.

    Raises OutriderError for what the user can put right.
    """
    for name in ("replicas", "gpus_per_replica"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --ray; give that too")
    with takes_hangups() as hangups:
        configure_logging(options.log_format)
        bound_heaps()
        access = Access.of(options)
        require_writable(options.port_file)
        with (
            open_socket(options.host, options.port) as sock,
            ends_on_sigterm(),  # until the server takes signals
        ):
            target = open_target(options)
            settings = access.settings(sock.getsockname()[0])
            with (
                opened_server(options, target, settings, tls=access.tls, sock=sock) as server,
                access.watching(server.tls, server.core.admission.revoke) as watch,
            ):
                hangups.act_by(watch.check_soon)
                server.run(sockets=[sock])
    if server.failure is None:
        return 0
    print_error(f"{server.failure}; its log is above. The server has ended: start it again")
    return ENGINE_FAILED


@contextmanager
def opened_server(
    options: ServeOptions,
    target: Target,
    settings: ServerSettings,
    *,
    limits: ConnectionLimits | None = None,
    tls: TlsFiles | None = None,
    sock: socket | None = None,
) -> Iterator[VerifierServer]:
    """Loads the target, and starts its engine; the server does not run yet. limits: default: by the options.

    sock: what it listens on, which is announced once it does; None announces nothing.
    """
    drafts: tuple[DraftFiles, ...] = ()
    tokenizer_files = find_tokenizer_files(target.model.tokenizer.directory) if options.share_tokenizer else None
    if options.drafts is not None:
        fingerprint, is_shared = target.model.tokenizer.fingerprint, tokenizer_files is not None
        drafts = find_offered(options.drafts, fingerprint, target.source_name, shares_tokenizer=is_shared)
    with (
        traces_from_environment(_log.warning) as traces,
        audit_log_of(options.audit_log) as audit,
        open_recent(options) as recent,
        target.load() as loaded,
        port_file_removed(options.port_file),
    ):
        settings = replace(settings, traces=traces, audit=audit)
        app = create_app(loaded.engine, target.model, settings, drafts, recent, tokenizer_files)
        if options.upstream is not None:
            from outrider.cloud.server.cascade import show_cascade

            show_cascade(app.state.core.metrics, loaded.engine)
        server = VerifierServer(
            app,
            drain_s=options.drain_s,
            tls=tls,
            limits=limits or connection_limits(options),
            on_ready=partial(
                announce, options, target.path, sock, needs_key=bool(len(settings.keys)), has_drafts=bool(drafts)
            ),
        )
        print_now(loaded.summary)
        relieve_collector()
        loaded.engine.start()
        loaded.engine.on_death(server.fail)
        try:
            yield server
        finally:
            loaded.engine.stop()  # before the model goes


def connection_limits(options: ServeOptions) -> ConnectionLimits:
    """Bounds on the connections of clients."""
    return ConnectionLimits(max_per_client=options.max_per_client)


def open_target(options: ServeOptions) -> Target:
    """The target, checked and not loaded. Raises OutriderError for one that cannot be served."""
    if options.spill_mb is not None and options.spill_dir is None:
        raise ConfigError("--spill-mb has no effect without --spill-dir; give that too")
    if options.upstream is not None:
        from outrider.cloud.server.cascade import CascadeTarget, upstream_key  # it needs httpx

        if options.ray:
            raise ConfigError("--upstream is for one server; leave out --ray, or put the replicas upstream")
        if options.exact is not None:
            raise ConfigError("--exact is the upstream verifier's choice, whose text it is; leave it out here")
        no_effect = {
            "--lora": options.lora,
            "--steady": options.steady,
            "--allow-tolerance": options.allow_tolerance,
            "--spill-dir": options.spill_dir,
        }
        for option, is_given in no_effect.items():
            if is_given:
                raise ConfigError(
                    f"{option} has no effect on the upstream verifier's text; leave out --upstream, or {option}"
                )
        return CascadeTarget(_own_target(replace(options, name=None)), options.upstream, upstream_key(), options.name)
    return _own_target(options)


def _own_target(options: ServeOptions) -> Target:
    if options.engine is EngineName.VLLM:
        from outrider.cloud.server.vllm_target import VllmTarget

        return VllmTarget(options)
    for name in ("vllm_option", "lora"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for --engine vllm; leave it out")
    return BundleTarget(options)


def open_recent(options: ServeOptions) -> AbstractContextManager[RecentStore | None]:
    """The store, closed at the end; None for --no-recent. Raises OutriderError."""
    if not options.recent:
        if options.redis is not None:
            raise ConfigError("--redis keeps recent texts, which --no-recent turns off; leave one of them out")
        return nullcontext()
    url = options.redis or os.environ.get(REDIS_VARIABLE)
    if not url:
        return closing(MemoryStore())
    require_packages(["redis"], "--redis", "scale")
    from outrider.cloud.recent.redis_store import RedisStore

    return closing(RedisStore(url))


def audit_log_of(path: Path | None) -> AbstractContextManager[AuditLog | None]:
    """The audit log, closed at the end; None for no path."""
    return nullcontext() if path is None else closing(AuditLog(path))


@contextmanager
def port_file_removed(port_file: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if port_file is not None:
            port_file.unlink(missing_ok=True)


def require_writable(port_file: Path | None) -> None:
    """Raises ConfigError if the port cannot be written: before the model is loaded, not after."""
    if port_file is not None and (port_file.is_dir() or not os.access(port_file.parent, os.W_OK)):
        raise ConfigError(
            f"--port-file {port_file} cannot be written; name a file in a directory that you may write to"
        )


def announce(options: ServeOptions, bundle: Path, sock: socket | None, *, needs_key: bool, has_drafts: bool) -> None:
    """Says that the server listens on the socket, and what to type next. Without a socket there is nothing to say."""
    if sock is None:
        return
    url = url_of(sock, is_tls=options.tls_cert is not None)
    if options.port_file is not None:
        # Renamed into place, so that a reader who waits for it never sees half a number.
        part = options.port_file.with_name(options.port_file.name + ".part")
        part.write_text(f"{sock.getsockname()[1]}\n", encoding="utf-8")
        part.replace(options.port_file)
    print_now(READY_PREFIX + url)
    where = "In another terminal" if is_loopback(options.host) else "On a device"
    if _needs_proxy(options, url, needs_key=needs_key):
        where += ", through your proxy with TLS"
    print_now(f"{where}: {_next_command(options, bundle, url, needs_key=needs_key, has_drafts=has_drafts)}")


def _needs_proxy(options: ServeOptions, url: str, *, needs_key: bool) -> bool:
    """Whether devices refuse to call the server itself: no key goes through a network unencrypted."""
    return needs_key and url.startswith("http:") and not is_loopback(options.host)


def _next_command(options: ServeOptions, bundle: Path, url: str, *, needs_key: bool, has_drafts: bool = False) -> str:
    """What to type next. The draft is named where it is known: the one exported beside the target.

    needs_key: the server asks for an API key. has_drafts: a device can download a draft first. A wildcard address is no
    address for others, so SERVER stands for it, or PROXY for what encrypts.
    """
    if _needs_proxy(options, url, needs_key=needs_key):
        url = "https://PROXY"
    elif options.host in WILDCARDS:
        scheme, _, rest = url.partition("://")
        url = f"{scheme}://SERVER:{rest.rpartition(':')[2]}"
    cloud = "" if url == DEFAULT_VERIFIER_URL else f" --cloud {url}"
    key = "OUTRIDER_API_KEY=KEY " if needs_key else ""
    draft = ""
    if has_drafts:
        server = cloud and f" --server {url}"
        return f'{key}outrider pull{server}, then {key}outrider run{cloud} --compare "def walk(path):"'
    if options.bundle != REFERENCE:
        beside = bundle.parent / "draft"
        draft = f" --draft {shlex.quote(str(beside)) if beside.is_dir() else 'DRAFT_BUNDLE'}"
    return f'{key}outrider run{cloud}{draft} --compare "def walk(path):"'


def print_now(line: str) -> None:
    """Standard output, at once, also into a pipe; a bundle's control characters are visible."""
    sys.stdout.write(visible(line) + "\n")
    sys.stdout.flush()
