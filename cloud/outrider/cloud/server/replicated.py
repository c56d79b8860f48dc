"""Serves replicas: `outrider-cloud serve --ray`, and the application of Ray Serve for a cluster.

On one machine this process is the front, and Ray is its own. On a cluster the front is a deployment beside the
replicas: `serve deploy` takes `app`, whose arguments are the options of `outrider-cloud serve` (docs/ray.md).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from outrider.cloud.api.audit import AuditLog
from outrider.cloud.api.serving import VerifierServer
from outrider.cloud.replicas.cluster import Scale, local_ray, replicas_of
from outrider.cloud.replicas.front import Front, FrontServer
from outrider.cloud.replicas.members import Members
from outrider.cloud.replicas.registry import follow, open_registry
from outrider.cloud.replicas.replica import LOOPBACK, MARGIN_S, NODE, Make, keep_to_node
from outrider.cloud.server.access import Access, server_settings
from outrider.cloud.server.options import EngineName, ServeOptions, placed_lora
from outrider.cloud.server.serve import (
    REDIS_VARIABLE,
    announce,
    audit_log_of,
    connection_limits,
    open_recent,
    open_target,
    opened_server,
    port_file_removed,
    print_now,
    require_writable,
)
from outrider.cloud.server.signals import takes_hangups
from outrider.cloud.server.target import Target
from outrider.models.counted import counted
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.http.logs import configure_logging
from outrider.models.http.security import KeyRing
from outrider.models.ingress.collector import relieve_collector
from outrider.models.ingress.sockets import open_socket

_log = logging.getLogger("outrider.replicas")

FRONT_OPTIONS: Final = (
    "config",
    "api_key_file",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "port_file",
    "upstream",
)
"""Options that reach no replica. All others do, so that a replica is opened as a single server is."""
APPLICATION: Final = "outrider"
_FRONT: Final = "front"
_START_S: Final = 600.0
"""For the first replica of a front to load its model."""
_NODE_OPTION: Final = "replica_host"


@dataclass(frozen=True, slots=True)
class OpenReplica:
    """Opens the server of one replica by the options of all: a `Make`. gpus: that Ray gives it."""

    options: ServeOptions
    gpus: float = 0.0

    def __call__(self, tag: str, keys: KeyRing) -> AbstractContextManager[VerifierServer]:
        """The server, its engine started."""
        options = self.options
        configure_logging(options.log_format)
        target = open_target(options)
        require_gpus(target.num_gpus, self.gpus)
        settings = server_settings(options, keys=keys, rate_per_s=0.0, session_prefix=tag)
        limits = connection_limits(options)  # a front is one client, which has bounded its own
        limits = replace(limits, max_per_client=limits.max_connections, max_client_bodies=limits.max_bodies)
        # The server's thread ends where the engine dies, so Ray starts another replica.
        return opened_server(options, target, settings, limits=limits)


def serve_replicas(options: ServeOptions) -> None:
    """Serves replicas of this machine until a signal ends them. Raises OutriderError for the user's mistakes."""
    configure_logging(options.log_format)
    scale = scale_of(options)
    access = Access.of(options)
    require_writable(options.port_file)
    with open_recent(options):  # a mistake shows before Ray starts
        pass
    if options.redis is not None:
        os.environ[REDIS_VARIABLE] = options.redis  # it may have a password, and Ray keeps options
        options = replace(options, redis=None)
    with (
        takes_hangups() as hangups,
        open_socket(options.host, options.port) as sock,
        audit_log_of(options.audit_log) as audit,
    ):
        target = open_target(options)  # a mistake shows before Ray starts
        if options.gpus_per_replica is None:
            scale = replace(scale, gpus=float(target.num_gpus))  # of a bundle, more than its options may decide
        require_gpus(target.num_gpus, scale.gpus)
        if (options.device or "").startswith("cuda:"):
            raise ConfigError(f"--device {options.device} would be the GPU of every replica; give --device cuda")
        make = OpenReplica(_for_replica(options, target, scale), scale.gpus)
        print_now(f"{target.model.name}: starts {counted(scale.replicas, 'replica')} on Ray")
        with local_ray(scale.cpus * scale.most + 1, scale.gpus * scale.replicas), port_file_removed(options.port_file):
            deploy(replicas_of(make, APPLICATION, scale, host=LOOPBACK, drain_s=options.drain_s))
            server = front_server(
                access,
                APPLICATION,
                drain=_delete,
                on_ready=partial(
                    announce,
                    options,
                    target.path,
                    sock,
                    needs_key=bool(len(access.keys)),
                    has_drafts=options.drafts is not None,
                ),
                audit=audit,
            )
            relieve_collector()
            with access.watching(server.tls, server.revoke) as watch:
                hangups.act_by(watch.check_soon)
                server.run(sockets=[sock])


