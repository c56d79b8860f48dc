"""Keeps other users of this machine from calling without a key: loopback is open to all of them.

Linux says which user a connection over loopback comes from. Elsewhere only a key keeps them out.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.edge.serve.socket_owner import owner_of
from outrider.models.errors import RequestError

_log = logging.getLogger("outrider.serve")

TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = "01"
_ROOT: Final = 0


class OwnUser:
    """ASGI layer that refuses requests over loopback that come from another user than this process's.

    Root may call: it could do anything else as well. open_paths: for everybody.
    """

    def __init__(self, app: ASGIApp, open_paths: Collection[str], tables: Collection[Path] = TABLES) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._tables = [table for table in tables if os.access(table, os.R_OK)]
        if not self._tables:
            _log.info("this system does not say which user calls; give --api-key-file to keep other users out")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if self._tables and scope["type"] == "http" and scope["path"] not in self._open_paths:
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        client, server = scope.get("client"), scope.get("server")
        # A local program may call a loopback address from any other address of this machine.
        if not client or not server or not (_is_loopback(client[0]) or _is_loopback(server[0])):
            return
        user = _connected_user(client, server)
        if user is None:  # the tables are asked second: they take far longer
            user = self._user_of((client[0], client[1]), int(server[1]))
        if user not in (_own_user(), _ROOT):
            raise RequestError(
                "other_user",
                "another user of this machine runs this server, and it asks for no key; its owner can set one with "
                "--api-key-file",
                status=403,
            )

    def _user_of(self, client: tuple[str, int], server_port: int) -> int | None:
        """The user whose socket has the client's address; None if there is none."""
        own = {f"{form}:{client[1]:04X}" for form in _forms(client[0])}
        for table in self._tables:
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[1] in own and fields[2].endswith(f":{server_port:04X}"):
                    user = int(fields[7])
                    # A socket that was closed belongs to nobody, which is written as root.
                    return None if user == _ROOT and fields[3] != _ESTABLISHED else user
        return None


def _connected_user(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user whose connected socket has the client's address; None where the system does not say."""
    ends = _address(client[0]), _address(server[0])
    return owner_of((ends[0], client[1]), (ends[1], server[1])) if ends[0] and ends[1] else None


def _own_user() -> int:
    return os.getuid() if hasattr(os, "getuid") else _ROOT


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _forms(host: str) -> set[str]:
    """An address as the tables write it: 32-bit numbers in the machine's order. IPv4 also as a mapped IPv6 address."""
    address = _address(host)
    assert address is not None
    forms = {_hex(address.packed)}
    if isinstance(address, ipaddress.IPv4Address):
        forms.add(_hex(ipaddress.IPv6Address(f"::ffff:{address}").packed))
    return forms


def _hex(packed: bytes) -> str:
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
