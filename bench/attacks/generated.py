"""Attacks by requests that are made from the OpenAPI document: every route, and every field at its bounds, alone and in
pairs, four at a time, with a key and without; and measures what another key notices.

Pairs are too many to send all. Of those of which neither value was refused alone, a choice is sent that is the same in
every run; of the others, which end early for the same reason most often, a smaller one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.attacks.attackers import attacking, repeat, sweep
from bench.attacks.bodies import SIZE, TEMPLATE
from bench.attacks.bounds import Case, Field, Requests
from bench.attacks.local import GENERATE, endpoint_and_idle, text_body
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, Latency, Memory, beside, repeatedly
from bench.attacks.subject import KEYS, Row, Server, Subject, prompt_of
from bench.changed_bundle import change_bundle

ATTACKER, OTHER = KEYS
NUM_TEXTS: Final = 2
"""Of the other key, all the while."""
NEWCOMERS_EVERY_S: Final = 0.2
CAP_S: Final = 10.0
MAX_FIRST: Final = 2.0
"""The other key's first token: over that beside as many plain requests."""
_SINGLE_S: Final = 3.0
_PAIR_S: Final = 2.0
"""For an answer; then the client goes."""
_PLAIN: Final = Case("POST /v1/completions")
_PLAIN_S: Final = 6.0
_ROUTE_S: Final = 120.0
"""For all of a group; what is left then is not sent, and the row says so."""
_NUM_PAIRS: Final = 250
"""Of a route, if neither value was refused alone."""
_NUM_REFUSED_PAIRS: Final = 50
_WRONG: Final = (400, 404, 409, 413, 422)


@dataclass(frozen=True, slots=True)
class Place:
    """What is attacked. plain: a small request. text: the body of the other key's text with this number, for `path`."""

    server: Server
    idle: Server
    requests: Requests
    plain: Case
    path: str
    text: Callable[[int], dict[str, Any]]


@dataclass(slots=True)
class Seen:
    """What was sent, and what others noticed meanwhile. gap_s: the longest of the other key's texts, from one
    commit to the next. firsts: seconds to the first token of its newcomers. sent: each with its status.
    """

    health: Latency
    idle: Latency
    memory: Memory
    sent: list[tuple[Case, int]] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gap_s: float = CAP_S

    @property
    def first_s(self) -> float:
        """The newcomers' median."""
        return median(self.firsts) if self.firsts else CAP_S

    def __str__(self) -> str:
        gaps = f"longest gap {self.gap_s * 1e3:.0f} ms"
        memory = f"{self.memory.before_mb:.0f} to {self.memory.peak_mb:.0f} MB"
        return f"health {self.health}, idle {self.idle}, {gaps}, first {self.first_s * 1e3:.0f} ms, {memory}"


def watched(place: Place, cases: list[Case], key: str | None, timeout_s: float, limit_s: float) -> Seen:
    """Sends the cases, four at a time, for at most `limit_s`, and looks what others notice."""
    numbers, firsts = count(1000), list[float]()

    def newcomer() -> None:
        took_s = place.server.first_token_s(place.text(next(numbers)), CAP_S, key=OTHER, path=place.path)
        firsts.append(CAP_S if took_s is None else took_s)

    bodies = [place.text(number) for number in range(NUM_TEXTS)]
    with (
        place.server.crowd(bodies, key=OTHER, path=place.path, keeps=True) as crowd,
        beside(place.server, place.idle) as costs,
        repeatedly(newcomer, NEWCOMERS_EVERY_S),
    ):
        crowd.require_running(NUM_TEXTS)
        seen = Seen(costs.health, costs.idle, costs.memory, firsts=firsts)
        with attacking(sweep, place.server.port, place.requests, cases, key, timeout_s) as reports:
            began_s = time.perf_counter()
            deadline_s = began_s + limit_s
            while (left_s := deadline_s - time.perf_counter()) > 0.0 and reports.poll(left_s):
                if (report := reports.recv()) is None:
                    break
                index, status = report
                seen.sent.append((cases[index], status))
        # A text that stands still to the end has one more.
        open_gaps = [
            (stream.commits[-1][0], time.perf_counter())
            for stream in crowd.streams
            if stream.commits and not stream.is_over
        ]
        gaps = (after - before for before, after in (*crowd.gaps(), *open_gaps) if after > began_s)
        seen.gap_s = max(gaps, default=CAP_S)
    return seen


@dataclass(slots=True)
class Group:
    """Requests that were sent together. health_s: p99. first_ratio: the other key's first token, in times of that
    beside plain requests. more_gap_s: its longest gap, beyond the longest there. Each is the smaller of two where one
    was too large: any process of the machine delays others once.
    """

    name: str
    cases: list[Case]
    seen: Seen
    health_s: float
    first_ratio: float
    more_gap_s: float

    def refused(self) -> set[tuple[Field, int]]:
        """Values for which a request is wrong, each time: not too much, and not too late."""
        refused = Counter(case.values for case, status in self.seen.sent if status in _WRONG)
        sent = Counter(case.values for case, _ in self.seen.sent)
        return {values[0] for values, count in refused.items() if values and count == sent[values]}


