"""Tells which hosts only this machine can reach, and which addresses are one client."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=4096)
def client_network(host: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 of an IPv6 address, which one client has to itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))
