"""Attacks by what requests may ask for: large calls, every rule at its bound, the largest drafts with probabilities,
many choices with logprobs of each token; a cascade whose target stops; floods of drafts, and the
largest trees. That places, queues, priorities and the time of steps are shared, that what is kept of
a key is its own, and that wrong and late drafts cost others nothing, is said by tests.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, Final

import psutil
from bench.attacks.attackers import attacking, pipeline, received, repeat
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, beside, health_of, memory_of
from bench.attacks.subject import (
    COMPLETIONS,
    KEYS,
    Row,
    Server,
    Subject,
    middle,
    prompt_of,
    rates_of,
    seconds,
    slowed,
)
from bench.bare_http import OTHER_ADDRESS, Answer, NotMeasured, is_reached_in
from tests.hostile_bodies import BROKEN_TREES

from outrider.models.wire.tree_draft import CHANCES, MAX_MESSAGE_NODES, ROOT, TREE_MEDIA_TYPE, TreeDraft

CAP_S: Final = 30.0
STEP_MS: Final = 20.0
NUM_SESSIONS: Final = 31
LONG: Final = 300
ATTACK_S: Final = 8.0
WHOLE: Final = 1 << 16
MAX_COMMAS: Final = 240_000
"""Between the elements of a body, at most (`models.http.requests`)."""
NUM_CHOICES: Final = 128
NUM_TEXTS: Final = 32
STOPPED_S: Final = 5.0
_STOPS: Final = [f"{'a' * 998}{chr(ord('b') + index)}" for index in range(16)]
"""As many and as long as a request may have; a text of one letter nearly matches all of them all the time."""
WORST_RULES: Final[dict[str, Any]] = {
    "temperature": 0.8,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {str(token): 0.5 for token in range(1024)},
    "bad_words": [[1] * 31 + [token] for token in range(256)],
    "min_tokens": LONG,
    "allowed_token_ids": [1 + token % 4000 for token in range(8192)],
    "typical_p": 0.99,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.01,
}
"""Every rule at its bound; all bad words share their first 31 tokens, so that all are compared."""


def large_verify_calls(subject: Subject) -> Iterator[Row]:
    """Has six callers send 256 items each, in a loop; another owner verifies and completes meanwhile."""
    rng = random.Random(5)
    with subject.emulated(STEP_MS) as server:
        alone = [_small(server, i).took_s for i in range(10)]
        # Items of 48 tokens, none of which any cache holds.
        calls = [
            {"items": [{"prefix": [rng.randrange(1, 4000) for _ in range(48)]} for _ in range(256)]} for _ in range(24)
        ]
        requests = [server.request("POST", "/v1/verify", call) for call in calls]
        began_s, served, steps = time.perf_counter(), list[float](), _steps(server)
        with attacking(repeat, server.port, requests, 6, 120.0) as reports:
            time.sleep(0.5)
            while time.perf_counter() - began_s < 20.0:
                answer = _small(server, len(served))
                served.append(answer.took_s if answer.status == 200 else CAP_S)
            step_s = (time.perf_counter() - began_s) / max(1, _steps(server) - steps)
            statuses = set(received(reports))
    limit_s = 3.0 * median(alone) + max(step_s, STEP_MS / 1e3)
    yield Row(
        "5",
        "six callers of 256 items on /v1/verify in a loop: another owner's single verify or completion",
        f"median {seconds(median(served))}, longest {seconds(max(served))}, of {len(served)} in 20 s",
        f"3x alone ({seconds(median(alone))}) and a step: {seconds(limit_s)}",
        median(served) <= limit_s and statuses == {200},
        {"alone_s": alone, "took_s": served, "statuses": sorted(statuses)},
    )


def _small(server: Server, index: int) -> Answer:
    """The other owner's request: a verify and a completion in turn, of one token each."""
    prompt = prompt_of(10_000 + index + int(time.perf_counter() * 1e3))
    path, body = COMPLETIONS, {"prompt": prompt, "max_tokens": 1}
    if index % 2:
        path, body = "/v1/verify", {"items": [{"prefix": prompt}]}
    return server.ask("POST", path, body, timeout_s=CAP_S, address=OTHER_ADDRESS)


def _steps(server: Server) -> int:
    """Steps of the engine so far; 0 where /metrics does not count them."""
    return int(sum(server.metrics("outrider_engine_steps_total")))


