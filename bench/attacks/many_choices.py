"""Attacks by what one completion may ask for: many choices, logprobs of each token, stop strings that nearly match."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

from bench.attacks.attackers import attacking, repeat
from bench.attacks.crowd import crowd_of, prompt_of
from bench.attacks.exchange import OTHER_ADDRESS, ask, request_bytes
from bench.attacks.probes import health_of
from bench.attacks.rows import Row
from bench.attacks.subject import NotMeasured, Server, Subject

NUM_CHOICES: Final = 128
MEASURE_S: Final = 5.0
MAX_HEALTH_S: Final = 0.05
_STOPS: Final = [f"{'a' * 998}{chr(ord('b') + index)}" for index in range(16)]
"""As many and as long as a request may have; a text of one letter nearly matches all of them all the time."""


def many_choices(subject: Subject) -> Iterator[Row]:
    """Keeps 256 texts in work, in turn plain ones and choices with logprobs; another client has four sessions."""
    with subject.emulated(step_ms=10.0) as server:
        body: dict[str, Any] = {"prompt": prompt_of(3), "n": NUM_CHOICES, "max_tokens": 2000, "ignore_eos": True}
        body |= {"logprobs": 20, "stop": _STOPS, "temperature": 1.0}
        probe = ask(server.port, "POST", "/v1/completions", body | {"max_tokens": 1})
        if probe.status != 200:
            raise NotMeasured(f"n: {NUM_CHOICES} got status {probe.status}: this version has no choices")
        plain: dict[str, Any] = {
            "prompt": [prompt_of(3)] * 64,
            "max_tokens": 2000,
            "ignore_eos": True,
            "temperature": 1.0,
        }
        calls = {
            is_attacked: request_bytes(server.port, "POST", "/v1/completions", json.dumps(each).encode())
            for is_attacked, each in ((False, plain), (True, body))
        }
        rates: dict[bool, list[float]] = {False: [], True: []}
        health_s: dict[bool, float] = {False: 0.0, True: 0.0}
        for is_attacked in (False, True) * 2:
            server.wait_until_idle()
            bodies = [{"prompt": prompt_of(i), "max_tokens": 1500, "ignore_eos": True} for i in range(4)]
            with crowd_of(server.port, bodies, address=OTHER_ADDRESS, keeps=True) as crowd:
                if not crowd.wait(lambda: all(each.commits for each in crowd.streams), 20.0):
                    raise NotMeasured("four sessions had no token within 20 s")
                in_flight = 2 if is_attacked else 4
                with attacking(repeat, server.port, [calls[is_attacked]], in_flight, 60.0), health_of(server) as health:
                    rates[is_attacked].append(crowd.tokens_per_s(MEASURE_S))
                health_s[is_attacked] = max(health_s[is_attacked], health.high)
        is_bounded = _refusal(server, {**body, "prompt": [[5], [6]]}) == ("invalid_parameter", "n")
    plain_rate, rate = median(rates[False]), median(rates[True])
    yield Row(
        "40",
        f"two calls of {NUM_CHOICES} choices with 20 logprobs a token: another client's four sessions, step of 10 ms",
        f"{rate:.0f} tokens/s; beside plain texts {plain_rate:.0f} ({plain_rate / max(rate, 1e-9):.1f}x slower); "
        f"health p99 {health_s[True] * 1e3:.0f} ms, {health_s[False] * 1e3:.0f} ms; more in one call "
        f"{'refused' if is_bounded else 'accepted'}",
        "at most 2x slower than beside plain texts; p99 under 50 ms more; more refused",
        2.0 * rate >= plain_rate and health_s[True] - health_s[False] < MAX_HEALTH_S and is_bounded,
        {"tokens_per_s": {"plain": rates[False], "fields": rates[True]}, "health_p99_s": list(health_s.values())},
    )


def _refusal(server: Server, body: dict[str, Any]) -> tuple[str | None, str | None]:
    error = ask(server.port, "POST", "/v1/completions", body).json.get("error", {})
    return error.get("code"), error.get("param")
