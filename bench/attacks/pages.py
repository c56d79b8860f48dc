"""Attacks as a page in a browser: what it can send to a server, or to the local endpoint, on the user's own machine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Final

from bench.attacks.local import BODIES, CHAT, VERIFY
from bench.attacks.subject import COMPLETIONS, HOST, KEYS, Answer, Row, Server, Subject, listed

_BODY: Final = {"prompt": "a", "max_tokens": 1}
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
    "a cross-site fetch": {**_JSON, "Sec-Fetch-Site": "cross-site"},
    "a foreign Host": {**_JSON, "Host": "evil.example"},
    "a foreign Host that begins like loopback": {**_JSON, "Host": "localhost.evil.example"},
}
_LOCAL_PAGES: Final = {
    **_PAGES,
    "an Origin that begins like the allowed one": {**_JSON, "Origin": f"{_ALLOWED}.evil.example"},
    "the allowed Origin over http": {**_JSON, "Origin": "http://chat.example"},
    "an Origin that begins like loopback": {**_JSON, "Origin": "http://127.0.0.1.evil.example"},
    "a foreign Host and its Origin": {**_JSON, "Host": "evil.example", "Origin": "http://evil.example"},
}
_READS: Final = ("/v1/models", "/v1/outrider/info", "/metrics", "/")


def foreign_pages(subject: Subject) -> Iterator[Row]:
    """Writes from a page elsewhere, and reads with its host name (DNS rebinding), to a server without keys."""
    bodies = {COMPLETIONS: _BODY, "/v1/verify": {"items": [{"prefix": [1, 2, 3]}]}}
    with subject.serve() as server:
        taken = [
            f"{what} ({path})"
            for what, headers in _PAGES.items()
            for path, body in bodies.items()
            if 200 <= _post(server, path, body, headers).status < 300
        ]
        taken += _read(server, ("/v1/models", "/metrics", "/openapi.json"))
        # Refused for what they are, not because there is no such session: then the status is 404.
        for method, path in (("DELETE", "/v1/sessions/none"), ("POST", "/v1/sessions/none/drafts")):
            draft = {"base": 0, "paths": [[1]]} if method == "POST" else None
            if server.ask(method, path, draft, headers={**_JSON, "Origin": _FOREIGN}).status == 404:
                taken.append(f"a foreign Origin ({method} {path})")
        honest = {
            "JSON without an Origin": {},
            "JSON, UTF-8": {"Content-Type": "application/json; charset=utf-8"},
            "the Host localhost": {"Host": f"localhost:{server.port}"},
            # A chat UI's own server on this machine passes its Origin on; what runs there could call anyway.
            "the Origin of another port here": {**_JSON, "Origin": "http://127.0.0.1:1"},
        }
        wrong = [what for what, sent in honest.items() if _post(server, COMPLETIONS, _BODY, sent).status != 200]
        if server.ask("GET", "/health/live", headers={"Host": "probe.example"}).status != 200:
            wrong.append("health by any Host")
    with subject.serve(keys=KEYS) as server:
        headers = {"Host": "verifier.example"}
        if server.ask("POST", COMPLETIONS, _BODY, key=KEYS[0], headers=headers).status != 200:
            wrong.append("with a key, any Host where no --allowed-host is given")
    yield _taken_row(
        "11",
        "a page in a browser: text/plain, forms, foreign Origin, foreign Host, to a loopback server without keys",
        taken,
    )
    yield _wrong_row("11", "what is not such a page: JSON without Origin, localhost, health probes, keys", wrong)


def local_pages(subject: Subject) -> Iterator[Row]:
    """Calls every POST route of the endpoint as a page elsewhere, and reads with its host name (DNS rebinding)."""
    with subject.emulated(step_ms=5.0) as cloud:
        with subject.endpoint(cloud.url) as server:
            taken = _taken(server, ", no origin allowed")
            if _reaches(_post(server, CHAT, BODIES[CHAT], {**_JSON, "Origin": _ALLOWED})):
                taken.append("an Origin that is not configured")
            own = {**_JSON, "Origin": server.url, "Sec-Fetch-Site": "same-origin"}
            wrong = _refused(server, {"no Origin": _JSON, "its own Origin": own})
        with subject.endpoint(cloud.url, "--allowed-origin", _ALLOWED) as server:
            taken += _taken(server, ", one origin allowed")
            wrong += _refused(server, {"the allowed Origin": {**_JSON, "Origin": _ALLOWED}})
            taken += [f"CORS for {origin}" for origin in (_FOREIGN, "null") if _gets_cors(server, origin)]
            if not _gets_cors(server, _ALLOWED):
                wrong.append("CORS for the allowed Origin")
        with subject.endpoint(cloud.url, keys=KEYS) as server:
            headers = {**_JSON, "Origin": _FOREIGN, "Authorization": f"Bearer {KEYS[0]}"}
            for path, body in BODIES.items():
                if _reaches(_post(server, path, body, headers)):
                    taken.append(f"a foreign Origin with a key ({path})")
                if _post(server, path, body, _JSON).status != 401:
                    taken.append(f"no key ({path})")
    num = 2 * (len(_LOCAL_PAGES) * len(BODIES) + len(_READS)) + 2 * len(BODIES) + 3
    yield _taken_row(
        "22",
        f"`outrider serve`: a page in a browser, {num} requests to every POST route and to what it could read",
        taken,
    )
    yield _wrong_row(
        "22", "the same endpoint: no Origin, its own, the one of --allowed-origin with its CORS headers", wrong
    )


def _taken_row(number: str, what: str, taken: list[str]) -> Row:
    return Row(number, what, listed(taken, "accepted"), "all refused", not taken, {"accepted": taken})


def _wrong_row(number: str, what: str, wrong: list[str]) -> Row:
    measured = "all answered" if not wrong else f"refused: {', '.join(wrong)}"
    return Row(number, what, measured, "all answered", not wrong, {"refused": wrong})


def _post(server: Server, path: str, body: object, headers: Mapping[str, str]) -> Answer:
    return server.ask("POST", path, json.dumps(body).encode(), headers=headers)


def _read(server: Server, paths: tuple[str, ...], where: str = "") -> list[str]:
    """What a page reads with its own host name."""
    return [
        f"a foreign Host (GET {path}{where})"
        for path in paths
        if server.ask("GET", path, headers={"Host": "evil.example"}).status == 200
    ]


def _reaches(answer: Answer) -> bool:
    """Whether a route answered: with work, or because there is no template or no such answer."""
    code = answer.json.get("error", {}).get("code") if answer.status != 200 else None
    return answer.status == 200 or code in ("no_chat_template", "unknown_answer")


def _taken(server: Server, where: str) -> list[str]:
    found = [
        f"{what} ({path}{where})"
        for what, headers in _LOCAL_PAGES.items()
        for path, body in BODIES.items()
        if _reaches(_post(server, path, body, headers))
    ]
    return found + _read(server, _READS, where)


def _refused(server: Server, pages: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [
        f"{what} ({path})"
        for what, sent in pages.items()
        for path, body in BODIES.items()
        if not _reaches(_post(server, path, body, sent))
    ]


def _gets_cors(server: Server, origin: str) -> bool:
    """Whether a browser would let a page of `origin` send JSON."""
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with closing(http.client.HTTPConnection(HOST, server.port, timeout=30.0)) as connection:
        connection.request("OPTIONS", VERIFY, headers={**asked, "Access-Control-Request-Headers": "content-type"})
        response = connection.getresponse()
        response.read()
        return response.status == 200 and response.getheader("access-control-allow-origin") in (origin, "*")
