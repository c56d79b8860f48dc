"""Hands a client's identity from the front to a replica, so that no client can choose its own.

The front checks keys, and sends each request on with `Authorization: Bearer SECRET.OWNER`, and the limits of the
owner's key where it has one. The secret is the replica's own, random, and known to who may read Ray's registry only. A
client's own header never reaches a replica.
"""

from __future__ import annotations

import hmac

from outrider.models.errors import RequestError
from outrider.models.http.keys import ApiKey
from outrider.models.http.security import KeyRing


class ForwardedOwners(KeyRing):
    """The key ring of a replica: takes the owner that the front names, with the limits of its key."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret.encode()
        self._keys: dict[bytes, ApiKey] = {}

    def __len__(self) -> int:
        return 1  # a key is needed

    def find(self, authorization: bytes | None) -> ApiKey:
        """The owner that the front found, as a key. Raises RequestError 401 `unauthorized` for all but the front."""
        secret, _, rest = (authorization or b"").removeprefix(b"Bearer ").partition(b".")
        if not hmac.compare_digest(secret, self._secret):
            raise RequestError("unauthorized", "this is a replica; call the server in front of it", status=401)
        name, *limits = rest.decode("ascii").split(".")
        owner = bytes.fromhex(name)
        if not limits:
            return ApiKey(owner, "client")
        priority, sessions, tokens_per_minute = map(int, limits)
        found = ApiKey(
            owner,
            "client",
            sessions=sessions or None,
            tokens_per_minute=tokens_per_minute or None,
            priority=priority,
        )
        self._keys[owner] = found  # as many as the front has keys
        return found

    def of_owner(self, owner: bytes) -> ApiKey | None:
        """The newest limits of an owner with a key."""
        return self._keys.get(owner)

    def sessions_of(self, owner: bytes) -> int | None:
        """The owner's own limit of open sequences, if it has one."""
        key = self._keys.get(owner)
        return None if key is None else key.sessions


def forwarded(secret: str, owner: bytes, key: ApiKey | None = None) -> str:
    """The header's value. key: the owner's, where it has one."""
    limits = "" if key is None else f".{key.priority}.{key.sessions or 0}.{key.tokens_per_minute or 0}"
    return f"Bearer {secret}.{owner.hex()}{limits}"
