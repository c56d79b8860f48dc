"""Attacks by requests that are made from the OpenAPI document: every route, and every field at its bounds, alone and in
pairs, four at a time, with a key and without; and measures what another key notices.

Which request was it? Every incident, such as a late answer for health, is laid to the requests that were in flight. The
most suspicious are sent again, first together, then each alone, and only what happens again each time counts: on a busy
machine most does not.

Pairs are too many to send all. Of those of which neither value was refused alone, a choice is sent that is the same in
every run; of the others, which end early for the same reason most often, a smaller one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from bench.attacks.attackers import attacking, repeat
from bench.attacks.bodies import SIZE, TEMPLATE
from bench.attacks.bounds import Case, Field, Requests
from bench.attacks.local import GENERATE, endpoint_and_idle, text_body
from bench.attacks.noticed import ATTACKER, CAP_S, NUM_TEXTS, Place, Seen, watched
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S
from bench.attacks.subject import KEYS, Row, Server, Subject, percentile, prompt_of
from bench.changed_bundle import change_bundle

MAX_FIRST: Final = 2.0
"""The other key's first token: over that beside as many plain requests."""
_SINGLE_S: Final = 3.0
_PAIR_S: Final = 2.0
"""For an answer; then the client goes."""
_PLAIN: Final = Case("POST /v1/completions")
_PLAIN_S: Final = 6.0
_CONFIRM_S: Final = 2.5
_ROUTE_S: Final = 120.0
"""For all of a group; what is left then is not sent, and the row says so."""
_NUM_PAIRS: Final = 250
"""Of a route, if neither value was refused alone."""
_NUM_REFUSED_PAIRS: Final = 50
_WRONG: Final = (400, 404, 409, 413, 422)
_NUM_SUSPECTS: Final = 3
"""Of a kind of incident and a group, sent again."""


@dataclass(slots=True)
class Group:
    """Requests that were sent together. first_ratio: the other key's first token, in times of that beside plain
    requests; the smaller of two where the first was too large. offences: those that others noticed each time, and what.
    """

    name: str
    cases: list[Case]
    seen: Seen
    first_ratio: float
    offences: dict[Case, str] = field(default_factory=dict)

    def refused(self) -> set[tuple[Field, int]]:
        """Values for which a request is wrong, each time: not too much, and not too late."""
        refused = Counter(one.case.values for one in self.seen.sent if one.status in _WRONG)
        sent = Counter(one.case.values for one in self.seen.sent)
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
        groups.append(_sent(place, plain, before_mb, name, [case for case in cases for _ in range(times)], key))
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


