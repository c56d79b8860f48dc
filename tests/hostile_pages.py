"""What a page of another site can send to a server on its visitor's machine; one list for both kinds of servers."""

from __future__ import annotations

import json

import httpx

JSON = {"content-type": "application/json"}
NO_JSON: tuple[dict[str, str], ...] = (
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {},
    {"content-type": "application/jsonx"},
)
ORIGINS = (
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1.evil.example"},
    {"origin": "http://localhost@evil.example"},
    {"origin": ""},
    {"sec-fetch-site": "cross-site"},
)
HOSTS = (
    "evil.example",
    "evil.example:8000",
    "192.168.1.1",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example@localhost",
    "localhost@evil.example",
    "[::1]evil.example",
    "[::1]:80.evil.example",
    "localhost:80:evil.example",
    "localhost:evil.example",
    "a" * 5000,
    "",
    "[::1",
)
FOREIGN: list[tuple[dict[str, str], int, str]] = [
    *((headers, 415, "unsupported_media_type") for headers in NO_JSON),
    *((JSON | headers, 403, "origin_not_allowed") for headers in ORIGINS),
    *((JSON | {"host": host}, 403, "host_not_allowed") for host in HOSTS),
]
"""Headers of a POST, and the status and code of its refusal where no key is needed."""


def ask_as_page(web: httpx.Client, url: str, headers: dict[str, str], body: object) -> httpx.Response:
    """A page's POST. No answer may have a header that lets the page read it."""
    answer = web.post(url, content=json.dumps(body).encode(), headers=headers)
    assert not any(name.startswith("access-control") for name in answer.headers)
    return answer