def generated_requests(subject: Subject) -> Iterator[Row]:
    """Sends the verifier every field of every route at its bounds, with a key and without."""
    # Here: attackers' processes import this module, and not the whole product.
    from bench.attacks.described import verifier_document

    # Of a small cache the other key's texts need less than half: beyond it they would give way, as they should.
    small = () if subject.verifier.is_vllm else ("--kv-cache-mb", "64")
    with tempfile.TemporaryDirectory() as place:
        target = _with_template(subject.bundles[0], place)
        shutil.copytree(subject.bundles[1], Path(place, "drafts", "draft"))
        options = (*small, "--drafts", str(Path(place, "drafts")))
        with subject.serve(*options, keys=KEYS, bundle=target) as server, subject.serve(keys=KEYS) as idle:
            facts = server.ask("GET", "/v1/model", key=ATTACKER).json
            names = {"model": facts["name"], "name": "draft", "path": "tokenizer.json"}
            requests = _requests(verifier_document(), facts, names)

            def text(number: int) -> dict[str, Any]:
                return {"prompt": prompt_of(number), "max_tokens": facts["max_positions"] // 4, "ignore_eos": True}

            warm = _warm_texts(facts["max_positions"])
            _warm_up(server, "/v1/sessions", [*warm, *(text(number) for number in range(64))])
            yield from _rows("50", "outrider-cloud serve", Place(server, idle, requests, _PLAIN, "/v1/sessions", text))


def generated_local(subject: Subject) -> Iterator[Row]:
    """The same for `outrider serve`."""
    from bench.attacks.described import local_document

    from outrider.models.bundle.bundle import Bundle

    with ExitStack() as stack:
        target, draft = (
            _with_template(bundle, stack.enter_context(tempfile.TemporaryDirectory())) for bundle in subject.bundles
        )
        endpoint, idle = stack.enter_context(endpoint_and_idle(subject, draft=draft, target=target))
        card = endpoint.ask("GET", "/v1/models", key=ATTACKER).json["data"][0]
        facts = {"max_positions": card["max_model_len"], "vocab_size": Bundle.open(target).tokenizer().size}
        requests = _requests(local_document(), facts, {"model": card["id"]})
        _warm_up(endpoint, "/v1/completions", _warm_texts(facts["max_positions"]))
        yield from _rows("51", "outrider serve", Place(endpoint, idle, requests, _PLAIN, GENERATE, text_body))


def _with_template(bundle: Path, place: str) -> Path:
    change_bundle(bundle, Path(place, "changed"), template=TEMPLATE)
    return Path(place, "changed")


def _requests(document: dict[str, Any], facts: dict[str, Any], names: dict[str, str]) -> Requests:
    context = facts["max_positions"] - 2 * NUM_TEXTS - 16
    return Requests(document, room=SIZE - 4096, context=context, vocab_size=facts["vocab_size"], names=names)


def _warm_texts(max_positions: int) -> list[dict[str, Any]]:
    """Prompts of many lengths, in no order: a runtime keeps something for each number of tokens that it meets, 65 MB in
    all. Then as many long texts at once as fill the KV cache, whose pages are the system's until they are written.
    """
    lengths = [2 + number * (max_positions - 64) // 160 for number in range(160)]
    random.Random(0).shuffle(lengths)
    half, quarter = max_positions // 2, max_positions // 4
    return [
        *({"prompt": prompt_of(length, length), "max_tokens": 16} for length in lengths),
        *({"prompt": prompt_of(n, half), "max_tokens": quarter, "ignore_eos": True} for n in range(32)),
    ]


def _warm_up(server: Server, path: str, texts: Sequence[dict[str, Any]]) -> None:
    """Long texts in every place: memory that any use takes is not the attack's."""
    requests = [server.request("POST", path, text, key) for text, key in zip(texts, cycle(KEYS))]
    with attacking(repeat, server.port, requests, 16, 30.0) as reports:
        for _ in texts:
            reports.recv()
    server.wait_until_idle()  # the last are cut: until that is noticed, others' texts may be refused


def _rows(number: str, what: str, place: Place) -> Iterator[Row]:
    requests = place.requests
    routes = requests.routes
    with_body = [route for route in routes if next(iter(requests.singles(route))).values or route.startswith("POST")]
    others = [case for route in routes if route not in with_body for case in requests.singles(route)]
    for _ in range(3):  # what a runtime keeps for the steps that it meets has its size by then
        plain = watched(place, [place.plain] * 100_000, ATTACKER, _SINGLE_S, _PLAIN_S)
    before_mb = place.server.memory_mb()
    groups: list[Group] = []

    def send(name: str, cases: Sequence[Case], key: str | None = ATTACKER, *, times: int = 1) -> Group:
        # Each so often in a row, so that those in flight are the same.
        groups.append(_sent(place, plain, name, [case for case in cases for _ in range(times)], key))
        return groups[-1]

    send("routes without a body", others, times=50)
    num_pairs = 0
    for route in with_body:
        # A field's largest value so often that all in flight are the same.
        often = ((1 if any(number for _, number in case.values) else 4, case) for case in requests.singles(route))
        alone = send(route, [case for count, case in often for _ in range(count)])
        pairs = list(requests.pairs(route))
        num_pairs += len(pairs)
        if pairs:
            send(f"{route}, in pairs", _chosen(pairs, alone.refused()))
    send("without a key", [next(requests.singles(route)) for route in routes], None, times=20)
    largest = [max(requests.singles(route), key=requests.size) for route in with_body]
    send("without a key, large", largest, None, times=4)
    yield from _judged(number, what, plain, groups, before_mb, num_pairs)


def _sent(place: Place, plain: Seen, name: str, cases: list[Case], key: str | None) -> Group:
    """Sends a group; where others waited too long, once more, and plain requests."""
    place.server.wait_until_awake()
    began_s = time.perf_counter()
    timeout_s = _PAIR_S if len(cases[0].values) > 1 else _SINGLE_S
    seen = watched(place, cases, key, timeout_s, _ROUTE_S)
    group = Group(name, cases, seen, seen.health.high, seen.first_s / plain.first_s, seen.gap_s - plain.gap_s)
    if max(group.health_s, group.more_gap_s) > MAX_HEALTH_S or group.first_ratio > MAX_FIRST:
        again = watched(place, cases, key, timeout_s, _ROUTE_S)
        beside = watched(place, [place.plain] * 100_000, ATTACKER, _SINGLE_S, _PLAIN_S)
        group.health_s = min(group.health_s, again.health.high)
        group.first_ratio = min(group.first_ratio, again.first_s / beside.first_s)
        group.more_gap_s = min(group.more_gap_s, again.gap_s - beside.gap_s)
    print(f"  {name}: {len(seen.sent)} of {len(cases)}, {seen}, {time.perf_counter() - began_s:.0f} s", flush=True)
    return group


def _chosen(pairs: list[Case], refused: set[tuple[Field, int]]) -> list[Case]:
    """Those to send, in their order; the same in every run."""
    alive = [case for case in pairs if not refused & set(case.values)]
    others = [case for case in pairs if refused & set(case.values)]
    choice = random.Random(len(pairs))
    chosen = {
        *choice.sample(alive, min(_NUM_PAIRS, len(alive))),
        *choice.sample(others, min(_NUM_REFUSED_PAIRS, len(others))),
    }
    return [case for case in pairs if case in chosen]


def _judged(
    number: str, what: str, plain: Seen, groups: list[Group], before_mb: float, num_pairs: int
) -> Iterator[Row]:
    seen = {group.name: group.seen for group in groups}
    everything = list(seen.values())
    sent = sum(len(one.sent) for one in everything)
    sent_pairs = len({case for one in everything for case, _ in one.sent if len(case.values) > 1})
    unsent = [f"{each.name}: {left}" for each in groups if (left := len(each.cases) - len(each.seen.sent))]
    slowest = max(groups, key=lambda group: group.health_s)
    posts = {name: {status // 100 for _, status in one.sent} for name, one in seen.items() if name.startswith("POST")}
    refused = [name for name, kinds in posts.items() if kinds == {4}]
    statuses = Counter(status for one in everything for _, status in one.sent)
    failures = sorted(status for status in statuses if status >= 500 and status not in (501, 503, 504))
    yield Row(
        number,
        f"`{what}`: {sent} requests from its document, every field at its bounds, alone and in {sent_pairs} of "
        f"{num_pairs} pairs, four at a time: GET /health/live, of each group, and of it again",
        f"p99 {slowest.health_s * 1e3:.0f} ms, most with: {slowest.name}"
        + (f"; statuses {failures}" if failures else "")
        + (f"; refused whatever they had: {', '.join(refused)}" if refused else "")
        + (f"; not sent in time: {', '.join(unsent)}" if unsent else ""),
        "p99 under 50 ms; no 5xx but 501, 503 and 504; all sent",
        slowest.health_s < MAX_HEALTH_S and not failures and not unsent,
        {
            "statuses": dict(statuses),
            "plain": str(plain),
            "seen": {name: str(one) for name, one in seen.items()},
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
    worst = max(groups, key=lambda group: group.first_ratio)
    yield Row(
        number,
        "the same: the other key's first token, median of each group",
        f"{worst.first_ratio:.1f}x of that beside plain requests, {plain.first_s * 1e3:.0f} ms; most: {worst.name}",
        f"at most {MAX_FIRST:g}x",
        worst.first_ratio <= MAX_FIRST,
    )
    longest = max(groups, key=lambda group: group.more_gap_s)
    yield Row(
        number,
        "the same: the other key's longest gap, of each group",
        f"{longest.more_gap_s * 1e3:+.0f} ms to {plain.gap_s * 1e3:.0f} ms beside plain requests; most: {longest.name}",
        f"+{MAX_HEALTH_S * 1e3:.0f} ms",
        longest.more_gap_s <= MAX_HEALTH_S,
    )