def heavy_rules(subject: Subject) -> Iterator[Row]:
    """Has 31 sessions with as many rules as a request may have; another client's text of 40 tokens beside them."""
    took: dict[str, list[float | None]] = {"none": [], "worst": []}
    asked = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with subject.emulated(step_ms=10.0) as server:
        before_mb, peaks_mb = server.memory_mb(), list[float]()
        for kind, rules in (("none", {"temperature": 0.8}), ("worst", WORST_RULES)) * 3:
            server.wait_until_idle()
            common = {"max_tokens": LONG, "ignore_eos": True, "patience_ms": 0}
            bodies = [{"prompt": prompt_of(i), **common, **rules} for i in range(NUM_SESSIONS)]
            with memory_of(server) as memory, server.crowd(bodies, keeps=True) as crowd:
                crowd.require_running(NUM_SESSIONS - 1)
                # A new prompt each time: a repeated one is drafted from its earlier text.
                body = {"prompt": prompt_of(100 + len(peaks_mb)), **asked}
                answer = server.ask("POST", COMPLETIONS, body, address=OTHER_ADDRESS, timeout_s=CAP_S)
                took[kind].append(answer.took_s if answer.status == 200 else None)
            peaks_mb.append(memory.peak_mb)
    plain, worst = (middle(took[kind], CAP_S) for kind in ("none", "worst"))
    growth, plain_growth = max(peaks_mb) - before_mb, peaks_mb[0] - before_mb
    yield Row(
        "38",
        f"{NUM_SESSIONS} sessions with every rule at its bound, steps of 10 ms: another client's text of 40 tokens",
        f"{seconds(worst)}; beside {NUM_SESSIONS} sessions without rules {seconds(plain)}; +{growth:.0f} MB, "
        f"the first sessions without rules +{plain_growth:.0f} MB",
        f"at most 2x; +{MAX_GROWTH_MB:.0f} MB",
        worst < CAP_S and worst <= 2.0 * plain and growth <= MAX_GROWTH_MB,
        {"took_s": took, "growth_mb": growth, "plain_growth_mb": plain_growth},
    )


