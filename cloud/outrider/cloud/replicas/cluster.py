"""Starts Ray for the replicas of one machine, closed to other machines, and describes deployments to it.

Ray listens on all addresses unless it takes loopback for the node's own: it does on macOS and Windows, and here by the
same switch. Its dashboard, Serve's HTTP proxy and usage reports stay off. Calls of Ray need a token of this process.
Ray reads its environment when it is imported, so no module of this room imports it before that is set.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final

from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.hosts import is_loopback
from outrider.models.visible import visible

_log = logging.getLogger("outrider.replicas")

ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_agent_register_timeout_ms": "300000",  # default: 30 s
    "RAY_worker_register_timeout_seconds": "300",  # default: 60 s
    # Of each process's output: clients cause lines in it.
    "RAY_ROTATION_MAX_BYTES": str(8 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # Ray's many threads take all of glibc's arenas, each of which keeps what a costly grammar once took.
    "MALLOC_ARENA_MAX": "2",
}
"""Read by Ray when it is imported, and by glibc in the processes that it starts."""
DEPLOYMENT: Final = "replicas"
_MAX_STARTS: Final = 3
_MOST_CHARS: Final = 200
"""Of a message of Ray's that is logged."""
_STORE_BYTES: Final = 80 << 20
"""Of Ray's object store, which holds nothing of ours; no smaller one is allowed."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas there are, and what each takes.

    replicas: at the start, and at least. most: at most, where more are started as work comes. sequences: running and
    queued ones of a replica above which another is started.
    """

    replicas: int = 2
    most: int = 2
    sequences: float = 32.0
    cpus: float = 1.0
    gpus: float = 0.0


@contextmanager
def local_ray(num_cpus: float, num_gpus: float = 0.0) -> Iterator[None]:
    """A Ray of this process's own, on loopback, without proxy and dashboard; ended with it.

    Its directory has the replicas' logs. An error that ends it leaves them, and a log line says where.
    num_gpus: that the replicas need; Ray would wait for them for ever. Raises ConfigError where it has fewer.
    """
    os.environ.update(ENVIRONMENT | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    os.environ.pop("RAY_ADDRESS", None)
    import ray
    from ray import serve

    # For its sockets and logs, which nobody else may read. Short: a socket's path has at most 107 characters.
    place = Path(tempfile.mkdtemp(prefix="outrider-"))
    logs, is_kept = place / "session_latest" / "logs", False
    try:
        _start(max(1, round(num_cpus)), place)
        if not is_loopback(ray.util.get_node_ip_address()):
            raise RuntimeUnavailable("Ray would listen beyond this machine: it was imported before it was told not to")
        found = ray.cluster_resources().get("GPU", 0.0) if num_gpus else 0.0
        if found < num_gpus:
            raise ConfigError(f"the replicas need {num_gpus:g} GPUs, and Ray finds {found:g} here; lower --replicas")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        _log.info("the replicas' logs are in %s, and are removed at the end", logs)
        yield
    except Exception:
        is_kept = True
        raise
    finally:
        ray.shutdown()
        if is_kept:
            _log.error("the replicas' logs stay in %s; remove them when you have read them", logs)
        else:
            shutil.rmtree(place, ignore_errors=True)


def _start(num_cpus: int, place: Path) -> None:
    """Starts Ray. Its processes have 30 s to start, a fixed number, which a busy machine may exceed: tried again."""
    import ray
    from ray._private import worker

    for num_left in reversed(range(_MAX_STARTS)):
        try:
            with _ports_chosen():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    object_store_memory=_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=str(place),
                )
            worker.print_to_stdstream = _Told()
            return
        except Exception as error:  # Ray raises a bare Exception
            ray.shutdown()
            if not num_left:
                raise RuntimeUnavailable(f"Ray did not start: {error} Its logs are in {place}") from None
            _log.warning("Ray did not start in time: %s Trying again", error)


class _Told:
    """Logs what Ray would print of its processes: a message's first sentence, and each once.

    Where a replica dies Ray prints 1,000 characters, once for each of its tasks. Ray calls it in one thread.
    """

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        for line in data["lines"]:
            pid = re.search(r"Worker PID: (\d+)", line)
            said = line.split(". ", 1)[0].strip()[:_MOST_CHARS].removesuffix(".")
            said += f" (process {pid[1]})" if pid is not None else ""
            if said != self._last:
                self._last = said
                _log.warning("Ray says: %s", visible(said))


@contextmanager
def _ports_chosen() -> Iterator[None]:
    """Chooses the ports of Ray's agents. Else its node waits for them, 15 s at most, and on a busy machine in vain.

    `ray.init` has no argument for that, so it goes through what Ray does not publish: the version is pinned.
    """
    from ray._private import services
    from ray._private.parameter import RayParams
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    original, start_raylet = RayParams.__init__, services.start_raylet

    def with_ports(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
        with ExitStack() as stack:  # all at the same time, so that they differ
            socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
            ports = [sock.getsockname()[1] for sock in socks]
        for name, port in zip(names, ports, strict=True):
            setattr(self, name, port)

    def with_file(*args: Any, **kwargs: Any) -> Any:
        given = signature(start_raylet).bind(*args, **kwargs).arguments
        # The one port that the node reads from the agent's file in any case.
        port = given["dashboard_agent_listen_port"]
        persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        return start_raylet(*args, **kwargs)

    RayParams.__init__, services.start_raylet = with_ports, with_file
    try:
        yield
    finally:
        RayParams.__init__, services.start_raylet = original, start_raylet


def replicas_of(make: Any, application: str, scale: Scale, *, host: str, drain_s: float) -> Any:
    """The deployment of the replicas, bound: part of an application of Ray Serve. make: as for `Replica`."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    from outrider.cloud.replicas.replica import MARGIN_S, Replica

    number: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.most > scale.replicas:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.replicas,
                initial_replicas=scale.replicas,
                max_replicas=scale.most,
                target_ongoing_requests=scale.sequences,
                upscale_delay_s=10.0,
                downscale_delay_s=300.0,
                look_back_period_s=15.0,  # above the 10 s between two reports to Ray
                policy=AutoscalingPolicy(policy_function="outrider.cloud.replicas.scaling:by_sequences"),
            )
        }
    return serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=drain_s + 2 * MARGIN_S,
        **number,
    )(Replica).bind(make, application, host)