def deploy(application: Any, name: str = APPLICATION) -> None:
    """Deploys, and returns once it runs. Raises RuntimeUnavailable where it does not."""
    from ray import serve

    try:
        serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        raise RuntimeUnavailable(
            f"the replicas did not start: {' '.join(str(error).split())[:500]}; their logs are where the log says"
        ) from None


def _delete() -> None:
    from ray import serve

    serve.delete(APPLICATION)


def app(arguments: dict[str, Any]) -> Any:
    """The application for `serve deploy`: replicas, and fronts that listen where the options say.

    arguments: the options of `outrider-cloud serve`, with underscores; and `replica_host`, `node` (the default) or an
    address that replicas listen on. Raises ConfigError for what is none of them.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    arguments = dict(arguments)
    host = str(arguments.pop(_NODE_OPTION, NODE))
    if "config" in arguments:
        raise ConfigError("the application's argument 'config' names a file that no node reads; give its options here")
    removed = {name.removeprefix("--").replace("-", "_"): advice for name, advice in ServeOptions.REMOVED.items()}
    unknown = sorted(set(arguments) - {each.name for each in fields(ServeOptions)})
    if unknown:
        raise ConfigError(
            f"the application's argument {unknown[0]!r} is no option of `outrider-cloud serve`. "
            + removed.get(unknown[0], "Remove it.")
        )
    if isinstance(arguments.get("replicas"), int):  # YAML has no quotes there
        arguments["replicas"] = str(arguments["replicas"])
    try:
        options = TypeAdapter(ServeOptions).validate_python({**arguments, "ray": True})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"the application's argument {first['loc'][0]!r}: {first['msg']}") from None
    if options.redis is not None and urlsplit(options.redis).password:
        raise ConfigError(
            f"the application's argument 'redis' has a password, which Ray would keep and show; set {REDIS_VARIABLE} "
            "on the nodes"
        )
    options = replace(options, gpus_per_replica=_gpus_of(options))
    return application_of(options, OpenReplica(_without_access(options), _gpus_of(options)), host=host)


def application_of(options: ServeOptions, make: Make, *, host: str, name: str = APPLICATION) -> Any:
    """Replicas and one front per node that has room for it, as an application of Ray Serve."""
    from ray import serve

    replicas = replicas_of(make, name, scale_of(options), host=host, drain_s=options.drain_s)
    return serve.deployment(
        name=_FRONT,
        ray_actor_options={"num_cpus": 0.5},
        num_replicas=1,
        max_replicas_per_node=1,  # they share a port
        health_check_period_s=5.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=options.drain_s + 30.0,
    )(DeployedFront).bind(options, name, replicas)


class DeployedFront:
    """A front as a deployment of Ray Serve: a server in a thread of its own. replicas: so that Ray deploys them."""

    def __init__(self, options: ServeOptions, name: str, replicas: Any) -> None:
        keep_to_node()
        configure_logging(options.log_format)
        access = Access.of(options)
        self._stack = ExitStack()
        audit = self._stack.enter_context(audit_log_of(options.audit_log))
        self._socket = self._stack.enter_context(_socket_of(options))
        self._is_ready = threading.Event()
        self._server = front_server(access, name, drain=lambda: None, on_ready=self._is_ready.set, audit=audit)
        self._stack.enter_context(access.watching(self._server.tls, self._server.revoke))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="outrider-front", daemon=True
        )
        self._thread.start()
        if not self._is_ready.wait(_START_S):
            raise RuntimeUnavailable(f"no replica took work within {_START_S:g} s; the replicas' logs have the reason")

    def check_health(self) -> None:
        """Called by Ray Serve; three failures in a row, and it starts another in its place."""
        if not self._thread.is_alive():
            raise RuntimeError("the front's thread has ended")

    def describe(self) -> dict[str, Any]:
        """Where it listens."""
        return {"port": self._socket.getsockname()[1]}

    def __del__(self) -> None:
        """Called by Ray Serve before it ends the process: streams are cut, and devices go on at the next front."""
        if self._thread.is_alive():
            self._server.begin_drain()
            self._thread.join()
        self._stack.close()


def _socket_of(options: ServeOptions) -> socket.socket:
    """The front's socket. In a rolling update the front before may still close: it is waited for."""
    until_s = time.monotonic() + options.drain_s + MARGIN_S
    while True:
        try:
            return open_socket(options.host, options.port)
        except ConfigError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.5)


