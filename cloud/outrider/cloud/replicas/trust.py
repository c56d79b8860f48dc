"""Hands a client's identity from the front to a replica, so that no client can choose its own.

The front checks keys, and sends each request on with `Authorization: Bearer SECRET.OWNER`. The secret is the replica's
own, random, and known to who may read Ray's registry only. A client's own header never reaches a replica.
"""

from __future__ import annotations

import hmac

from outrider.models.errors import RequestError
from outrider.models.http.security import KeyRing


class ForwardedOwners(KeyRing):
    """The key ring of a replica: takes the owner that the front names."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret.encode()

    def __len__(self) -> int:
        return 1  # a key is needed

    def owner(self, authorization: bytes | None) -> bytes:
        """The owner that the front found. Raises RequestError 401 `unauthorized` for anybody but the front."""
        secret, _, owner = (authorization or b"").removeprefix(b"Bearer ").partition(b".")
        if not hmac.compare_digest(secret, self._secret):
            raise RequestError("unauthorized", "this is a replica; call the server in front of it", status=401)
        return bytes.fromhex(owner.decode("ascii"))


def forwarded(secret: str, owner: bytes) -> str:
    """The header's value."""
    return f"Bearer {secret}.{owner.hex()}"
