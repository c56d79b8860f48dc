"""Attacks as a page in a browser: what it can send to a server on the user's own machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from bench.attacks.exchange import ask
from bench.attacks.rows import Row, listed
from bench.attacks.subject import KEYS, Subject

_BODY: Final = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
_JSON: Final = {"Content-Type": "application/json"}
_FOREIGN: Final = "https://evil.example"
_WRITES: Final[tuple[tuple[str, dict[str, str]], ...]] = (
    ("text/plain", {"Content-Type": "text/plain"}),
    ("a form", {"Content-Type": "application/x-www-form-urlencoded"}),
    ("a multipart form", {"Content-Type": "multipart/form-data; boundary=x"}),
    ("no content type", {"Content-Type": ""}),
    ("a foreign Origin", {**_JSON, "Origin": _FOREIGN}),
    ("the Origin null", {**_JSON, "Origin": "null"}),
    ("a cross-site fetch", {**_JSON, "Sec-Fetch-Site": "cross-site"}),
    ("a foreign Host", {**_JSON, "Host": "evil.example"}),
    ("a foreign Host that begins like loopback", {**_JSON, "Host": "localhost.evil.example"}),
)


def foreign_pages(subject: Subject) -> Iterator[Row]:
    """Writes from a page elsewhere, and reads with its host name (DNS rebinding), to a server without keys."""
    with subject.serve() as server:
        taken = [
            f"{what} ({path})"
            for what, headers in _WRITES
            for path in ("/v1/completions", "/v1/verify")
            if 200 <= ask(server.port, "POST", path, _body(path), headers=headers).status < 300
        ]
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/openapi.json")):
            if ask(server.port, method, path, headers={"Host": "evil.example"}).status == 200:
                taken.append(f"a foreign Host (GET {path})")
        # Refused for what they are, not because there is no such session: then the status is 404.
        for method, path in (("DELETE", "/v1/sessions/none"), ("POST", "/v1/sessions/none/drafts")):
            body = b'{"base":0,"paths":[[1]]}' if method == "POST" else None
            if ask(server.port, method, path, body, headers={**_JSON, "Origin": _FOREIGN}).status == 404:
                taken.append(f"a foreign Origin ({method} {path})")
        wrong = [
            what
            for what, status in {
                "JSON without an Origin": ask(server.port, "POST", "/v1/completions", _BODY).status,
                "JSON, UTF-8": ask(
                    server.port,
                    "POST",
                    "/v1/completions",
                    _BODY,
                    headers={"Content-Type": "application/json; charset=utf-8"},
                ).status,
                "the Host localhost": ask(
                    server.port, "POST", "/v1/completions", _BODY, headers={"Host": f"localhost:{server.port}"}
                ).status,
                # A chat UI's own server on this machine passes its Origin on; what runs there could call anyway.
                "the Origin of another port here": ask(
                    server.port, "POST", "/v1/completions", _BODY, headers={**_JSON, "Origin": "http://127.0.0.1:1"}
                ).status,
                "health by any Host": ask(server.port, "GET", "/health/live", headers={"Host": "probe.example"}).status,
            }.items()
            if status != 200
        ]
    with subject.serve(keys=KEYS) as server:
        headers = {"Host": "verifier.example"}
        if ask(server.port, "POST", "/v1/completions", _BODY, key=KEYS[0], headers=headers).status != 200:
            wrong.append("with a key, any Host where no --allowed-host is given")
    yield Row(
        "11",
        "a page in a browser: text/plain, forms, foreign Origin, foreign Host, to a loopback server without keys",
        listed(taken, "accepted"),
        "all refused",
        not taken,
        {"accepted": taken},
    )
    yield Row(
        "11",
        "what is not such a page: JSON without Origin, localhost, health probes, keys",
        "all answered" if not wrong else f"refused: {', '.join(wrong)}",
        "all answered",
        not wrong,
        {"refused": wrong},
    )


def _body(path: str) -> bytes:
    return _BODY if path == "/v1/completions" else b'{"items":[{"prefix":[1,2,3]}]}'
