"""Asks Linux for the owner of one TCP connection, by its two addresses (sock_diag(7)): some microseconds.

The tables in /proc/net say the same, but the system walks through all its hash buckets to write them: 5 to 15 ms.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from typing import Final

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
