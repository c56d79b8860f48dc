"""Attacks by what one request may ask for: every rule at its bound, the largest drafts with probabilities, many choices
with logprobs of each token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.attacks.attackers import attacking, repeat
from bench.attacks.exchange import OTHER_ADDRESS, NotMeasured, ask
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, health_of, memory_of
from bench.attacks.subject import COMPLETIONS, VLLM, Row, Subject, middle, prompt_of, rates_of, seconds, slowed

CAP_S: Final = 30.0
NUM_SESSIONS: Final = 31
LONG: Final = 300
ATTACK_S: Final = 8.0
WHOLE: Final = 1 << 16
MAX_COMMAS: Final = 240_000
"""Between the elements of a body, at most (`models.http.requests`)."""
ITEM: Final[dict[str, Any]] = {"prefix": [1, 2], "draft": [1], "rule": "rejection", "temperature": 1.0}
NUM_CHOICES: Final = 128
_STOPS: Final = [f"{'a' * 998}{chr(ord('b') + index)}" for index in range(16)]
"""As many and as long as a request may have; a text of one letter nearly matches all of them all the time."""


def worst_rules() -> dict[str, Any]:
    """Every rule at its bound; all bad words share their first 31 tokens, so that all are compared."""
    return {
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


def heavy_rules(subject: Subject) -> Iterator[Row]:
    """Has 31 sessions with as many rules as a request may have; another client's text of 40 tokens beside them."""
    took: dict[str, list[float | None]] = {"none": [], "worst": []}
    with subject.emulated(step_ms=10.0) as server:
        asked = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
        before_mb, peaks_mb = server.memory_mb(), list[float]()
        for _ in range(3):
            for kind, rules in (("none", {"temperature": 0.8}), ("worst", worst_rules())):
                server.wait_until_idle()
                common = {"max_tokens": LONG, "ignore_eos": True, "patience_ms": 0}
                bodies = [{"prompt": prompt_of(i), **common, **rules} for i in range(NUM_SESSIONS)]
                with memory_of(server) as memory, server.crowd(bodies, keeps=True) as crowd:
                    crowd.require("few sessions ran", lambda: crowd.num_running() >= NUM_SESSIONS - 1, CAP_S)
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
    item = ITEM | {"draft": [1] * 64, "draft_q": [q] * 64}
    items = [item | {"seed": seed} for seed in range(MAX_COMMAS // (json.dumps(item).count(",") + 2))]
    return json.dumps({"items": items}, separators=(",", ":")).encode()


def largest_drafts(subject: Subject) -> Iterator[Row]:
    """Floods the server with the largest drafts that have probabilities, beside another's item."""
    if subject.engine == VLLM:
        raise NotMeasured("vLLM takes the rules coupled and greedy only")
    with subject.emulated(step_ms=10.0) as server:
        before = _verified(server.port)
        largest = largest_items()
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
            during = _verified(server.port)
    yield Row(
        "41",
        f"the largest drafts with probabilities in /v1/verify, {ATTACK_S:g} s: another's token; health; memory",
        f"{'the same' if before == during else 'ANOTHER'}; {health}; +{memory.growth_mb:.0f} MB",
        f"the same; p99 under 50 ms; +{MAX_GROWTH_MB:.0f} MB",
        before == during and health.high < MAX_HEALTH_S and memory.is_small,
        {"p99_s": health.high, "growth_mb": memory.growth_mb},
    )


def many_choices(subject: Subject) -> Iterator[Row]:
    """Keeps 256 texts in work, in turn plain ones and choices with logprobs; another client has four sessions."""
    common: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 1.0}
    choices = common | {"prompt": prompt_of(3), "n": NUM_CHOICES, "logprobs": 20, "stop": _STOPS}
    bodies = {False: common | {"prompt": [prompt_of(3)] * 64}, True: choices}
    health_s = {False: 0.0, True: 0.0}
    with subject.emulated(step_ms=10.0) as server:
        server.complete(choices | {"max_tokens": 1})

        @contextmanager
        def calling(is_attacked: bool) -> Iterator[None]:
            calls = [server.request("POST", COMPLETIONS, bodies[is_attacked])]
            in_flight = 2 if is_attacked else 4
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


def _verified(port: int) -> list[int]:
    """What another client's item gets."""
    item = {"prefix": prompt_of(7), "temperature": 0.8, "seed": 3}
    answer = ask(port, "POST", "/v1/verify", {"items": [item]}, address=OTHER_ADDRESS)
    found: list[int] = json.loads(answer.body)["results"][0]["tokens"]
    return found
