"""One replica: our server on a private port, as a deployment of Ray Serve, which starts, probes and ends it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.replicas.members import TAG_CHARS, Report
from outrider.cloud.replicas.registry import REPORT_S, SharedBudget, open_registry
from outrider.cloud.replicas.scaling import QUEUED, RUNNING
from outrider.cloud.replicas.trust import ForwardedOwners
from outrider.models.http.security import KeyRing
from outrider.models.ingress.sockets import open_socket, url_of

_log = logging.getLogger("outrider.replicas")

LOOPBACK: Final = "127.0.0.1"
MARGIN_S: Final = 15.0
"""For the end of a replica, beyond its drain."""
NODE: Final = "node"
"""In place of an address to listen on: the node's own, which other nodes reach."""


Make = Callable[[str, KeyRing], AbstractContextManager[VerifierServer]]
"""Loads a server that does not listen yet. The ids of its sessions begin with the tag; its clients are those of the key
ring. Ray sends it to replicas."""


class Replica:
    """What Ray Serve makes an actor of. Raises OutriderError where the server cannot be opened."""

    def __init__(self, make: Make, application: str, host: str = LOOPBACK) -> None:
        node = keep_to_node()
        self._tag, self._secret = secrets.token_hex(TAG_CHARS // 2), secrets.token_hex(32)
        self._stack = ExitStack()
        self._has_ended = threading.Event()
        self._num_reports = 0
        self._budget = SharedBudget()
        self._reporting_lock = threading.Lock()
        try:
            owners = ForwardedOwners(self._secret)
            self._server = self._stack.enter_context(make(self._tag, owners))
            admission = self._server.core.admission
            owners.on_removed, admission.budget = admission.revoke, self._budget
            sock = self._stack.enter_context(open_socket(node if host == NODE else host, 0))
            self._url = url_of(sock, is_tls=False)
            self._thread = threading.Thread(
                target=self._server.run, args=([sock],), name="outrider-replica", daemon=True
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
        if self._server.core.engine.stats().failed:
            raise RuntimeError("the engine cannot work; its log has the reason")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray Serve, for `scaling.by_sequences`."""
        stats = self._server.core.engine.stats()
        return {RUNNING: float(stats.running), QUEUED: float(stats.queued)}

    def describe(self) -> dict[str, Any]:
        """Tag, URL and process, for those who look after a cluster. Never the secret."""
        return {"tag": self._tag, "url": self._url, "pid": os.getpid(), "target": self._server.core.model.target}

    def __del__(self) -> None:
        """Called by Ray Serve before it ends the process: sessions finish, or get `shutdown` after the drain."""
        if self._has_ended.is_set():
            return
        _log.info("replica %s drains for up to %g s", self._tag, self._server.drain_s)
        self._server.begin_drain(self._server.drain_s)
        self._report()  # at once: no front sends new work any more
        self._thread.join(self._server.drain_s + MARGIN_S)
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
        with self._reporting_lock:
            self._num_reports += 1
            core = self._server.core
            adapters = frozenset(core.model.adapters.values())
            report = Report(self._tag, self._url, self._secret, core.ready(), self._num_reports, os.getpid(), adapters)
            return self._registry.report.remote(report, self._budget.collect())


def keep_to_node() -> str:
    """Gives the node's address, and keeps a server of Ray Serve to it.

    Each actor of Ray Serve has one, for calls between deployments. Nobody calls it here, and it would listen on all
    addresses. Call this in the actor's constructor.
    """
    import ray
    from ray.serve._private import replica

    add_port, node = replica.add_port_to_grpc_server, str(ray.util.get_node_ip_address())
    shown = f"[{node}]" if ":" in node else node
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, f"{shown}:0")
    return node
