"""One replica: our server on a private port, as a deployment of Ray Serve, which starts, probes and ends it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final

from outrider.cloud.api.state import Core
from outrider.cloud.replicas.charges import SharedBudget
from outrider.cloud.replicas.members import TAG_CHARS, Report
from outrider.cloud.replicas.registry import REPORT_S, open_registry
from outrider.cloud.replicas.scaling import QUEUED, RUNNING
from outrider.cloud.replicas.trust import ForwardedOwners
from outrider.models.http.security import KeyRing
from outrider.models.ingress.bounded_server import BoundedServer
from outrider.models.ingress.sockets import open_socket, url_of

_log = logging.getLogger("outrider.replicas")

LOOPBACK: Final = "127.0.0.1"
MARGIN_S: Final = 15.0
"""For the end of a replica, beyond its drain."""
NODE: Final = "node"
"""In place of an address to listen on: the node's own, which other nodes reach."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A loaded server that does not listen yet. begin_drain: ends it within so many seconds; from any thread."""

    server: BoundedServer
    core: Core
    begin_drain: Callable[[float], None]
    drain_s: float


Make = Callable[[str, KeyRing], AbstractContextManager[Opened]]
"""Opens a server whose sessions' ids begin with the tag, for the clients of the key ring. Ray sends it to replicas."""


class Replica:
    """What Ray Serve makes an actor of. Raises OutriderError where the server cannot be opened."""

    def __init__(self, make: Make, application: str, host: str = LOOPBACK) -> None:
        keep_to_node()
        self._tag, self._secret = secrets.token_hex(TAG_CHARS // 2), secrets.token_hex(32)
        self._stack = ExitStack()
        self._has_ended = threading.Event()
        self._num_reports = 0
        self._budget = SharedBudget()
        self._reporting_lock = threading.Lock()
        try:
            owners = ForwardedOwners(self._secret)
            self._opened = self._stack.enter_context(make(self._tag, owners))
            admission = self._opened.core.admission
            owners.on_removed, admission.budget = admission.revoke, self._budget
            sock = self._stack.enter_context(open_socket(_node_address() if host == NODE else host, 0))
            self._url = url_of(sock, is_tls=False)
            self._thread = threading.Thread(
                target=self._opened.server.run, args=([sock],), name="outrider-replica", daemon=True
            )
            self._thread.start()
            self._registry = open_registry(application)
            self._reporter = threading.Thread(target=self._report_on, name="outrider-reports", daemon=True)
            self._reporter.start()
        except BaseException:
            self._has_ended.set()
            self._stack.close()
            raise
        _log.info("replica %s listens at %s", self._tag, self._url)

    def check_health(self) -> None:
        """Called by Ray Serve; three failures in a row, and it starts another in its place."""
        if not self._thread.is_alive():
            raise RuntimeError("the server's thread has ended")
        if self._opened.core.engine.stats().failed:
            raise RuntimeError("the engine cannot work; its log has the reason")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve, for `scaling.by_sequences`."""
        stats = self._opened.core.engine.stats()
        return {RUNNING: float(stats.running), QUEUED: float(stats.queued)}

    def describe(self) -> dict[str, Any]:
        """Tag, URL and process, for those who look after a cluster. Never the secret."""
        return {"tag": self._tag, "url": self._url, "pid": os.getpid(), "target": self._opened.core.model.target}

    def __del__(self) -> None:
        """Called by Ray Serve before it ends the process: sessions finish, or get `shutdown` after the drain."""
        if self._has_ended.is_set():
            return
        _log.info("replica %s drains for up to %g s", self._tag, self._opened.drain_s)
        self._opened.begin_drain(self._opened.drain_s)
        self._report()  # at once: no front sends new work any more
        self._thread.join(self._opened.drain_s + MARGIN_S)
        self._has_ended.set()
        self._reporter.join()
        import ray

        try:
            ray.get(self._registry.leave.remote(self._tag), timeout=MARGIN_S)
        finally:  # the registry may be away
            self._stack.close()

    def _report_on(self) -> None:
        import ray
        from ray.exceptions import RayError

        while True:
            try:
                self._budget.apply(ray.get(self._report(), timeout=REPORT_S))
            except RayError:  # the registry is away, or slow: the next report follows
                _log.debug("the registry of replicas has not answered")
            if self._has_ended.wait(REPORT_S):
                return

    def _report(self) -> Any:
        core = self._opened.core
        stats = core.engine.stats()
        with self._reporting_lock:
            self._num_reports += 1
            report = Report(
                tag=self._tag,
                url=self._url,
                secret=self._secret,
                model=core.model.name,
                target=core.model.target,
                number=self._num_reports,
                is_draining=core.is_draining,
                is_failed=core.is_dead or bool(stats.failed),
                running=stats.running,
                queued=stats.queued,
                free_block_share=stats.free_blocks / stats.num_blocks,
                step_ms=stats.step_ms,
                draft_token_ms=stats.draft_token_ms,
                pid=os.getpid(),
            )
            return self._registry.report.remote(report, self._budget.collect())


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def keep_to_node() -> None:
    """Keeps a server of Ray Serve to the node's own address: each of its actors has one, for calls between deployments.

    Nobody calls it here. It would listen on all addresses. Call this in the actor's constructor.
    """
    import ray
    from ray.serve._private import replica

    add_port, node = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    shown = f"[{node}]" if ":" in node else node
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, f"{shown}:0")
