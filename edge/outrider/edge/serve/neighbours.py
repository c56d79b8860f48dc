"""Keeps other users of this machine from calling without a key: loopback is open to all of them.

Linux says which user a connection over loopback comes from. Elsewhere only a key keeps them out.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import struct
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.models.errors import RequestError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# From linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and net/tcp_states.h.
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_TCP_ESTABLISHED: Final = 1
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST: Final = struct.Struct("=BBBxI")  # family, protocol, extensions, states; then the socket
_PORTS: Final = struct.Struct("!HH")
_REST: Final = struct.Struct("=III")  # interface, cookie
_ANSWER: Final = struct.Struct("=BBBB4s16s16sIIIIIIII")  # ..., ports, source, destination, ..., user, inode
_ANY: Final = 0xFFFFFFFF


def owner_of(local: tuple[IpAddress, int], remote: tuple[IpAddress, int]) -> int | None:
    """The user of the socket with this local and remote address; None where the system names none that is connected.

    None also where it cannot be asked this way.
    """
    if sys.platform != "linux" or local[0].version != remote[0].version:
        return None
    family = socket.AF_INET if local[0].version == 4 else socket.AF_INET6
    source, destination = local[0].packed.ljust(16, b"\0"), remote[0].packed.ljust(16, b"\0")
    ports = _PORTS.pack(local[1], remote[1])
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ANY)
    request += ports + source + destination + _REST.pack(0, _ANY, _ANY)
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
            kernel.setblocking(False)  # the answer is there when `sendto` returns
            kernel.sendto(header + request, (0, 0))
            answer, (sender, _) = kernel.recvfrom(4096)
    except OSError:
        return None  # a sandbox, or a system without this part
    if sender != 0 or len(answer) < _HEADER.size + _ANSWER.size:
        return None
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None  # an error: no such socket
    found = _ANSWER.unpack_from(answer, _HEADER.size)
    # Without a match, the system may name a socket that listens at the local address.
    if found[1] != _TCP_ESTABLISHED or found[4:7] != (ports, source, destination):
        return None
    return int(found[-2])


_log = logging.getLogger("outrider.serve")

TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
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
        if not client or not server:
            return
        here, there = _address(client[0]), _address(server[0])
        # A local program may call a loopback address from any other address of this machine.
        if not any(end is not None and end.is_loopback for end in (here, there)):
            return
        user = owner_of((here, client[1]), (there, server[1])) if here and there else None
        if user is None and here:  # the tables are asked second: they take far longer
            user = self._user_of(here, client[1], int(server[1]))
        if user not in (os.getuid() if hasattr(os, "getuid") else _ROOT, _ROOT):
            raise RequestError(
                "other_user",
                "another user of this machine runs this server, and it asks for no key; its owner can set one with "
                "--api-key-file",
                status=403,
            )

    def _user_of(self, address: IpAddress, port: int, server_port: int) -> int | None:
        """The user whose socket has the client's address; None if there is none."""
        own = {f"{form}:{port:04X}" for form in _forms(address)}
        for table in self._tables:
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[1] in own and fields[2].endswith(f":{server_port:04X}"):
                    user = int(fields[7])
                    # A socket that was closed belongs to nobody, which is written as root.
                    return None if user == _ROOT and int(fields[3], 16) != _TCP_ESTABLISHED else user
        return None


def _address(host: str) -> IpAddress | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _forms(address: IpAddress) -> set[str]:
    """An address as the tables write it: 32-bit numbers in the machine's order. IPv4 also as a mapped IPv6 address."""
    packed = [address.packed]
    if address.version == 4:
        packed.append(ipaddress.IPv6Address(f"::ffff:{address}").packed)
    return {"".join(f"{word:08X}" for word in struct.unpack(f"={len(each) // 4}I", each)) for each in packed}
