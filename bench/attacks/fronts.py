"""Attacks on the front of replicas and past it: forged headers, replicas' own ports, odd targets, floods of scrapes."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Final

import psutil
from bench.attacks.attackers import attacking, received, repeat
from bench.attacks.exchange import HOST, ask, request_bytes
from bench.attacks.subject import KEYS, Row, Server, Subject, prompt_of

CLIENT, SCRAPER = KEYS
NUM_REPLICAS: Final = 2
FLOOD_S: Final = 5.0
NUM_SCRAPERS: Final = 4
MAX_SLOWER: Final = 1.5
_TEXT: Final = {"prompt": prompt_of(1), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
_ODD: Final = (
    ("GET", "*"),
    ("OPTIONS", "*"),
    ("POST", "*"),
    ("GET", "//evil.example/v1/models"),
    ("GET", "/@evil.example:80/"),
    ("POST", "/v1/completions/"),
    ("GET", "/metrics/"),
    ("GET", "http://evil.example/v1/models"),
    ("CONNECT", "evil.example:80"),
)
_MAX_LOG_BYTES: Final = 4096


def replicas_front(subject: Subject) -> Iterator[Row]:
    """Attacks the front of two replicas, and the replicas past it."""
    if "--ray" not in subject.options:
        ray = ("--ray", "--replicas", str(NUM_REPLICAS))
        subject = replace(subject, options=(*subject.options, *ray), start_s=max(subject.start_s, 400.0))
    digest = hashlib.sha256(SCRAPER.encode()).hexdigest()
    with subject.serve(keys=[CLIENT, f"sha256:{digest} name=scraper scopes=metrics"]) as server:
        yield _forged(server)
        yield _past(server)
        yield _other_targets(server)
        yield _odd_targets(server)
        yield from _scrapes(server)


def _forged(server: Server) -> Row:
    """Headers such as the front sends to its replicas, sent to the front."""
    digest = hashlib.sha256(CLIENT.encode()).hexdigest()
    headers = _forgeries(digest)
    statuses = [server.ask("POST", "/v1/completions", _TEXT, headers=each).status for each in headers]
    num_answered = sum(status != 401 for status in statuses)
    return Row(
        "37",
        f"{len(headers)} forged headers of a front, sent to the front: accepted",
        f"{num_answered}",
        "0: all 401",
        not num_answered,
        {"statuses": statuses},
    )


def _past(server: Server) -> Row:
    """The same, and a client's own key, sent to the ports of the replicas."""
    digest = hashlib.sha256(CLIENT.encode()).hexdigest()
    ports = [port for port in _ports(server) if port != server.port and _is_ours(port)]
    headers = [{}, {"Authorization": f"Bearer {CLIENT}"}, *_forgeries(digest)]
    paths = [("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/sessions")]
    statuses = [
        ask(port, method, path, _TEXT if method == "POST" else None, headers=each).status
        for port in ports
        for method, path in paths
        for each in headers
    ]
    num_answered = sum(status != 401 for status in statuses)
    return Row(
        "37",
        "calls of the replicas' own ports, without and with forged headers and a client's key: accepted",
        f"{num_answered} of {len(statuses)}; {len(ports)} ports",
        f"0: all 401; {NUM_REPLICAS} ports",
        not num_answered and len(ports) == NUM_REPLICAS,
        {"statuses": statuses, "ports": ports},
    )


def _other_targets(server: Server) -> Row:
    """Texts that name a target which no replica has."""

    def text(headers: Mapping[str, str]) -> object:
        answer = server.ask("POST", "/v1/completions", _TEXT, key=CLIENT, headers=headers)
        return answer.json["choices"][0]["text"] if answer.status == 200 else answer.status

    expected = text({})
    names = ["", "0" * 16, "f" * 4000, "../../registry-other", "a\tb"]
    wrong = [name for name in names if text({"Outrider-Target": name}) != expected]
    return Row(
        "37",
        f"{len(names)} texts with `Outrider-Target` of another model: other texts than without it",
        f"{len(wrong)}",
        "0",
        not wrong and not isinstance(expected, int),
        {"wrong": wrong, "expected": expected},
    )


