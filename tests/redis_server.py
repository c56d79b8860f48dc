"""Runs a real redis-server on a Unix socket, or with TLS on a port of loopback: nothing is written to disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.waiting import wait_until


def find_redis() -> str:
    """The program; skips the test where there is none."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("there is no redis-server here: apt-get install redis-server")
    return found


def _answers(place: Path) -> bool:
    try:
        with closing(Redis(unix_socket_path=str(place))) as redis:
            return bool(redis.ping())
    except RedisConnectionError:
        return False


@contextmanager
def redis_server(place: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server on the socket `place`; SIGKILL ends it."""
    command = [find_redis(), "--port", "0", "--unixsocket", str(place), "--save", "", "--appendonly", "no", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=place.parent) as process:
        try:
            wait_until(lambda: _answers(place))
            yield process
        finally:
            process.kill()
