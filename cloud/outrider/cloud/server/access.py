"""Says who may call a server, and how, by its options: keys, certificates, pages. Reads files again as they change."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.server.options import ServeOptions
from outrider.models.hosts import is_loopback
from outrider.models.http.keys import DIGEST_PREFIX, KEYS_VARIABLE
from outrider.models.http.security import KeyRing, PagePolicy, page_policy, require_safe_host
from outrider.models.ingress.sockets import TlsFiles, tls_files
from outrider.models.process.watched_files import FileWatch, WatchedFiles

_log = logging.getLogger("outrider.cloud")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call. watched: the key file, if it can change. reloads: how often files were read again."""

    options: ServeOptions
    keys: KeyRing
    tls: TlsFiles | None
    watched: list[WatchedFiles]
    reloads: Counter[tuple[str, str]] = field(default_factory=Counter)

    @classmethod
    def of(cls, options: ServeOptions) -> Access:
        """By the options. Raises ConfigError."""
        path = options.api_key_file
        # Before they are read for the first time. A pipe of the shell is read once.
        watched = [WatchedFiles("keys", [path], lambda: None)] if path is not None and path.is_file() else []
        keys = KeyRing.load(path)
        os.environ.pop(KEYS_VARIABLE, None)  # child processes get the rest of the environment
        if watched and path is not None and _shows_keys(path):
            _log.warning(
                "other users can read the keys in %s: `chmod 600` it (`outrider-cloud keys add` keeps digests)", path
            )
        if len(keys) and options.tls_cert is None and not is_loopback(options.host):
            _log.warning("keys and texts come unencrypted without --tls-cert: let a proxy with TLS take the requests")
        is_open = options.insecure_no_keys or options.tls_client_ca is not None
        require_safe_host(options.host, keys, is_insecure_allowed=is_open)
        return cls(options, keys, tls_files(options.tls_cert, options.tls_key, options.tls_client_ca), watched)

    def settings(self, address: str, **more: Any) -> ServerSettings:
        """How the server treats its clients. address: what --host stands for. more: further fields."""
        pages = page_policy_of(self.options, address, is_keyless=not len(self.keys))
        return server_settings(self.options, keys=self.keys, pages=pages, reloads=self.reloads, **more)

    @contextmanager
    def watching(self, tls: TlsFiles | None, revoke: Callable[[Collection[bytes]], None]) -> Iterator[FileWatch]:
        """Reads keys and certificates again as they change. revoke: called with the owners of removed keys."""
        for each in self.watched:
            each.reload = lambda: revoke(self.keys.reload())
        watched = list(self.watched)
        if tls is not None:
            watched.append(WatchedFiles("certificates", tls.paths, tls.reload))
        with FileWatch(watched, self.reloads) as watch:
            yield watch


def _shows_keys(path: Path) -> bool:
    """Whether other users can read keys in a key file: digests are none."""
    lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    has_keys = any(line and not line.startswith(("#", DIGEST_PREFIX)) for line in lines)
    return os.name == "posix" and bool(path.stat().st_mode & 0o077) and has_keys


def page_policy_of(options: ServeOptions, address: str, *, is_keyless: bool) -> PagePolicy:
    """address: what --host stands for; the URL that is printed has it."""
    return page_policy(options.host, address, options.allowed_host, options.allowed_origin, is_keyless=is_keyless)


def server_settings(options: ServeOptions, **more: Any) -> ServerSettings:
    """The options that say how the server treats its clients. more: the fields that no option has."""
    return ServerSettings(
        max_sessions=options.max_sessions,
        tokens_per_minute=options.tokens_per_minute,
        allow_tolerance=options.allow_tolerance,
        needs_steady=options.steady,
        **{"rate_per_s": options.rate} | more,
    )