def front_server(
    access: Access, name: str, *, drain: Callable[[], None], on_ready: Callable[[], None], audit: AuditLog | None
) -> FrontServer:
    """The front of the application `name`; Ray must be connected."""
    return FrontServer(
        Front(Members(), access.settings(access.options.host, audit=audit)),
        lambda: follow(open_registry(name)),
        drain=drain,
        limits=connection_limits(access.options),
        tls=access.tls,
        on_ready=on_ready,
    )


def scale_of(options: ServeOptions) -> Scale:
    """The numbers of the options. Raises ConfigError for those that contradict each other."""
    fewest, most = options.num_replicas()
    return Scale(
        replicas=fewest,
        most=most,
        sequences=float(options.max_running),
        cpus=float(options.threads or max(1, (os.cpu_count() or 1) // most)),
        gpus=options.gpus_per_replica or 0.0,
    )


def _gpus_of(options: ServeOptions) -> float:
    """GPUs of a replica on a cluster: as given, or what the options open. Its files may be on other nodes only."""
    if options.gpus_per_replica is not None:
        return options.gpus_per_replica
    if options.engine is EngineName.VLLM:
        from outrider.cloud.server.vllm_target import num_gpus

        return num_gpus(options)
    return float((options.device or "").startswith("cuda"))


def require_gpus(num_gpus: int, given: float) -> None:
    """Raises ConfigError where replicas get other GPUs than the target opens: they would all open the first one, or
    leave some idle. Several may share one GPU. num_gpus: of the target.
    """
    if given == num_gpus or (num_gpus == 1 and 0 < given < 1):
        return
    raise ConfigError(
        f"the target opens {counted(num_gpus, 'GPU')}, and Ray gives each replica {given:g}; set --gpus-per-replica "
        f"{num_gpus} (`gpus_per_replica` on a cluster)"
    )


def _for_replica(options: ServeOptions, target: Target, scale: Scale) -> ServeOptions:
    """For replicas of this machine: they share its processors, and work in another directory."""
    return replace(
        _without_access(options),
        bundle=str(target.path.resolve()),
        name=target.model.name,
        drafts=options.drafts.resolve() if options.drafts else None,
        lora=[placed_lora(each, Path.cwd()) for each in options.lora],
        spill_dir=options.spill_dir.resolve() if options.spill_dir else None,
        audit_log=options.audit_log.resolve() if options.audit_log else None,
        threads=options.threads or int(scale.cpus),
    )


def _without_access(options: ServeOptions) -> ServeOptions:
    """Without what is the front's: keys and certificates reach no replica."""
    none: dict[str, Any] = dict.fromkeys(FRONT_OPTIONS)
    return replace(options, **none)
