"""Attacks the local endpoint as another user of its machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from bench.attacks.attackers import as_user, attacking
from bench.attacks.local import BODIES, CHAT, VERIFY
from bench.attacks.subject import KEYS, NotMeasured, Row, Server, Subject, listed

_ROOT: Final = 0
_NOBODY: Final = 65534
_WAYS: Final = ("plainly", "without waiting for the answer", "with its writing side closed", "pipelined")


def other_users(subject: Subject) -> Iterator[Row]:
    """Calls as another user of this machine: without a key, with one, and where --any-user allows it."""
    if os.getuid() != 0:
        raise NotMeasured("only root can call as another user; run this as root")
    with subject.emulated(step_ms=5.0) as cloud:
        with subject.endpoint(cloud.url) as server:
            own = _plain(_codes(server, _ROOT))
            if not (before := _sessions(cloud)):
                raise NotMeasured("the verifier's metrics show no session after root's texts")
            other = _codes(server, _NOBODY)
            spent = _sessions(cloud) - before
        with subject.endpoint(cloud.url, keys=KEYS) as server:
            keyed = _plain(_codes(server, _NOBODY, KEYS[0]))
            wrong_key = _plain(_codes(server, _NOBODY, "a-key-that-nobody-has"))
        with subject.endpoint(cloud.url, "--any-user") as server:
            allowed = _plain(_codes(server, _NOBODY))
    taken = [
        f"{path} {way}"
        for path, codes in other.items()
        for way, code in zip(_WAYS, codes, strict=True)
        if code not in (403, 0)  # 0: the user did not wait for the answer
    ]
    taken += [f"{path} with a wrong key" for path, code in wrong_key.items() if code != 401]
    yield Row(
        "23",
        f"`outrider serve`: another user of the machine without a key, or with a wrong one, {len(_WAYS)} ways",
        f"{listed(taken, 'accepted')}; {spent} texts at the verifier",
        "all refused, no text",
        not taken and not spent,
        {"statuses": other, "wrong_key": wrong_key, "sessions": spent},
    )
    # There is no such answer to verify, and the target has no chat template: these routes say so.
    expected = dict.fromkeys(BODIES, 200) | {VERIFY: 404, CHAT: 400}
    callers = {"root": own, "another user with a key": keyed, "another user with --any-user": allowed}
    wrong = [who for who, found in callers.items() if found != expected]
    yield Row(
        "23",
        "root, another user with a key, another user with --any-user",
        "all answered" if not wrong else f"refused: {', '.join(wrong)}",
        "all answered",
        not wrong,
        {"statuses": callers},
    )


def _codes(server: Server, user: int, key: str | None = None) -> dict[str, list[int]]:
    """The statuses that this user gets at each route, in the order of `_WAYS`."""
    requests = [server.request("POST", path, body, key) for path, body in BODIES.items()]
    with attacking(as_user, user, server.port, requests) as reports:
        codes: list[list[int]] = reports.recv()
    server.wait_until_idle()
    return dict(zip(BODIES, codes, strict=True))


def _plain(codes: dict[str, list[int]]) -> dict[str, int]:
    return {path: found[0] for path, found in codes.items()}


def _sessions(cloud: Server) -> int:
    """Sessions that the verifier has opened."""
    return int(sum(cloud.metrics("outrider_http_requests_total", '/v1/sessions"')))
