"""Attacks by requests that are made from the OpenAPI document: every route, and every field at its bounds, alone and in
pairs, four at a time, with a key and without; and measures what another key notices.

Which request was it? Every incident, such as a late answer for health, is laid to the requests that were in flight. The
most suspicious are sent again, each kind alone, and only what happens again counts: on a busy machine most does not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.attacks.attackers import attacking, repeat, sweep
from bench.attacks.bodies import MAX_GROWTH_MB, MAX_HEALTH_S, SIZE
from bench.attacks.bounds import Case, Requests
from bench.attacks.crowd import crowd_of, first_token_s, prompt_of
from bench.attacks.exchange import ask, request_bytes
from bench.attacks.grammars import TEMPLATE
from bench.attacks.local import GENERATE, endpoint_and_idle, text_body
from bench.attacks.probes import Latency, Memory, health_of, memory_of
from bench.attacks.rows import Row, percentile
from bench.attacks.subject import KEYS, VLLM, NotMeasured, Server, Subject
from bench.changed_bundle import change_bundle

ATTACKER, OTHER = KEYS
NUM_TEXTS: Final = 2
"""Of the other key, all the while."""
NEWCOMERS_EVERY_S: Final = 0.2
CAP_S: Final = 10.0
MAX_FIRST: Final = 2.0
"""The other key's first token: over that beside as many plain requests."""
_SINGLE_S: Final = 15.0
_PAIR_S: Final = 3.0
"""For an answer; then the client goes."""
_PLAIN: Final = Case("POST /v1/completions")
_PLAIN_S: Final = 6.0
_CONFIRM_S: Final = 2.5
_ROUTE_S: Final = 240.0
"""For all pairs of a route; what is left then is not sent, and the row says so."""
_NUM_SUSPECTS: Final = 3
"""Of a kind of incident and a route, sent again."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is attacked. plain: a small request. text: the body of the other key's text with this number, for `path`."""

    server: Server
    idle: Server
    requests: Requests
    plain: Case
    path: str
    text: Callable[[int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, and when it was in flight."""

    case: Case
    began_s: float
    ended_s: float
    status: int


@dataclass(slots=True)
class Seen:
    """What was sent, and what others noticed meanwhile. gaps: of the other key's texts, from one commit to the next.
    firsts: of its newcomers (began, seconds to the first token).
    """

    health: Latency
    idle: Latency
    memory: Memory
    sent: list[Sent] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """The newcomers' median."""
        return median(took for _, took in self.firsts) if self.firsts else CAP_S

    @property
    def longest_gap_s(self) -> float:
        """Of the other key's texts."""
        return max((after - before for before, after in self.gaps), default=CAP_S)

    @property
    def gap_s(self) -> float:
        """The 99th percentile."""
        return percentile([after - before for before, after in self.gaps], 0.99) if self.gaps else CAP_S

    def stalls(self) -> Iterator[tuple[float, float, float]]:
        """(began, ended, seconds beyond an idle server's answers at that time) of each answer for health."""
        idle = list(zip(self.idle.began_s, self.idle.values, strict=True))
        at = 0
        for began_s, took_s in zip(self.health.began_s, self.health.values, strict=True):
            if took_s <= MAX_HEALTH_S:
                continue
            while at < len(idle) and sum(idle[at]) < began_s - 1.0:
                at += 1
            beside = [its for start, its in idle[at : at + 4000] if start < began_s + took_s and start + its > began_s]
            yield began_s, began_s + took_s, took_s - max(beside, default=0.0)

    def stall_s(self) -> float:
        """The longest."""
        return max((excess for _, _, excess in self.stalls()), default=0.0)

    def during(self, began_s: float, ended_s: float) -> set[Case]:
        """What was in flight then."""
        return {one.case for one in self.sent if one.began_s < ended_s and one.ended_s > began_s}


def generated_requests(subject: Subject) -> Iterator[Row]:
    """Sends the verifier every field of every route at its bounds, with a key and without."""
    # Here: attackers' processes import this module, and not the whole product.
    from bench.attacks.described import verifier_document

    small = () if subject.engine == VLLM else ("--kv-cache-mb", "32")
    with tempfile.TemporaryDirectory() as place:
        change_bundle(subject.bundles[0], Path(place, "target"), template=TEMPLATE)
        shutil.copytree(subject.bundles[1], Path(place, "drafts", "draft"))
        options = (*small, "--drafts", str(Path(place, "drafts")))
        target = Path(place, "target")
        with subject.serve(*options, keys=KEYS, bundle=target) as server, subject.serve(keys=KEYS) as idle:
            facts = ask(server.port, "GET", "/v1/model", key=ATTACKER).json
            names = {"model": facts["name"], "name": "draft", "path": "manifest.json"}
            requests = _requests(verifier_document(), facts, names)

            def text(number: int) -> dict[str, Any]:
                return {"prompt": prompt_of(number), "max_tokens": facts["max_positions"] // 2, "ignore_eos": True}

            _warm_up(server, "/v1/sessions", text)
            yield from _rows("50", "outrider-cloud serve", Place(server, idle, requests, _PLAIN, "/v1/sessions", text))


def generated_local(subject: Subject) -> Iterator[Row]:
    """The same for `outrider serve`, over an emulated verifier."""
    from bench.attacks.described import local_document

    with endpoint_and_idle(subject) as (endpoint, idle):
        model = ask(endpoint.port, "GET", "/v1/models", key=ATTACKER).json["data"][0]["id"]
        facts = {"max_positions": 2048, "vocab_size": 4096}  # bench.emulated's
        requests = _requests(local_document(), facts, {"model": model})
        yield from _rows("51", "outrider serve", Place(endpoint, idle, requests, _PLAIN, GENERATE, text_body))


def _requests(document: dict[str, Any], facts: dict[str, Any], names: dict[str, str]) -> Requests:
    context = facts["max_positions"] - 2 * NUM_TEXTS - 16
    return Requests(document, room=SIZE - 4096, context=context, vocab_size=facts["vocab_size"], names=names)


def _warm_up(server: Server, path: str, text: Callable[[int], dict[str, Any]]) -> None:
    """The KV cache is in use to its last block: memory that any use takes is not the attack's."""
    bodies = [json.dumps(text(number)).encode() for number in range(64)]
    requests = [request_bytes(server.port, "POST", path, body, key) for body in bodies for key in KEYS]
    with attacking(repeat, server.port, requests, 16, 30.0) as reports:
        for _ in range(64):
            reports.recv()


def _rows(number: str, what: str, place: Place) -> Iterator[Row]:
    requests = place.requests
    routes = requests.routes
    with_body = [route for route in routes if next(iter(requests.singles(route))).values or route.startswith("POST")]
    others = [route for route in routes if route not in with_body]
    plain = _watched(place, [place.plain] * 100_000, ATTACKER, _SINGLE_S, _PLAIN_S)
    groups: dict[str, tuple[list[Case], str | None, float]] = {
        "routes without a body": (_times(100, _singles(requests, others)), ATTACKER, _SINGLE_S)
    }
    for route in with_body:
        groups[route] = (_times(4, requests.singles(route)), ATTACKER, _SINGLE_S)
        if pairs := list(requests.pairs(route)):
            groups[f"{route}, in pairs"] = (pairs, ATTACKER, _PAIR_S)
    groups["without a key"] = (_times(20, [next(requests.singles(route)) for route in routes]), None, _SINGLE_S)
    groups["without a key, large"] = (
        _times(4, [max(requests.singles(route), key=requests.size) for route in with_body]),
        None,
        _SINGLE_S,
    )
    before_mb = place.server.memory_mb()
    seen: dict[str, Seen] = {}
    offences: dict[tuple[str, Case], str] = {}
    for name, (cases, key, timeout_s) in groups.items():
        place.server.wait_until_awake()
        seen[name] = one = _watched(place, cases, key, timeout_s, _ROUTE_S)
        suspects = _suspects(one, plain, before_mb)
        print(f"  {name}: {len(one.sent)} of {len(cases)}, {_words(one)}, {len(suspects)} suspects", flush=True)
        for case in suspects:
            if words := _confirmed(place, case, key):
                offences[name, case] = words
                print(f"    {case}: {words}", flush=True)
    yield from _judged(
        number, what, plain, seen, offences, before_mb, {name: len(each[0]) for name, each in groups.items()}
    )


def _judged(
    number: str,
    what: str,
    plain: Seen,
    seen: dict[str, Seen],
    offences: dict[tuple[str, Case], str],
    before_mb: float,
    wanted: dict[str, int],
) -> Iterator[Row]:
    everything = list(seen.values())
    sent = sum(len(one.sent) for one in everything)
    unsent = [f"{name}: {wanted[name] - len(one.sent)}" for name, one in seen.items() if len(one.sent) < wanted[name]]
    health_s = [value for one in everything for value in one.health.values]
    offenders = "; ".join(f"{case}: {words}" for (_, case), words in offences.items()) or "none"
    statuses = Counter(one.status for each in everything for one in each.sent)
    failures = sorted(status for status in statuses if status >= 500 and status not in (501, 503, 504))
    yield Row(
        number,
        f"`{what}`: {sent} requests from its document, every field at its bounds, alone and in pairs, four at a time: "
        "GET /health/live, the other key's gaps and first token",
        f"p99 {percentile(health_s, 0.99) * 1e3:.0f} ms; again when sent alone: {offenders}"
        + (f"; statuses {failures}" if failures else "")
        + (f"; not sent in time: {', '.join(unsent)}" if unsent else ""),
        "p99 under 50 ms; longest under 50 ms over an idle server's; gaps under 50 ms over those beside plain "
        "requests, first token at most 2x of those; no 5xx but 503 and 504; all sent",
        percentile(health_s, 0.99) < MAX_HEALTH_S and not offences and not failures and not unsent,
        {
            "statuses": dict(statuses),
            "offences": [{"group": name, "case": str(case), "what": words} for (name, case), words in offences.items()],
            "plain": _raw(plain),
            "seen": {name: _raw(one) for name, one in seen.items()},
        },
    )
    name, one = max(seen.items(), key=lambda item: item[1].memory.peak_mb)
    growth = one.memory.peak_mb - before_mb
    yield Row(
        number,
        "the same: memory",
        f"+{growth:.0f} MB, most with: {name}",
        f"+{MAX_GROWTH_MB:.0f} MB",
        growth <= MAX_GROWTH_MB,
        {"before_mb": before_mb, "peaks_mb": {name: one.memory.peak_mb for name, one in seen.items()}},
    )
    name, one = max(seen.items(), key=lambda item: item[1].first_s)
    yield Row(
        number,
        "the same: the other key's first token, median of each route's requests",
        f"{one.first_s * 1e3:.0f} ms, most with: {name}; beside plain requests {plain.first_s * 1e3:.0f} ms "
        f"({one.first_s / plain.first_s:.1f}x)",
        f"at most {MAX_FIRST:g}x",
        one.first_s <= MAX_FIRST * plain.first_s,
    )


def _singles(requests: Requests, routes: Sequence[str]) -> list[Case]:
    return [case for route in routes for case in requests.singles(route)]


def _times(count: int, cases: Iterator[Case] | Sequence[Case]) -> list[Case]:
    """Each so often in a row, so that those in flight are the same."""
    return [case for case in cases for _ in range(count)]


def _words(one: Seen) -> str:
    gaps = f"gap p99 {one.gap_s * 1e3:.0f} ms, longest {one.longest_gap_s * 1e3:.0f} ms"
    memory = f"{one.memory.before_mb:.0f} to {one.memory.peak_mb:.0f} MB"
    return f"health {one.health}, idle {one.idle}, {gaps}, first {one.first_s * 1e3:.0f} ms, {memory}"


def _raw(one: Seen) -> dict[str, Any]:
    return {
        "num_sent": len(one.sent),
        "p99_ms": one.health.high * 1e3,
        "max_ms": one.health.worst * 1e3,
        "idle_max_ms": one.idle.worst * 1e3,
        "gap_p99_ms": one.gap_s * 1e3,
        "gap_max_ms": one.longest_gap_s * 1e3,
        "first_token_ms": one.first_s * 1e3,
        "peak_mb": one.memory.peak_mb,
    }


@contextmanager
def _newcomers(place: Place) -> Iterator[list[tuple[float, float]]]:
    """Texts of the other key that begin all the while: (began, seconds to the first token)."""
    found: list[tuple[float, float]] = []
    is_over = threading.Event()

    def ask_again() -> None:
        number = 1000
        while not is_over.wait(NEWCOMERS_EVERY_S):
            number += 1
            began_s = time.perf_counter()
            took_s = first_token_s(place.server.port, place.text(number), CAP_S, key=OTHER, path=place.path)
            found.append((began_s, CAP_S if took_s is None else took_s))

    thread = threading.Thread(target=ask_again, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def _watched(place: Place, cases: list[Case], key: str | None, timeout_s: float, limit_s: float) -> Seen:
    """Sends the cases, four at a time, for at most `limit_s`, and looks what others notice."""
    bodies = [place.text(number) for number in range(NUM_TEXTS)]
    with (
        crowd_of(place.server.port, bodies, key=OTHER, path=place.path, keeps=True) as crowd,
        memory_of(place.server) as memory,
        health_of(place.server) as health,
        health_of(place.idle) as idle,
        _newcomers(place) as firsts,
    ):
        if not crowd.wait(lambda: crowd.num_running() >= NUM_TEXTS, 30.0):
            raise NotMeasured("the other key's texts did not run within 30 s")
        seen = Seen(health, idle, memory, firsts=firsts)
        with attacking(sweep, place.server.port, place.requests, cases, key, timeout_s) as reports:
            began_s = time.perf_counter()
            deadline_s = began_s + limit_s
            while (left_s := deadline_s - time.perf_counter()) > 0.0 and reports.poll(left_s):
                if (report := reports.recv()) is None:
                    break
                index, start_s, end_s, status = report
                seen.sent.append(Sent(cases[index], start_s, end_s, status))
        seen.gaps = [gap for gap in crowd.gaps() if gap[1] > began_s]
    return seen


def _suspects(one: Seen, plain: Seen, before_mb: float) -> list[Case]:
    """The requests that were in flight when others had to wait: the most suspicious of each kind first."""
    max_gap_s = plain.longest_gap_s + MAX_HEALTH_S
    max_first_s = MAX_FIRST * max(took for _, took in plain.firsts)
    stalls = [(began, ended, excess) for began, ended, excess in one.stalls() if excess > MAX_HEALTH_S]
    gaps = [(began, ended, ended - began) for began, ended in one.gaps if ended - began > max_gap_s]
    firsts = [(began, began + took, took) for began, took in one.firsts if took > max_first_s]
    large = [(at - 0.5, at, 1.0) for at, mb in one.memory.samples if mb > before_mb + MAX_GROWTH_MB][:1]
    found: dict[Case, None] = {}
    for incidents in (stalls, gaps, firsts, large):
        scores: Counter[Case] = Counter()
        for began_s, ended_s, excess_s in sorted(incidents, key=lambda each: -each[2])[:50]:
            cases = one.during(began_s, ended_s)
            for case in cases:
                scores[case] += excess_s / len(cases)  # type: ignore[assignment]  # a score
        found |= dict.fromkeys(case for case, _ in scores.most_common(_NUM_SUSPECTS))
    return list(found)


def _confirmed(place: Place, case: Case, key: str | None) -> str:
    """What happens each time that this request alone is sent, four at a time, and not beside plain requests that are
    sent in between; nothing where nobody notices.
    """
    words: dict[str, str] = {}
    for number in range(2):
        place.server.wait_until_awake()
        again = _watched(place, [case] * 10_000, key, _SINGLE_S, _CONFIRM_S)
        plain = _watched(place, [place.plain] * 10_000, ATTACKER, _SINGLE_S, _CONFIRM_S)
        found = _offences(again, plain)
        words = {kind: each for kind, each in found.items() if not number or kind in words}
        if not words:
            return ""
    return ", ".join(words.values())


def _offences(one: Seen, plain: Seen) -> dict[str, str]:
    """What others noticed, by its kind, beyond what they notice of plain requests."""
    found = {}
    if (stall_s := one.stall_s()) > MAX_HEALTH_S + plain.stall_s():
        found["health"] = f"health {stall_s * 1e3:.0f} ms late"
    if (gap_s := one.longest_gap_s) > MAX_HEALTH_S + plain.longest_gap_s:
        found["gap"] = f"a gap of {gap_s * 1e3:.0f} ms"
    if one.first_s > MAX_FIRST * plain.first_s:
        found["first"] = f"first token {one.first_s * 1e3:.0f} ms"
    if one.memory.growth_mb > MAX_GROWTH_MB:
        found["memory"] = f"+{one.memory.growth_mb:.0f} MB"
    return found
