"""Attacks the local endpoint as a page in a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

from bench.attacks.exchange import Answer, ask
from bench.attacks.local import BODIES, CHAT, VERIFY
from bench.attacks.rows import Row, listed
from bench.attacks.subject import KEYS, Server, Subject

_JSON: Final = {"Content-Type": "application/json"}
_FOREIGN: Final = "https://evil.example"
_ALLOWED: Final = "https://chat.example"
_PAGES: Final[Mapping[str, dict[str, str]]] = {
    "text/plain": {"Content-Type": "text/plain"},
    "a form": {"Content-Type": "application/x-www-form-urlencoded"},
    "a multipart form": {"Content-Type": "multipart/form-data; boundary=x"},
    "no content type": {"Content-Type": ""},
    "a foreign Origin": {**_JSON, "Origin": _FOREIGN},
    "the Origin null": {**_JSON, "Origin": "null"},
    "an Origin that begins like the allowed one": {**_JSON, "Origin": f"{_ALLOWED}.evil.example"},
    "the allowed Origin over http": {**_JSON, "Origin": "http://chat.example"},
    "an Origin that begins like loopback": {**_JSON, "Origin": "http://127.0.0.1.evil.example"},
    "a cross-site fetch": {**_JSON, "Sec-Fetch-Site": "cross-site"},
    "a foreign Host": {**_JSON, "Host": "evil.example"},
    "a foreign Host that begins like loopback": {**_JSON, "Host": "localhost.evil.example"},
    "a foreign Host and its Origin": {**_JSON, "Host": "evil.example", "Origin": "http://evil.example"},
}
_READS: Final = ("/v1/models", "/v1/outrider/info", "/metrics", "/")


def local_pages(subject: Subject) -> Iterator[Row]:
    """Calls every POST route of the endpoint as a page elsewhere, and reads with its host name (DNS rebinding)."""
    with subject.emulated(step_ms=5.0) as cloud:
        with subject.endpoint(cloud.url) as server:
            taken = _taken(server, "no origin allowed")
            if _reaches(_post(server, CHAT, {**_JSON, "Origin": _ALLOWED})):
                taken.append("an Origin that is not configured")
            wrong = _refused(server, {"no Origin": _JSON, "its own Origin": _own(server)})
        with subject.endpoint(cloud.url, "--allowed-origin", _ALLOWED) as server:
            taken += _taken(server, "one origin allowed")
            wrong += _refused(server, {"the allowed Origin": {**_JSON, "Origin": _ALLOWED}})
            taken += [f"CORS for {origin}" for origin in (_FOREIGN, "null") if _gets_cors(server, origin)]
            if not _gets_cors(server, _ALLOWED):
                wrong.append("CORS for the allowed Origin")
        with subject.endpoint(cloud.url, keys=KEYS) as server:
            headers = {**_JSON, "Origin": _FOREIGN, "Authorization": f"Bearer {KEYS[0]}"}
            taken += [
                f"a foreign Origin with a key ({path})" for path in BODIES if _reaches(_post(server, path, headers))
            ]
            without = [path for path in BODIES if _post(server, path, _JSON).status != 401]
            taken += [f"no key ({path})" for path in without]
    num = 2 * (len(_PAGES) * len(BODIES) + len(_READS)) + 2 * len(BODIES) + 3
    yield Row(
        "22",
        f"`outrider serve`: a page in a browser, {num} requests to every POST route and to what it could read",
        listed(taken, "accepted"),
        "all refused",
        not taken,
        {"accepted": taken},
    )
    yield Row(
        "22",
        "the same endpoint: no Origin, its own, the one of --allowed-origin with its CORS headers",
        "all answered" if not wrong else f"refused: {', '.join(wrong)}",
        "all answered",
        not wrong,
        {"refused": wrong},
    )


def _post(server: Server, path: str, headers: Mapping[str, str]) -> Answer:
    return ask(server.port, "POST", path, json.dumps(BODIES[path]).encode(), headers=headers)


def _reaches(answer: Answer) -> bool:
    """Whether a route answered: with work, or because there is no template or no such answer."""
    code = answer.json.get("error", {}).get("code") if answer.status != 200 else None
    return answer.status == 200 or code in ("no_chat_template", "unknown_answer")


def _taken(server: Server, where: str) -> list[str]:
    found = [
        f"{what} ({path}, {where})"
        for what, headers in _PAGES.items()
        for path in BODIES
        if _reaches(_post(server, path, headers))
    ]
    return found + [
        f"a foreign Host (GET {path}, {where})"
        for path in _READS
        if ask(server.port, "GET", path, headers={"Host": "evil.example"}).status == 200
    ]


def _refused(server: Server, pages: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [
        f"{what} ({path})" for what, sent in pages.items() for path in BODIES if not _reaches(_post(server, path, sent))
    ]


def _own(server: Server) -> dict[str, str]:
    return {**_JSON, "Origin": server.url, "Sec-Fetch-Site": "same-origin"}


def _gets_cors(server: Server, origin: str) -> bool:
    """Whether a browser would let a page of `origin` send JSON."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30.0)
    try:
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", VERIFY, headers={**asked, "Access-Control-Request-Headers": "content-type"})
        response = connection.getresponse()
        response.read()
        return response.status == 200 and response.getheader("access-control-allow-origin") in (origin, "*")
    finally:
        connection.close()