def _sent(place: Place, plain: Seen, before_mb: float, name: str, cases: list[Case], key: str | None) -> Group:
    """Sends a group, and whom others noticed again: together, then each alone."""
    place.server.wait_until_awake()
    began_s = time.perf_counter()
    timeout_s = _PAIR_S if len(cases[0].values) > 1 else _SINGLE_S
    seen = watched(place, cases, key, timeout_s, _ROUTE_S)
    group = Group(name, cases, seen, seen.first_s / plain.first_s)
    if group.first_ratio > MAX_FIRST:
        again = watched(place, cases, key, timeout_s, _PLAIN_S)
        beside = watched(place, [place.plain] * 100_000, ATTACKER, _SINGLE_S, _PLAIN_S / 2)
        group.first_ratio = min(group.first_ratio, again.first_s / beside.first_s)
    suspects = _suspects(seen, plain, before_mb)
    if suspects:
        again = watched(place, [case for case in suspects for _ in range(8)], key, timeout_s, _ROUTE_S)
        suspects = [case for case in _suspects(again, plain, before_mb) if case in suspects]
    for case in suspects:
        if words := _confirmed(place, case, key, seen.longest_s(case)):
            group.offences[case] = words
    print(f"  {name}: {len(seen.sent)} of {len(cases)}, {seen}, {time.perf_counter() - began_s:.0f} s", flush=True)
    for case, words in group.offences.items():
        print(f"    {case}: {words}", flush=True)
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
    sent_pairs = len({each.case for one in everything for each in one.sent if len(each.case.values) > 1})
    unsent = [f"{each.name}: {left}" for each in groups if (left := len(each.cases) - len(each.seen.sent))]
    offences = [(group.name, case, words) for group in groups for case, words in group.offences.items()]
    health_s = [value for one in everything for value in one.health.values]
    offenders = "; ".join(f"{case}: {words}" for _, case, words in offences) or "none"
    posts = {name: {each.status // 100 for each in one.sent} for name, one in seen.items() if name.startswith("POST")}
    refused = [name for name, kinds in posts.items() if kinds == {4}]
    statuses = Counter(one.status for each in everything for one in each.sent)
    failures = sorted(status for status in statuses if status >= 500 and status not in (501, 503, 504))
    yield Row(
        number,
        f"`{what}`: {sent} requests from its document, every field at its bounds, alone and in {sent_pairs} of "
        f"{num_pairs} pairs, four at a time: GET /health/live, the other key's gaps and first token",
        f"p99 {percentile(health_s, 0.99) * 1e3:.0f} ms; again when sent alone: {offenders}"
        + (f"; statuses {failures}" if failures else "")
        + (f"; refused whatever they had: {', '.join(refused)}" if refused else "")
        + (f"; not sent in time: {', '.join(unsent)}" if unsent else ""),
        "p99 under 50 ms; longest under 50 ms over an idle server's; gaps under 50 ms over those beside plain "
        "requests, first token at most 2x of those; no 5xx but 503 and 504; all sent",
        percentile(health_s, 0.99) < MAX_HEALTH_S and not offences and not failures and not unsent,
        {
            "statuses": dict(statuses),
            "offences": [{"group": name, "case": str(case), "what": words} for name, case, words in offences],
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
        "the same: the other key's first token, median of each group, and of it again",
        f"{worst.first_ratio:.1f}x of that beside plain requests, {plain.first_s * 1e3:.0f} ms; most: {worst.name}",
        f"at most {MAX_FIRST:g}x",
        worst.first_ratio <= MAX_FIRST,
    )


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


def _confirmed(place: Place, case: Case, key: str | None, took_s: float) -> str:
    """What happens each time that this request alone is sent, four at a time, and not beside plain requests that are
    sent in between; nothing where nobody notices. took_s: for its answer.
    """
    limit_s = max(_CONFIRM_S, 2.5 * took_s)
    words: dict[str, str] = {}
    for number in range(2):
        place.server.wait_until_awake()
        again = watched(place, [case] * 10_000, key, _SINGLE_S, limit_s)
        plain = watched(place, [place.plain] * 10_000, ATTACKER, _SINGLE_S, _CONFIRM_S)
        found = _offences(again, plain)
        words = {kind: each for kind, each in found.items() if not number or kind in words}
        if not words:
            return ""
    return ", ".join(words.values())


def _offences(one: Seen, plain: Seen) -> dict[str, str]:
    """What others noticed, by its kind, beyond what they notice of plain requests."""
    found = {}
    if (stall_s := one.recurring_stall_s) > MAX_HEALTH_S + plain.recurring_stall_s:
        found["health"] = f"health {stall_s * 1e3:.0f} ms late"
    gap_s = one.recurring_gap_s if one.gaps else CAP_S
    if gap_s > MAX_HEALTH_S + plain.recurring_gap_s:
        found["gap"] = f"gaps of {gap_s * 1e3:.0f} ms"
    if one.first_s > MAX_FIRST * plain.first_s:
        found["first"] = f"first token {one.first_s * 1e3:.0f} ms"
    if one.memory.growth_mb > MAX_GROWTH_MB:
        found["memory"] = f"+{one.memory.growth_mb:.0f} MB"
    return found
