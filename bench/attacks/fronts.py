"""Attacks on the front of replicas: floods of scrapes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Final

from bench.attacks.attackers import attacking, received, repeat
from bench.attacks.subject import KEYS, Row, Server, Subject, prompt_of

CLIENT, SCRAPER = KEYS
NUM_REPLICAS: Final = 2
FLOOD_S: Final = 5.0
NUM_SCRAPERS: Final = 4
MAX_SLOWER: Final = 1.5


def replicas_front(subject: Subject) -> Iterator[Row]:
    """Runs two replicas behind a front."""
    if "--ray" not in subject.options:
        ray = ("--ray", "--replicas", str(NUM_REPLICAS))
        subject = replace(subject, options=(*subject.options, *ray), start_s=max(subject.start_s, 400.0))
    digest = hashlib.sha256(SCRAPER.encode()).hexdigest()
    with subject.serve(keys=[CLIENT, f"sha256:{digest} name=scraper scopes=metrics"]) as server:
        yield from _scrapes(server)


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


def _scraped(server: Server) -> float:
    """How often replicas have been asked for metrics, in all."""
    return sum(server.metrics("outrider_http_requests_total", 'route="/metrics"', "replica=", key=SCRAPER))
