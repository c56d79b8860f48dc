"""Serves a bundle: `outrider-cloud serve`.

In this order, so that a mistake shows before the model is loaded: options, keys, port, bundle, audit log; then the
model, its calibration, and the line that says that the server is ready.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

from outrider.cloud.api.app import create_app
from outrider.cloud.api.audit import AuditLog
from outrider.cloud.api.download_slots import DraftFiles
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.api.traces import traces_from_environment
from outrider.cloud.server.embedded import BundleTarget
from outrider.cloud.server.hangup import HangUps, takes_hangups
from outrider.cloud.server.offered import find_offered
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.recent import open_recent
from outrider.cloud.server.replica_options import ReplicaOptions
from outrider.cloud.server.serving import VerifierServer
from outrider.cloud.server.sigterm import ends_on_sigterm
from outrider.cloud.server.target import Target
from outrider.models.bundle.reference_export import DEFAULT_VERIFIER_URL, REFERENCE
from outrider.models.errors import ConfigError
from outrider.models.hosts import is_loopback
from outrider.models.http.keys import KEYS_VARIABLE
from outrider.models.http.logs import configure_logging
from outrider.models.http.security import WILDCARDS, KeyRing, PagePolicy, page_policy, require_safe_host
from outrider.models.ingress.collector import relieve_collector
from outrider.models.ingress.connection_limits import ConnectionLimits
from outrider.models.ingress.sockets import READY_PREFIX, open_socket, tls_files, url_of
from outrider.models.process.command_line import print_error
from outrider.models.process.heap import bound_heaps
from outrider.models.process.watched_files import FileWatch, WatchedFiles
from outrider.models.visible import visible

_log = logging.getLogger("outrider.cloud")

ENGINE_FAILED: Final = 70
"""Exit code when the engine has failed for good, so that a supervisor starts the server again."""


def serve(options: ServeOptions) -> int:
    """Serves until a signal ends it, or its engine. Returns the exit code.

    Raises OutriderError for what the user can put right.
    """
    _refuse_replica_options(options)
    with takes_hangups() as hangups:
        return _serve(options, hangups)


def _serve(options: ServeOptions, hangups: HangUps) -> int:
    configure_logging(options.log_format)
    bound_heaps()
    watched = watched_keys(options.api_key_file)
    keys = load_keys(options.api_key_file)
    is_open = options.insecure_no_keys or options.tls_client_ca is not None
    require_safe_host(options.host, keys, is_insecure_allowed=is_open)
    tls = tls_files(options.tls_cert, options.tls_key, options.tls_client_ca)
    require_writable(options.port_file)
    with (
        open_socket(options.host, options.port) as sock,
        traces_from_environment(_log.warning) as traces,
        ends_on_sigterm(),  # until the server takes signals
    ):
        pages = page_policy_of(options, sock.getsockname()[0], is_keyless=not len(keys))
        target = open_target(options)
        drafts = drafts_for(options.drafts, target)
        with (
            audit_log_of(options.audit_log) as audit,
            open_recent(options) as recent,
            target.load() as loaded,
            port_file_removed(options.port_file),
        ):
            reloads = Counter[tuple[str, str]]()
            settings = replace(server_settings(options, keys, pages), traces=traces, audit=audit, reloads=reloads)
            app = create_app(loaded.engine, target.model, settings, drafts, recent)
            if options.upstream is not None:
                from outrider.cloud.server.cascade import show_cascade

                show_cascade(app.state.core.metrics, loaded.engine)
            server = VerifierServer(
                app,
                drain_s=options.drain_s,
                tls=tls,
                limits=connection_limits(options),
                on_ready=lambda: announce(
                    options,
                    target.path,
                    url_of(sock, is_tls=tls is not None),
                    sock.getsockname()[1],
                    needs_key=bool(len(keys)),
                    has_drafts=bool(drafts),
                ),
            )
            print_now(loaded.summary)
            relieve_collector()
            loaded.engine.start()
            loaded.engine.on_death(server.fail)
            try:
                for each in watched:
                    each.reload = lambda: server.admission.revoke(keys.reload())
                if server.tls is not None:
                    watched.append(WatchedFiles("certificates", server.tls.files.paths, server.tls.reload))
                with FileWatch(watched, reloads) as watch:
                    hangups.act_by(watch.check_soon)
                    server.run(sockets=[sock])
            finally:
                loaded.engine.stop()  # before the model goes
    if server.failure is None:
        return 0
    print_error(f"{server.failure}; its log is above. The server has ended: start it again")
    return ENGINE_FAILED


def server_settings(options: ServeOptions, keys: KeyRing, pages: PagePolicy | None) -> ServerSettings:
    """How the server treats its clients."""
    return ServerSettings(
        keys=keys,
        max_sessions=options.max_sessions,
        rate_per_s=options.rate,
        tokens_per_minute=options.tokens_per_minute,
        pages=pages,
        allow_tolerance=options.allow_tolerance,
    )


def connection_limits(options: ServeOptions) -> ConnectionLimits:
    """Bounds on the connections of clients."""
    return ConnectionLimits(max_per_client=options.max_per_client)


def _refuse_replica_options(options: ServeOptions) -> None:
    """Raises ConfigError for an option that only replicas have."""
    for each in fields(ReplicaOptions):
        if getattr(options, each.name) not in (None, False):
            raise ConfigError(f"--{each.name.replace('_', '-')} is for replicas; give --ray too")


def open_target(options: ServeOptions) -> Target:
    """The target, checked and not loaded. Raises OutriderError for one that cannot be served."""
    if options.upstream is not None:
        from outrider.cloud.server.cascade import CascadeTarget, upstream_key  # it needs httpx

        if options.ray:
            raise ConfigError("--upstream is for one server; leave out --ray, or put the replicas upstream")
        return CascadeTarget(_own_target(replace(options, name=None)), options.upstream, upstream_key(), options.name)
    return _own_target(options)


def _own_target(options: ServeOptions) -> Target:
    if options.engine is EngineName.VLLM:
        from outrider.cloud.server.vllm_target import VllmTarget

        return VllmTarget(options)
    if options.vllm_option:
        raise ConfigError("--vllm-option is for --engine vllm; leave it out")
    return BundleTarget(options)


def load_keys(path: Path | None) -> KeyRing:
    """The keys of the file and of the environment, from which they go: child processes get the rest of it."""
    keys = KeyRing.load(path)
    os.environ.pop(KEYS_VARIABLE, None)
    return keys


def watched_keys(path: Path | None) -> list[WatchedFiles]:
    """The key file, if it can change: a pipe of the shell is read once."""
    return [WatchedFiles("keys", [path], lambda: None)] if path is not None and path.is_file() else []


@contextmanager
def audit_log_of(path: Path | None) -> Iterator[AuditLog | None]:
    log = AuditLog(path) if path is not None else None
    try:
        yield log
    finally:
        if log is not None:
            log.close()


@contextmanager
def port_file_removed(port_file: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if port_file is not None:
            port_file.unlink(missing_ok=True)


def page_policy_of(options: ServeOptions, address: str, *, is_keyless: bool) -> PagePolicy:
    """address: what --host stands for; the URL that is printed has it."""
    return page_policy(options.host, address, options.allowed_host, options.allowed_origin, is_keyless=is_keyless)


def require_writable(port_file: Path | None) -> None:
    """Raises ConfigError if the port cannot be written: before the model is loaded, not after."""
    if port_file is not None and (port_file.is_dir() or not os.access(port_file.parent, os.W_OK)):
        raise ConfigError(
            f"--port-file {port_file} cannot be written; name a file in a directory that you may write to"
        )


def drafts_for(directory: Path | None, target: Target) -> tuple[DraftFiles, ...]:
    if directory is None:
        return ()
    return find_offered(directory, target.model.tokenizer.fingerprint, target.source_name)


def announce(options: ServeOptions, bundle: Path, url: str, port: int, *, needs_key: bool, has_drafts: bool) -> None:
    if options.port_file is not None:
        # Renamed into place, so that a reader who waits for it never sees half a number.
        partial = options.port_file.with_name(options.port_file.name + ".part")
        partial.write_text(f"{port}\n", encoding="utf-8")
        partial.replace(options.port_file)
    print_now(READY_PREFIX + url)
    where = "In another terminal" if is_loopback(options.host) else "On a device"
    print_now(f"{where}: {_next_command(options, bundle, url, needs_key=needs_key, has_drafts=has_drafts)}")


def _next_command(options: ServeOptions, bundle: Path, url: str, *, needs_key: bool, has_drafts: bool = False) -> str:
    """What to type next. The draft is named where it is known: the one exported beside the target.

    needs_key: the server asks for an API key. has_drafts: a device can download a draft first. A wildcard address is no
    address for others, so SERVER stands for it.
    """
    if options.host in WILDCARDS:
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