def _odd_targets(server: Server) -> Row:
    """Targets that are no path, or that a replica would redirect."""
    before = len(server.said())
    answers = [_raw(server.port, method, target) for method, target in _ODD * 20]
    statuses = [int(answer[9:12] or 0) if answer.startswith(b"HTTP/1.1 ") else 0 for answer in answers]
    num_failures = sum(status >= 500 for status in statuses)
    num_moved = sum(b"\r\nlocation:" in answer.lower() for answer in answers)
    grown = len(server.said()) - before
    return Row(
        "37",
        f"{len(answers)} requests for `*`, with slashes at the end, or for another authority: 5xx, redirects, log",
        f"{num_failures} of 5xx; {num_moved} redirects; {grown} bytes of log",
        f"none; none; {_MAX_LOG_BYTES}",
        not num_failures and not num_moved and grown <= _MAX_LOG_BYTES,
        {"statuses": statuses, "grown": grown},
    )


def _scrapes(server: Server) -> Iterator[Row]:
    """Floods of /metrics with a key for metrics only, beside floods of /health/live; four sessions of another key."""
    floods = {path: [server.request("GET", path, key=SCRAPER)] for path in ("/health/live", "/metrics")}
    rates: dict[str, list[float]] = {path: [] for path in floods}
    statuses: dict[str, list[int]] = {path: [] for path in floods}
    num_before, began_s = _scraped(server), time.monotonic()
    bodies = [{"prompt": prompt_of(10 + i), "max_tokens": 900, "ignore_eos": True} for i in range(4)]
    for path in (*floods, *floods):
        server.wait_until_idle()
        with (
            server.crowd(bodies, keeps=True, key=CLIENT) as crowd,
            attacking(repeat, server.port, floods[path], NUM_SCRAPERS, 20.0) as reports,
        ):
            crowd.wait(lambda: crowd.num_running() == len(bodies), 20.0)
            rates[path].append(crowd.tokens_per_s(FLOOD_S))
            statuses[path] += received(reports)
    time.sleep(1.1)  # the next scrape is a new one
    num_scrapes, took_s = _scraped(server) - num_before, time.monotonic() - began_s
    beside, during = (median(each) for each in rates.values())
    yield Row(
        "37",
        f"{NUM_SCRAPERS} connections ask for /metrics all the while, with a key for metrics only: four sessions' "
        "tokens/s",
        f"{during:.0f}; beside as many that ask for /health/live {beside:.0f} ({beside / max(during, 1e-9):.2f}x "
        f"slower); {len(statuses['/metrics'])} answers",
        f"at most {MAX_SLOWER:g}x slower; all 200",
        MAX_SLOWER * during >= beside and set(statuses["/metrics"]) == {200},
        {"tokens_per_s": rates, "num_answers": len(statuses["/metrics"])},
    )
    yield Row(
        "37",
        "the same: scrapes of each replica a second",
        f"{num_scrapes / took_s / NUM_REPLICAS:.2f}",
        "1.1",
        0 < num_scrapes <= 1.1 * took_s * NUM_REPLICAS,
        {"num_scrapes": num_scrapes, "took_s": took_s},
    )


def _forgeries(owner: str) -> list[dict[str, str]]:
    """As the front writes them, by another secret, by none, and cut."""
    guess = secrets.token_hex(32)
    values = [f"{guess}.{owner}", f"{guess}.{owner}.100.0.0", f".{owner}", ".", guess, f"{guess}.zz.1.2", ""]
    return [{"Authorization": f"Bearer {each}"} for each in values]


def _ports(server: Server) -> list[int]:
    """Where the server and its children listen, Ray's own included."""
    leader = psutil.Process(server.pid)
    pids = {each.pid for each in (leader, *leader.children(recursive=True))}
    found = psutil.net_connections("tcp")
    return sorted({c.laddr.port for c in found if c.pid in pids and c.status == psutil.CONN_LISTEN})


def _is_ours(port: int) -> bool:
    """Whether a server of ours listens there: it says that it lives."""
    try:
        return bool(ask(port, "GET", "/health/live", timeout_s=5.0).json == {"status": "live"})
    except OSError:
        return False


def _raw(port: int, method: str, target: str) -> bytes:
    """The beginning of the answer to a request that says it as it is written here."""
    body = json.dumps(_TEXT).encode() if method == "POST" else b""
    with socket.create_connection((HOST, port), 20.0) as connection:
        connection.sendall(request_bytes(port, method, target, body, CLIENT))
        return connection.recv(1 << 16)


def _scraped(server: Server) -> float:
    """How often replicas have been asked for metrics, in all."""
    return sum(server.metrics("outrider_http_requests_total", 'route="/metrics"', "replica=", key=SCRAPER))
