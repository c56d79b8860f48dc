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
    """Keeps calls of 128 long choices with logprobs in work, in turn with none; another client has four sessions."""
    with subject.emulated(step_ms=10.0) as server:
        body: dict[str, Any] = {"prompt": prompt_of(3), "n": NUM_CHOICES, "max_tokens": 2000, "ignore_eos": True}
        body |= {"logprobs": 20, "stop": _STOPS, "temperature": 1.0}
        probe = ask(server.port, "POST", "/v1/completions", body | {"max_tokens": 1})
        if probe.status != 200:
            raise NotMeasured(f"n: {NUM_CHOICES} got status {probe.status}: this version has no choices")
        call = request_bytes(server.port, "POST", "/v1/completions", json.dumps(body).encode())
        rates: dict[bool, list[float]] = {False: [], True: []}
        worst_s = 0.0
        for is_attacked in (False, True) * 2:
            server.wait_until_idle()
            bodies = [{"prompt": prompt_of(i), "max_tokens": 1500, "ignore_eos": True} for i in range(4)]
            with crowd_of(server.port, bodies, address=OTHER_ADDRESS, keeps=True) as crowd:
                if not crowd.wait(lambda: all(each.commits for each in crowd.streams), 20.0):
                    raise NotMeasured("four sessions had no token within 20 s")
                if not is_attacked:
                    rates[False].append(crowd.tokens_per_s(MEASURE_S))
                    continue
                with attacking(repeat, server.port, [call], 2, 60.0), health_of(server) as health:
                    rates[True].append(crowd.tokens_per_s(MEASURE_S))
                worst_s = max(worst_s, health.high)
        is_bounded = _refusal(server, {**body, "prompt": [[5], [6]]}) == ("invalid_parameter", "n")
    without, during = median(rates[False]), median(rates[True])
    yield Row(
        "38",
        f"two calls of {NUM_CHOICES} choices with 20 logprobs a token: another client's four sessions, step of 10 ms",
        f"{during:.0f} tokens/s; without {without:.0f} ({without / max(during, 1e-9):.1f}x slower); health p99 "
        f"{worst_s * 1e3:.0f} ms; more in one call {'refused' if is_bounded else 'accepted'}",
        "at most 2.5x slower, as two owners share; p99 under 50 ms; more refused",
        2.5 * during >= without and worst_s < MAX_HEALTH_S and is_bounded,
        {"tokens_per_s": {"without": rates[False], "during": rates[True]}, "health_p99_s": worst_s},
    )


def _refusal(server: Server, body: dict[str, Any]) -> tuple[str | None, str | None]:
    error = ask(server.port, "POST", "/v1/completions", body).json.get("error", {})
    return error.get("code"), error.get("param")