def largest_items() -> bytes:
    """A body of drafts of 64 tokens, each with a distribution over 16 ids: as many as a body may have elements for."""
    q = [number for token in range(1, 17) for number in (token, WHOLE - 15 if token == 1 else 1)]
    item: dict[str, Any] = {"prefix": [1, 2], "draft": [1] * 64, "draft_q": [q] * 64}
    item |= {"rule": "rejection", "temperature": 1.0}
    items = [item | {"seed": seed} for seed in range(MAX_COMMAS // (json.dumps(item).count(",") + 2))]
    return json.dumps({"items": items}, separators=(",", ":")).encode()


def largest_drafts(subject: Subject) -> Iterator[Row]:
    """Floods the server with the largest drafts that have probabilities, beside another's item."""
    if subject.verifier.is_vllm:
        raise NotMeasured("vLLM takes the rules coupled and greedy only")
    with subject.emulated(step_ms=10.0) as server:
        before, largest = _verified(server), largest_items()
        taken = server.ask("POST", "/v1/verify", largest)
        if taken.status != 200:
            raise NotMeasured(f"the largest items got {taken.status}: {taken.body[:200]!r}")
        requests = [server.request("POST", "/v1/verify", largest)]
        with (
            memory_of(server) as memory,
            health_of(server) as health,
            attacking(repeat, server.port, requests, 4, 60.0),
        ):
            time.sleep(ATTACK_S)
            during = _verified(server)
    yield Row(
        "41",
        f"the largest drafts with probabilities in /v1/verify, {ATTACK_S:g} s: another's token; health; memory",
        f"{'the same' if before == during else 'ANOTHER'}; {health}; +{memory.growth_mb:.0f} MB",
        f"the same; p99 under 50 ms; +{MAX_GROWTH_MB:.0f} MB",
        before == during and health.high < MAX_HEALTH_S and memory.is_small,
        {"p99_s": health.high, "growth_mb": memory.growth_mb},
    )


def _verified(server: Server) -> list[int]:
    """What another client's item gets."""
    item = {"prefix": prompt_of(7), "temperature": 0.8, "seed": 3}
    answer = server.ask("POST", "/v1/verify", {"items": [item]}, address=OTHER_ADDRESS)
    return list(answer.json["results"][0]["tokens"])


def many_choices(subject: Subject) -> Iterator[Row]:
    """Keeps 256 texts in work, in turn plain ones and choices with logprobs; another client has four sessions."""
    common: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 1.0}
    choices = common | {"prompt": prompt_of(3), "n": NUM_CHOICES, "logprobs": 20, "stop": _STOPS}
    health_s = {False: 0.0, True: 0.0}
    with subject.emulated(step_ms=10.0) as server:
        server.complete(choices | {"max_tokens": 1})

        @contextmanager
        def calling(is_attacked: bool) -> Iterator[None]:
            body, in_flight = (choices, 2) if is_attacked else (common | {"prompt": [prompt_of(3)] * 64}, 4)
            calls = [server.request("POST", COMPLETIONS, body)]
            with attacking(repeat, server.port, calls, in_flight, 60.0), health_of(server) as health:
                yield
            health_s[is_attacked] = max(health_s[is_attacked], health.high)

        rates = rates_of(server, calling, address=OTHER_ADDRESS)
    yield slowed(
        "40",
        f"two calls of {NUM_CHOICES} choices with 20 logprobs a token, or plain texts, step of 10 ms",
        rates,
        f"; health p99 {health_s[True] * 1e3:.0f} ms, {health_s[False] * 1e3:.0f} ms",
        most=2.0,
        limit="; p99 under 50 ms more",
        is_kept=health_s[True] - health_s[False] < MAX_HEALTH_S,
        health_p99_s=list(health_s.values()),
    )


def cascades(subject: Subject) -> Iterator[Row]:
    """A mid before a target, both of the reference bundle; the target stops in mid-text."""
    with subject.serve() as target, subject.serve("--upstream", target.url, keys=KEYS) as mid:
        # Sampled: a greedy text may repeat itself, is drafted from itself, and is over before the last has begun.
        texts: dict[str, Any] = {"max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
        bodies = [{"prompt": prompt_of(10 + i, 20), "seed": i, **texts} for i in range(NUM_TEXTS)]
        with mid.crowd(bodies, key=KEYS[0]) as crowd:
            crowd.require_running(NUM_TEXTS, 60.0)
            target.signal(signal.SIGSTOP)
            try:
                time.sleep(0.5)  # what was on its way has arrived
                before = crowd.num_commits()
                with health_of(mid) as health:
                    time.sleep(STOPPED_S)
                after = crowd.num_commits()
            finally:
                target.signal(signal.SIGCONT)
            resumed = is_reached_in(60.0, lambda: crowd.num_commits() > after)
    yield Row(
        "39",
        f"{NUM_TEXTS} texts whose target stops for {STOPPED_S:g} s: GET /health/live of the mid-size verifier, and "
        "what is committed",
        f"p99 {health.high * 1e3:.0f} ms; {after - before} commits meanwhile; goes on: {'yes' if resumed else 'no'}",
        f"under {MAX_HEALTH_S * 1e3:.0f} ms, 0 commits, goes on",
        health.high < MAX_HEALTH_S and after == before and resumed,
        {"p99_s": health.high, "commits": after - before, "resumed": resumed},
    )


MAX_MESSAGE_MS: Final = 10.0
WARM_UP_MESSAGES: Final = 10
NUM_MESSAGES: Final = 60
MESSAGES_PER_S: Final = 10.0
"""Of 512 nodes: within the budget of a session's drafts."""
SESSION: Final[dict[str, Any]] = {"max_tokens": 1900, "ignore_eos": True, "patience_ms": 0}


def draft_floods(subject: Subject) -> Iterator[Row]:
    """Floods one session with drafts over four connections: with the most that a message may have, with the largest
    trees, whose nodes have parents that were never sent, and with bodies that no encoder writes. That each is refused
    is said by tests.
    """
    largest = {"base": 0, "paths": [[(p * 64 + t) % 4000 + 1 for t in range(64)] for p in range(8)]}
    # Parents a million numbers back: no message has them.
    size, back = MAX_MESSAGE_NODES, 1_000_000
    firsts = range(2 * back, 2 * back + 8 * size, size)
    orphans = [tree(0, first, range(1, 1 + size), range(first - back, first - back + size)) for first in firsts]
    malformed = sorted((body for body, _ in BROKEN_TREES), key=len)
    with subject.emulated(step_ms=10.0) as server, subject.serve() as idle:
        yield _flooded(server, idle, "drafts", [json.dumps(largest).encode()] * 8)
        yield _flooded(server, idle, "nodes without parents", orphans, content_type=TREE_MEDIA_TYPE)
        yield _flooded(server, idle, f"{len(malformed)} malformed trees", malformed, content_type=TREE_MEDIA_TYPE)


def _flooded(server: Server, idle: Server, what: str, bodies: Sequence[bytes], **options: str) -> Row:
    """What four others and the server's health notice of the bodies, in turn with none."""

    @contextmanager
    def flooded(is_flooded: bool) -> Iterator[None]:
        with server.crowd([{"prompt": prompt_of(9), **SESSION}]) as crowd:
            path = f"/v1/sessions/{crowd.running().session}/drafts"
            block = b"".join(server.request("POST", path, body, **options) for body in bodies)
            with attacking(pipeline, server.port, block, 4, True) if is_flooded else nullcontext():
                yield

    server.wait_until_awake()
    with beside(server, idle) as seen:
        rates = rates_of(server, flooded)
    return slowed(
        "10",
        f"a flood of {what} to one session, step of 10 ms",
        rates,
        f"; {seen}",
        limit=f"; p99 under 50 ms, max under 50 ms more than the idle server's; +{MAX_GROWTH_MB:.0f} MB",
        is_kept=seen.is_prompt and seen.is_small,
    )


def large_trees(subject: Subject) -> Iterator[Row]:
    """Sends the deepest and the widest trees of 512 nodes, one message after the other, beside messages of one node."""
    rng, size = random.Random(2), MAX_MESSAGE_NODES
    shapes: dict[str, Callable[[int], Sequence[int]]] = {  # the parents, by the number of the first node
        "one node": lambda first: [ROOT],
        "a chain of 512": lambda first: [ROOT, *range(first, first + size - 1)],
        "a chain that each message goes on with": lambda first: range(first - 1, first + size - 1),  # -1: ROOT
        "512 children of one node": lambda first: [ROOT] * size,
    }
    cpu_ms: dict[str, float] = {}
    longest_s: dict[str, float] = {}
    with subject.emulated(step_ms=50.0) as server:
        for name, parents_of in shapes.items():
            server.wait_until_idle()
            with server.crowd([{"prompt": prompt_of(3), **SESSION}]) as crowd:
                stream, first, before_s = crowd.running(), 0, 0.0
                for index in range(WARM_UP_MESSAGES + NUM_MESSAGES):
                    if index == WARM_UP_MESSAGES:
                        before_s = _cpu_s(server)
                    parents = parents_of(first)
                    message = tree(len(stream.tokens), first, rng.sample(range(1, 4000), len(parents)), parents)
                    took_s = _post(server, f"/v1/sessions/{stream.session}/drafts", message)
                    first += len(parents)
                    time.sleep(max(0.0, 1.0 / MESSAGES_PER_S - took_s))
                cpu_ms[name] = 1e3 * (_cpu_s(server) - before_s) / NUM_MESSAGES
                longest_s[name] = max((after - before for before, after in crowd.gaps()), default=0.0)
    slowest = max(list(shapes)[1:], key=lambda name: cpu_ms[name])
    extra_ms = cpu_ms[slowest] - cpu_ms["one node"]
    yield Row(
        "18",
        f"the deepest and the widest trees of {size} nodes: the server's CPU per message, over one of one node",
        f"{extra_ms:+.1f} ms to {cpu_ms['one node']:.1f}, most with: {slowest}; longest step "
        f"{longest_s[slowest] * 1e3:.0f} ms of 50",
        f"{MAX_MESSAGE_MS:g} ms",
        extra_ms <= MAX_MESSAGE_MS,
        {"cpu_ms": cpu_ms, "longest_step_s": longest_s},
    )


def _post(server: Server, path: str, body: bytes) -> float:
    """Posts a tree; returns the seconds that it took. Raises NotMeasured where it is not taken."""
    answer = server.ask("POST", path, body, headers={"Content-Type": TREE_MEDIA_TYPE})
    if answer.status != 204:
        raise NotMeasured(f"the server takes no trees: status {answer.status}: {answer.body[:200]!r}")
    return answer.took_s


def _cpu_s(server: Server) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def tree(base: int, first: int, tokens: Sequence[int], parents: Sequence[int]) -> bytes:
    """A message of sure nodes."""
    return TreeDraft(base, first, tokens, parents, [len(CHANCES) - 1] * len(tokens)).encode()
