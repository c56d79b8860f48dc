"""Hands what the front knows of a client to a replica, so that no client can choose its own.

The front checks keys, and sends each request on with `Authorization: Bearer SECRET.OWNER.FACTS`: the owner, and the
limits, priority and name of its key. The secret is the replica's own, random, and known to who may read Ray's registry
only. A client's own header never reaches a replica, and neither do keys: an owner is a key's digest.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from starlette.types import Scope as AsgiScope

from outrider.cloud.api.audit import caller_of
from outrider.models.errors import RequestError
from outrider.models.http.keys import KEY, ApiKey, ForwardedKey
from outrider.models.http.security import ANYBODY, OWNER, KeyRing

MAX_REMOVED: Final = 64
"""Owners in one header: it must fit what a server takes."""
_ANYBODY: Final = "anybody"


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, as the front found it. removed: owners whose key was removed; the front says so, for no client."""

    owner: bytes = ANYBODY
    key: ApiKey | None = None
    network: str | None = None
    subject: str | None = None
    removed: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, scope: AsgiScope) -> Caller:
        """The caller of a request that has passed the gate, or needs no key."""
        seen = caller_of(scope)
        return cls(scope.get(OWNER, ANYBODY), scope.get(KEY), seen["network"], seen.get("subject"))


class ForwardedOwners(KeyRing):
    """The key ring of a replica: takes the callers that the front names, with the limits that it names.

    It knows an owner's key by its newest request.

    on_removed: called with owners whose key was removed, to end their work.
    """

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret.encode()
        self._removed: set[bytes] = set()
        self.on_removed: Callable[[Collection[bytes]], None] = lambda owners: None

    def __len__(self) -> int:
        return 1  # a key is needed

    def find(self, authorization: bytes | None) -> ApiKey:
        """The caller that the front found. Raises RequestError 401 `unauthorized` for anybody but the front."""
        secret, _, facts = (authorization or b"").removeprefix(b"Bearer ").partition(b".")
        if not hmac.compare_digest(secret, self._secret):
            raise RequestError("unauthorized", "this is a replica; call the server in front of it", status=401)
        key, removed = _read(facts)
        if removed:
            self._removed.update(removed)
            self.on_removed(removed)
        elif key.is_known:
            self._removed.discard(key.digest)  # the front's gate has let it in: it may have been added again
            self._by_digest[key.digest] = key  # as many as the front's key file has had
        return key

    def may_generate(self, owner: bytes) -> bool:
        """Whether the front has not removed its key since."""
        return owner not in self._removed


def forwarded(secret: str, caller: Caller) -> str:
    """The header's value."""
    key = caller.key
    facts: dict[str, Any] = {"network": caller.network, "subject": caller.subject}
    if key is not None:
        facts |= {
            "name": key.name,
            "sessions": key.sessions,
            "tokens_per_minute": key.tokens_per_minute,
            "priority": key.priority,
        }
    if caller.removed:
        facts["removed"] = [owner.hex() for owner in caller.removed]
    packed = json.dumps({name: value for name, value in facts.items() if value}, separators=(",", ":"))
    return f"Bearer {secret}.{caller.owner.hex()}.{base64.urlsafe_b64encode(packed.encode()).decode()}"


# Each draft message names its sender again.
@lru_cache(maxsize=1024)
def _read(facts: bytes) -> tuple[ForwardedKey, tuple[bytes, ...]]:
    owner, _, packed = facts.partition(b".")
    found = json.loads(base64.urlsafe_b64decode(packed))
    key = ForwardedKey(
        bytes.fromhex(owner.decode("ascii")),
        found.get("name", _ANYBODY),
        sessions=found.get("sessions"),
        tokens_per_minute=found.get("tokens_per_minute"),
        priority=found.get("priority", 0),
        is_known="name" in found,
        network=found.get("network"),
        subject=found.get("subject"),
    )
    return key, tuple(map(bytes.fromhex, found.get("removed", ())))
